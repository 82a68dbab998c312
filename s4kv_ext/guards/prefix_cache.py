"""Blocks that were never computed leave the prefix cache, and are not counted as sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s4kv_ext.format import BLOCK, sealed_tokens
from s4kv_ext.managers import SealedManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def forget_uncomputed(manager: KVCacheManager, request: Request) -> None:
    """Called before a request is preempted by the very pass that scheduled it.

    vLLM caches a block when it schedules its tokens. ``request.num_computed_tokens`` does not count
    those of the current pass yet, and no other request can have hit them: where a pass preempts, it
    admits nobody. Nor will the pages it took be sealed.
    """
    for group in manager.coordinator.single_type_managers:
        held = group.req_to_blocks.get(request.request_id, ())
        if isinstance(group, SealedManager):
            blocks = held[sealed_tokens(request.num_computed_tokens) // BLOCK :]
            group.num_taken -= len(blocks)
        else:
            blocks = held[request.num_computed_tokens // group.block_size :]
        manager.block_pool.evict_blocks(
            {b.block_id for b in blocks if not b.is_null and b.block_hash is not None}
        )
