"""The user's settings: ``--additional-config '{"int4_kivi": {"keys": "plain"}}'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from s4kv_ext.format import KV_CACHE_DTYPE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN = {"keys": ("slotted", "plain")}
"""keys: ``slotted`` (0, 1 or 2 slots a channel, by importance), or ``plain`` KIVI (one each)."""


def given(config: VllmConfig) -> dict[str, Any]:
    """What the user set."""
    extra = config.additional_config
    return dict(extra.get(KV_CACHE_DTYPE, {})) if isinstance(extra, dict) else {}


def plain_keys(config: VllmConfig) -> bool:
    return given(config).get("keys") == "plain"
