"""What was measured, one file a piece, written as soon as it is known: nothing done is lost."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Piece:
    """One measurement: of a side, in a round."""

    side: str
    round: int
    kind: str  # facts, capacity, quality, prompts, speed, lm-eval, fill
    name: str = ""

    @property
    def file(self) -> str:
        label = f"-{self.name.replace('/', '_')}" if self.name else ""
        return f"{self.side}.{self.round}.{self.kind}{label}.json.gz"


class Store:
    """The folder of --out: ``pieces/``, ``logs/``, ``plan.json``, and later the report."""

    def __init__(self, folder: Path, plan: dict[str, Any], resume: bool) -> None:
        self.folder = folder
        self.pieces, self.logs = folder / "pieces", folder / "logs"
        path = folder / "plan.json"
        if path.exists():
            if not resume:
                raise ValueError(
                    f"{folder} holds a run: --resume goes on with it, or another --out"
                )
            old = json.loads(path.read_text())
            new = json.loads(json.dumps(plan))
            if wrong := [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]:
                raise ValueError(
                    f"--resume: {folder} was begun with other settings ({', '.join(wrong)}); "
                    "give the same, or another --out"
                )
        elif resume:
            raise ValueError(f"--resume: {folder} holds no run")
        for d in (self.pieces, self.logs):
            d.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(plan, indent=1).encode())

    def has(self, piece: Piece) -> bool:
        return (self.pieces / piece.file).exists()

    def put(self, piece: Piece, value: Any) -> None:
        write(self.pieces / piece.file, gzip.compress(json.dumps(value).encode(), 6, mtime=0))

    def get(self, piece: Piece) -> Any:
        """None if it was not measured."""
        path = self.pieces / piece.file
        return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else None


def write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    half = path.with_name(f".{path.name}.half")
    try:
        half.write_bytes(data)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
