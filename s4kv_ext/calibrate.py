"""Choose each layer's channel map from one forward pass over fixed pseudo-random token ids.

The pass runs right after the weights are loaded, on every rank alike: same ids, same weights,
same map. Attention in it is plain and causal, and needs no cache.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from s4kv_ext import channel_map
from s4kv_ext.format import KV_CACHE_DTYPE
from s4kv_ext.settings import plain_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from s4kv_ext.impl import Int4KiviImpl

TOKENS = 2048
SEED = 20260714


def observe(impl: Int4KiviImpl, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    """Attention without a cache: the first call of a layer chooses its map, later ones are
    memory profiling."""
    if impl.slot_channel is not None:
        impl.profile(query, key, value, output)
        return
    impl.slot_channel = channel_map.allocate(channel_map.importance(query, key)).to(key.device)
    impl.causal_attend(query, key, value, output)


def calibrate(runner: Any) -> None:
    """Give every int4_kivi layer of a model runner its ``slot_channel``.

    Not within the memory pool of the weights, whose contents sleep mode may discard.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.logger import init_logger
    from vllm.model_executor.layers.attention import Attention

    config: VllmConfig = runner.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    impls = [
        x.impl for x in layers if isinstance(x, Attention) and x.kv_cache_dtype == KV_CACHE_DTYPE
    ]
    impls[0].prepare(impls, config, runner.device)
    if plain_keys(config):
        for impl in impls:
            plain = channel_map.one_slot_each(impl.num_kv_heads, impl.head_size)
            impl.slot_channel = plain.to(runner.device)
        return
    start = time.perf_counter()
    tokens = min(TOKENS, config.model_config.max_model_len)
    if config.lora_config:  # its buffers are no longer; 0 is "no adapter"
        tokens = min(tokens, config.scheduler_config.max_num_batched_tokens)
        runner._set_active_loras((0,), (0,) * tokens, set())
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = config.model_config.get_vocab_size()
    ids = torch.randint(vocabulary, (tokens,), generator=generator).to(runner.device)
    positions = torch.arange(tokens, device=runner.device)
    with (
        torch.inference_mode(),
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=tokens, slot_mapping={}, skip_compiled=True),
    ):
        runner.get_model()(input_ids=ids, positions=positions)
    missing = [impl for impl in impls if impl.slot_channel is None]
    assert not missing, f"{len(missing)} of {len(impls)} layers did not run"
    init_logger("vllm.s4kv_ext").info_once(
        "int4_kivi: channel maps of %d layers from %d tokens in %.1f s",
        len(impls), tokens, time.perf_counter() - start,
    )  # fmt: skip
