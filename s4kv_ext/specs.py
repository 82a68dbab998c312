"""KV cache specs of the two groups: their page sizes, and how many pages a request may hold.

Both report the same page size, so sealed and recent pages compete in one pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from s4kv_ext.format import (
    BLOCK,
    RECENT,
    SINKS,
    head_page_bytes,
    recent_page_tokens,
    sealed_tokens,
)
from s4kv_ext.managers import RecentManager, SealedManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def sealed_pages(num_tokens: int) -> int:
    """Sealed pages of a sequence of ``num_tokens`` computed tokens."""
    return sealed_tokens(num_tokens) // BLOCK


def sink_pages(num_computed: int, page_tokens: int) -> int:
    """Pages kept for the sinks alone, once block 0 is sealed."""
    return SINKS // page_tokens if sealed_tokens(num_computed) else 0


def decode_peak_pages(max_len: int, page_tokens: int, drafts: int = 0) -> int:
    """Most pages, of both groups, that a sequence holds while it decodes up to ``max_len`` tokens.

    In the step that seals a block, its recent pages are still there; ``drafts`` may be rejected, so
    their pages and those of the block before them stay longer.
    """

    def pages(t: int) -> int:
        start = t - 1 - 2 * drafts
        window = _ceil_div(t - sealed_tokens(start), page_tokens)
        return sealed_pages(t) + window + sink_pages(start, page_tokens)

    return max(pages(t) for t in range(max(1, max_len - 2 * BLOCK), max_len + 1))


def prefill_peak_pages(max_len: int, page_tokens: int, drafts: int = 0) -> int:
    """Most pages a sequence can hold in any step up to ``max_len``: a chunk that starts and ends
    anywhere holds the windows of both its ends."""
    end = max(
        sealed_pages(t) + _ceil_div(t - sealed_tokens(t), page_tokens)
        for t in range(max(1, max_len - 2 * BLOCK), max_len + 1)
    )
    start = _ceil_div(min(RECENT + BLOCK - 1 + drafts, max_len), page_tokens)
    return end + start + SINKS // page_tokens


@dataclass(frozen=True, kw_only=True)
class SealedSpec(FullAttentionSpec):
    """Pages of BLOCK tokens in int4; ``dtype`` is uint8."""

    @property
    def real_page_size_bytes(self) -> int:
        return self.num_kv_heads * head_page_bytes(self.head_size)

    @classmethod
    def merge(cls, specs: list[SealedSpec]) -> SealedSpec:
        assert all(spec == specs[0] for spec in specs), specs
        return specs[0]

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return sealed_pages(vllm_config.model_config.max_model_len) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class RecentSpec(SlidingWindowSpec):
    """Pages of sinks and unsealed tokens in ``dtype``.

    A SlidingWindowSpec only because upstream hands the admission cap to its subclasses alone.
    ``speculative_tokens``: pages are given back this many tokens late, because with asynchronous
    scheduling the scheduler counts drafts that may yet be rejected.
    """

    speculative_tokens: int = 0

    @property
    def sink_pages(self) -> int:
        return SINKS // self.block_size

    def max_admission_blocks_per_request(self, *, max_model_len: int, **_: int) -> int:
        """However long a chunk is; vLLM's releases call that differently."""
        return self.prefill_peak_pages(max_model_len) - sealed_pages(max_model_len)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        max_len = vllm_config.model_config.max_model_len
        return (self.decode_peak_pages(max_len) - sealed_pages(max_len)) * self.page_size_bytes

    def decode_peak_pages(self, num_tokens: int) -> int:
        """Of both groups."""
        return decode_peak_pages(num_tokens, self.block_size, self.speculative_tokens)

    def prefill_peak_pages(self, num_tokens: int) -> int:
        """Of both groups."""
        return prefill_peak_pages(num_tokens, self.block_size, self.speculative_tokens)


def sealed_spec(num_kv_heads: int, head_dim: int) -> SealedSpec:
    return SealedSpec(
        block_size=BLOCK, num_kv_heads=num_kv_heads, head_size=head_dim, dtype=torch.uint8
    )


def recent_spec(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, speculative_tokens: int = 0
) -> RecentSpec:
    return RecentSpec(
        block_size=recent_page_tokens(head_dim, dtype),
        num_kv_heads=num_kv_heads,
        head_size=head_dim,
        dtype=dtype,
        sliding_window=RECENT + BLOCK,
        page_size_padded=num_kv_heads * head_page_bytes(head_dim),
        speculative_tokens=speculative_tokens,
    )


# A registry that is not empty counts as complete, so the built-in specs must come first.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(SealedSpec, SealedManager, uniform_type_base_spec=FullAttentionSpec)
KVCacheSpecRegistry.register(RecentSpec, RecentManager, uniform_type_base_spec=SlidingWindowSpec)
