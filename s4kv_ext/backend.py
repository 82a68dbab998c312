"""The attention backend vLLM selects for ``--kv-cache-dtype int4_kivi``.

An attention layer and its recent layer (``layer.py``) each have a KV cache group, so each step
brings two sets of metadata. The attention layer computes; the recent layer only owns pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from s4kv_ext import calibrate, cpu_ops
from s4kv_ext.format import BLOCK, DTYPES, HEAD_SIZES, KV_CACHE_DTYPE, SINKS, head_page_bytes
from s4kv_ext.reference import Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

RECENT_SUFFIX = ".recent"


@dataclass
class Metadata:
    """One group's share of a step: the fields of ``reference.Step``, with this group's table."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        m = common_attn_metadata
        return Metadata(m.query_start_loc, m.seq_lens, m.block_table_tensor)


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
    def get_impl_cls() -> type[Int4KiviImpl]:
        return Int4KiviImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

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
    """Backend of the recent group: another page shape, the same metadata."""

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


class Int4KiviImpl(AttentionImpl):
    """Attention of one layer: store, seal, attend (``reference.py`` says what that means)."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = KV_CACHE_DTYPE,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        from s4kv_ext.checks import check_layer

        check_layer(
            head_size=head_size,
            attn_type=attn_type,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            **unsupported,
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.slot_channel: Tensor | None = None  # set by calibrate.py before any request
        cpu_ops.load()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, heads, D], key and value [T, H, D], output [T, heads, D], model dtype;
        kv_cache: the sealed pages."""
        if attn_metadata is None:
            return calibrate.observe(self, query, key, value, output)
        assert self.slot_channel is not None, "no channel map: the layer was never calibrated"
        context = get_forward_context()
        name = layer.layer_name + RECENT_SUFFIX
        recent = context.no_compile_layers[name].kv_cache
        step = Step(
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            context.attn_metadata[name].block_table,
        )
        cpu_ops.store_and_seal(key, value, kv_cache, recent, step, self.slot_channel)
        cpu_ops.attend(
            query, key, value, kv_cache, recent, step, self.slot_channel, self.scale, output
        )
        return output
