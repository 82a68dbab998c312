"""Bounds that the environment of the server may move."""

from __future__ import annotations

import os


def limit(variable: str, default: int) -> int:
    """The variable's value, or the default where it is not set. Raises ValueError if it is no
    positive number."""
    given = os.environ.get(variable, "").strip()
    if given and not (given.isascii() and given.isdigit() and int(given)):
        raise ValueError(f"the variable {variable} is no positive number: {given[:100]!r}")
    return int(given) if given else default
