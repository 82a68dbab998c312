"""What the patched ``Attention`` layer calls: its KV cache spec, and the layer that owns its
recent pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from s4kv_ext.backend import RecentBackend
from s4kv_ext.impl import RECENT_SUFFIX
from s4kv_ext.specs import SealedSpec, recent_spec, sealed_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheSpec


class RecentLayer(AttentionLayerBase):
    """A layer that computes nothing: through it the model runner finds the recent group."""

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.kv_cache = torch.tensor([])  # bound by the model runner

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RecentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        speculative = vllm_config.speculative_config
        drafts = speculative.num_speculative_tokens if speculative else 0
        return recent_spec(self.num_kv_heads, self.head_dim, self.dtype, drafts)


def attach_recent_layer(layer: Any, vllm_config: VllmConfig) -> None:
    """Register the recent layer of an ``Attention`` layer beside it."""
    layers = vllm_config.compilation_config.static_forward_context
    layers[layer.layer_name + RECENT_SUFFIX] = RecentLayer(
        layer.num_kv_heads, layer.head_size, layer.dtype
    )


def sealed_layer_spec(layer: Any) -> SealedSpec:
    """KV cache spec of an ``Attention`` layer."""
    return sealed_spec(layer.num_kv_heads, layer.head_size)
