"""Which model is this? Told from its files before any weights load, for little reading.

revision  the commit, of a model that comes from a hub
weights   a hash of config.json and of 1024 evenly spread samples of the weights' files, 16 MiB in
          all: a fine-tuned model has the same shapes and sizes, but not the same bytes

Two models are the same if either is: a download and a hub's cache of it have equal ``weights``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

SAMPLES = 1024
SAMPLE_BYTES = 16 << 10
KINDS = (".safetensors", ".bin", ".pt", ".gguf")
VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of config.json that differ between copies of one model."""


@dataclass(frozen=True)
class Identity:
    """The name is for people; revision and weights are empty where they cannot be told."""

    model: str
    revision: str
    weights: str

    @classmethod
    def of(cls, model: ModelConfig, name: str = "") -> Identity:
        path = Path(model.model)
        return cls(
            name or (path.name if path.exists() else model.model),
            getattr(model.hf_config, "_commit_hash", None) or "",
            fingerprint(model_files(model.model, model.revision)),
        )

    def differs(self, other: Identity) -> str:
        """Why the other is not the same model; empty if it is."""
        pairs = ((self.revision, other.revision), (self.weights, other.weights))
        known = [(mine, its) for mine, its in pairs if mine and its]
        if any(mine == its for mine, its in known):
            return ""
        if not known:
            return f"and {other.model} must be downloaded before the two can be compared"
        return f"and {other.model} has other weights"


def model_files(model: str, revision: str | None) -> list[Path]:
    """config.json and the weights, by name: as far as a folder has them, or all of them from a
    hub's cache, or none."""
    path = Path(model)
    if path.is_file():
        return [path]
    if path.is_dir():
        return [path / "config.json", *weight_files(path)]
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not a name that a hub could have
        return []
    weights = weight_files(Path(found).parent) if isinstance(found, str) else []
    return [Path(str(found)), *weights] if weights else []


def weight_files(folder: Path) -> list[Path]:
    """Files of the first kind that there is; none with dummy weights."""
    for kind in KINDS:
        if found := sorted(folder.glob(f"*{kind}")):
            return found
    return []


def fingerprint(files: list[Path]) -> str:
    """16 hex digits for a model's files; empty for none."""
    if not files:
        return ""
    h = hashlib.sha256()
    weights = [f for f in files if f.name != "config.json"]
    for path in set(files) - set(weights):
        config = json.loads(path.read_text())
        known = {k: v for k, v in config.items() if k not in VOLATILE}
        h.update(json.dumps(known, sort_keys=True).encode())
    total = sum(f.stat().st_size for f in weights)
    for path in weights:
        size = path.stat().st_size
        h.update(f"{path.name} {size}".encode())
        count = max(1, SAMPLES * size // max(1, total))
        last = max(0, size - SAMPLE_BYTES)
        with path.open("rb") as f:
            for i in range(count):
                f.seek(last * i // max(1, count - 1))
                h.update(f.read(SAMPLE_BYTES))
    return h.hexdigest()[:16]
