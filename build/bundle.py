#!/usr/bin/env python3
"""Pack dist/s4kv-VARIANT.tar: the wheels and deploy/, for an instance or an image to install.

The same inputs give the same bytes: no times, no users, no compression (wheels are compressed).
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import wheel
from common import DIST, ROOT, main

FOLDERS = ("deploy/aws", "deploy/machine")


def build(variant: str) -> Path:
    """The path of the bundle, made anew."""
    files = wheel.build(variant)
    files += [p for folder in FOLDERS for p in sorted((ROOT / folder).iterdir()) if p.is_file()]
    path = DIST / f"s4kv-{variant}.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            info = tarfile.TarInfo(str(file.relative_to(ROOT)))
            info.size = file.stat().st_size
            info.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            with file.open("rb") as f:
                tar.addfile(info, f)
    wheel.tell(path)
    return path


def run() -> None:
    build(wheel.variant_asked(__doc__))


if __name__ == "__main__":
    main(run)
