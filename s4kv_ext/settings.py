"""The user's settings: ``--additional-config '{"int4_kivi": {"map": "FILE"}}'``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from s4kv_ext.format import KV_CACHE_DTYPE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN: dict[str, tuple[str, ...] | str] = {
    "keys": ("slotted", "plain"),
    "map": "a file that `s4kv calibrate` wrote",
    "page_tags": ("on", "off"),
}
"""What each may be: one of some words, or a path that the text describes.

keys: ``slotted`` (0, 1 or 2 slots a channel, by importance), or ``plain`` KIVI (one each).
map: the slotted keys' channels come from a file instead of the pass at start-up.
page_tags: whether each step compares its pages' tags with those that the requests expect.
"""


def given(config: VllmConfig) -> dict[str, Any]:
    """What the user set."""
    extra = config.additional_config
    own = extra.get(KV_CACHE_DTYPE, {}) if isinstance(extra, dict) else {}
    return own if isinstance(own, dict) else {"": own}


def problems(own: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with them, and what to do."""
    known = "known are " + ", ".join(
        f"{name}: {value if isinstance(value, str) else ' or '.join(value)}"
        for name, value in KNOWN.items()
    )
    for name, value in own.items():
        allowed = KNOWN.get(name, ())
        if not (isinstance(value, str) if isinstance(allowed, str) else value in allowed):
            yield f"unknown setting {name}={value!r} in --additional-config", known
    if "map" in own and own.get("keys") == "plain":
        yield "plain keys have no channel map", 'leave out "map" or "keys": "plain"'


def plain_keys(config: VllmConfig) -> bool:
    return given(config).get("keys") == "plain"


def page_tags(config: VllmConfig) -> bool:
    return given(config).get("page_tags", "on") == "on"


def map_path(config: VllmConfig) -> str | None:
    """The file of channel maps, if the user gave one."""
    return given(config).get("map")
