"""KV caches as the engine makes them: bytes of a page, and pages of a request.

int4_kivi's come from the specs that the engine registers (specs.py), the others' from vLLM's own. A
page here is one block of all layers on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from s4kv_ext.format import KV_CACHE_DTYPE

if TYPE_CHECKING:
    from vllm.config import ModelConfig

DTYPES = ("auto", "fp8", KV_CACHE_DTYPE)
BLOCK_SIZE = 16
"""Tokens in a block of vLLM's own caches, unless --block-size says otherwise."""


@dataclass(frozen=True)
class Cache:
    """page_bytes: of one page on one GPU. pages: most that a request of so many tokens holds while
    it decodes. start_pages: what a prompt of so many may take, and so the least a server has."""

    dtype: str
    page_bytes: int
    pages: Callable[[int], int]
    start_pages: Callable[[int], int]

    def blocks(self, nbytes: int) -> int:
        """Pages that fit into ``nbytes`` of a GPU."""
        return max(nbytes, 0) // self.page_bytes

    def reported_tokens(self, nbytes: int, max_model_len: int) -> int:
        """What the engine prints as "GPU KV cache size"."""
        return int(self.blocks(nbytes) / self.pages(max_model_len) * max_model_len)

    def requests(self, nbytes: int, context: int) -> int:
        """Requests of ``context`` tokens that run together; none if their prompts do not fit."""
        pool = self.blocks(nbytes) - 1  # page 0 is the null page
        return pool // self.pages(context) if pool >= self.start_pages(context) else 0

    def request_bytes(self, context: int) -> int:
        """Of one request of ``context`` tokens, on one GPU."""
        return self.pages(context) * self.page_bytes


def kv_heads(model: ModelConfig, gpus: int) -> int:
    """Of one GPU; they are repeated if there are more GPUs than heads."""
    return max(1, model.get_total_num_kv_heads() // gpus)


def make(model: ModelConfig, dtype: str, gpus: int = 1, block_size: int = BLOCK_SIZE) -> Cache:
    """The cache of ``--kv-cache-dtype dtype`` of a model on ``gpus`` GPUs."""
    layers = model.get_total_num_hidden_layers()
    heads, head_size = kv_heads(model, gpus), model.get_head_size()
    if dtype == KV_CACHE_DTYPE:
        from s4kv_ext.specs import recent_spec, sealed_spec

        recent = recent_spec(heads, head_size, model.dtype)
        page = sealed_spec(heads, head_size).page_size_bytes
        return Cache(dtype, layers * page, recent.decode_peak_pages, recent.prefill_peak_pages)
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    spec = (MLAAttentionSpec if model.use_mla else FullAttentionSpec)(
        block_size=block_size,
        num_kv_heads=1 if model.use_mla else heads,
        head_size=head_size,
        dtype=model.dtype if dtype == "auto" else torch.uint8,
    )

    def pages(tokens: int) -> int:
        return -(-tokens // block_size)

    return Cache(dtype, layers * spec.page_size_bytes, pages, pages)
