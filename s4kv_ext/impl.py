"""Attention of one int4_kivi layer, as far as it is the same on every platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from s4kv_ext import calibrate
from s4kv_ext.checks import check_layer
from s4kv_ext.format import KV_CACHE_DTYPE

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

RECENT_SUFFIX = ".recent"


class Int4KiviImpl(AttentionImpl):
    """Store, seal, attend: ``reference.py`` says what that means."""

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
        self.observed = False  # these two are calibrate.py's: is this a pass of its own,
        self.weight: Tensor | None = None  # and what it has seen

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, heads, D], key and value [T, H, D], output [T, heads, D], model dtype;
        kv_cache: the sealed pages."""
        if attn_metadata is None:
            calibrate.observe(self, query, key, value, output)
        else:
            assert self.slot_channel is not None, "no channel map: the layer was never calibrated"
            context = get_forward_context()
            name = layer.layer_name + RECENT_SUFFIX
            recent = context.no_compile_layers[name].kv_cache
            table = context.attn_metadata[name].block_table
            self.step(query, key, value, kv_cache, recent, attn_metadata, table, output)
        return output

    @classmethod
    def prepare(cls, impls: list[Int4KiviImpl], config: VllmConfig, device: torch.device) -> None:
        """Whatever the layers of one model share, before memory is profiled; in model order."""

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sealed: Tensor,
        recent: Tensor,
        metadata: Any,
        recent_table: Tensor,
        output: Tensor,
    ) -> None:
        """One step of this layer; metadata is that of the sealed group."""
        raise NotImplementedError

    def causal_attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Plain causal attention of one sequence, without a cache."""
        raise NotImplementedError

    def profile(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Take as much memory as the largest step does; the result does not matter."""
        output.zero_()
