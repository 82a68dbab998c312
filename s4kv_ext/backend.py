"""The attention backend vLLM selects for ``--kv-cache-dtype int4_kivi``.

An attention layer and its recent layer (``layer.py``) each have a KV cache group, so each step
brings two sets of metadata. The attention layer computes; the recent layer only owns pages.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from s4kv_ext.format import BLOCK, DTYPES, HEAD_SIZES, KV_CACHE_DTYPE, head_page_bytes


def _platform() -> ModuleType:
    """The module with this platform's ``Impl``, ``Builder`` and ``RecentBuilder``."""
    if current_platform.is_cpu():
        from s4kv_ext import cpu_backend

        return cpu_backend
    from s4kv_ext import cuda_backend

    return cuda_backend


class Int4KiviBackend(AttentionBackend):
    """Backend of the sealed group."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list] = [KV_CACHE_DTYPE]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "INT4_KIVI"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [BLOCK]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_impl_cls() -> Any:
        return _platform().Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return _platform().Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, head_page_bytes(head_size))

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


class RecentBackend(Int4KiviBackend):
    """Backend of the recent group: it has pages and a block table, and computes nothing."""

    @staticmethod
    def get_builder_cls() -> Any:
        return _platform().RecentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [16, 8]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, 2, block_size, head_size)
