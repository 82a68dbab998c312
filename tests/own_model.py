"""The models that the project makes itself."""

from __future__ import annotations

import sys
from pathlib import Path

from s4kv_ext import models

sys.path.insert(0, str(Path(__file__).parents[1] / "build"))


def folder(name: str = "smollm2") -> str:
    """Where that model lies; made if it is not there. Another name is taken for a folder."""
    from common import pins
    from fetch import fetch

    if name not in models.VARIANTS:
        return name
    return str(models.make(fetch(pins().files["model"]), name))
