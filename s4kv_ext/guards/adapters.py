"""Adapters that share a name share no pages, nor do an adapter and a salt."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

_served = False
_loads: Counter[int] = Counter()  # in place, by adapter id
_first: dict[str, tuple[int, str, int]] = {}  # by name


def engine_starts(config: VllmConfig) -> None:
    """Called in the engine's process before the first request."""
    global _served
    _served = config.lora_config is not None


def salt_keys(salt: str) -> list[str]:
    """What a request's `cache_salt` adds to its first hash: the salt, as in other engines; where
    adapters are served with a mark, for their names stand alone in the same place."""
    return [salt, "salt"] if _served else [salt]


def loading(adapter: LoRARequest) -> LoRARequest:
    """Called in the engine before an adapter is loaded."""
    _loads[adapter.lora_int_id] += adapter.load_inplace
    return adapter


def hash_keys(adapter: LoRARequest) -> list[str]:
    """What the hashes of its pages begin with: the name, as in other engines, of the first adapter
    that had it here; with what tells it from that one, of any later."""
    it = adapter.lora_int_id, adapter.lora_path, _loads[adapter.lora_int_id]
    name = adapter.lora_name
    return [name] if _first.setdefault(name, it) == it else [name, "another", *map(str, it)]
