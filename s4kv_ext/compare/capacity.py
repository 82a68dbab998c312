"""What a KV cache holds, as the server says it."""

from __future__ import annotations

import re
from typing import Any

MEMORY = re.compile(r"Available KV cache memory: ([\d.]+) GiB")


def read(facts: dict[str, Any], log: str) -> dict[str, Any]:
    """Blocks, tokens, bytes a token, and how many of the longest requests fit at once; None where
    the server tells nothing."""
    cache, engines = facts["cache"], facts["engines"]

    def number(name: str) -> float | None:
        value = cache.get(name, "None")
        return None if value == "None" else float(value)

    memory = number("kv_cache_memory_bytes")
    if memory is None and (told := MEMORY.search(log)):
        memory = float(told[1]) * 2**30
    tokens = number("kv_cache_size_tokens")
    return {
        "kv_blocks": number("num_gpu_blocks"),
        "kv_tokens": tokens and tokens * engines,
        "max_concurrency": number("kv_cache_max_concurrency"),
        "max_model_len": facts["max_model_len"],
        "memory_bytes": memory and memory * engines,
        "bytes_a_token": memory / tokens if memory and tokens else None,
    }
