"""With an API key everything needs it, but what says whether the server lives."""

from __future__ import annotations

import os

OPEN = frozenset({"/health", "/ping"})
VARIABLE = "S4KV_OPEN_PATHS"  # more of them, by comma: "/metrics,/version"


def guarded(path: str) -> bool:
    """Whether a path needs the key. A path that nobody thought of does."""
    more = {p.strip() for p in os.environ.get(VARIABLE, "").split(",") if p.strip()}
    # /metrics is a mounted application, to which a slash is added.
    return path not in OPEN and path not in more and path.removesuffix("/") not in more
