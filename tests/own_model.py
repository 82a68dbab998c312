"""The models that the project makes itself."""

from __future__ import annotations

import sys
from pathlib import Path

from s4kv_ext import models

sys.path.insert(0, str(Path(__file__).parents[1] / "build"))


def source() -> Path:
    """The file that they are made from."""
    from common import pins
    from fetch import fetch

    return fetch(pins().files["model"])


def folder(name: str = "smollm2") -> str:
    """Where that model lies; made if it is not there. Another name is taken for a folder."""
    return str(models.make(source(), name)) if name in models.VARIANTS else name
