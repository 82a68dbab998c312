"""Choose each layer's channel map from forward passes over token ids.

At start-up one pass over fixed pseudo-random ids, right after the weights are loaded, on every
rank alike: same ids, same weights, same map. ``s4kv calibrate`` runs the same pass over a user's
text and writes a file (``map_file.py``), which then takes the place of the pass at start-up.
Attention in a pass is plain and causal, and needs no cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from s4kv_ext import channel_map, map_file, settings
from s4kv_ext.format import KV_CACHE_DTYPE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from s4kv_ext.impl import Int4KiviImpl

TOKENS = 2048
SEED = 20260714


def observe(impl: Int4KiviImpl, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    """Attention without a cache: of one sequence within ``weigh``, else memory profiling."""
    if not impl.observed:
        impl.profile(query, key, value, output)
        return
    weight = len(query) * channel_map.importance(query, key, impl.scale).double()
    impl.weight = weight if impl.weight is None else impl.weight + weight
    impl.causal_attend(query, key, value, output)


def layers(config: VllmConfig) -> list[Int4KiviImpl]:
    """The int4_kivi layers of a loaded model, in its order."""
    from vllm.model_executor.layers.attention import Attention

    found = config.compilation_config.static_forward_context.values()
    return [
        x.impl for x in found if isinstance(x, Attention) and x.kv_cache_dtype == KV_CACHE_DTYPE
    ]


def weigh(runner: Any, sequences: Iterable[list[int]]) -> list[Tensor]:
    """``channel_map.importance`` of each layer's own KV heads, float64 [H, D] on the CPU.

    A sum over sequences of token ids, weighted by their lengths.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    config: VllmConfig = runner.vllm_config
    impls = layers(config)
    for impl in impls:
        impl.observed, impl.weight = True, None
    for ids in sequences:
        if config.lora_config:
            runner._set_active_loras((0,), (0,) * len(ids), set())  # 0 is "no adapter"
        forward = set_forward_context(
            None, config, num_tokens=len(ids), slot_mapping={}, skip_compiled=True
        )
        with torch.inference_mode(), set_current_vllm_config(config), forward:
            runner.get_model()(
                input_ids=torch.tensor(ids, device=runner.device),
                positions=torch.arange(len(ids), device=runner.device),
            )
    weights = [impl.weight.cpu() for impl in impls if impl.weight is not None]
    missing = len(impls) - len(weights)
    assert not missing, f"{missing} of {len(impls)} layers did not run"
    for impl in impls:
        impl.observed, impl.weight = False, None
    return weights


def weigh_on(worker: Any, sequences: list[list[int]]) -> list[Tensor]:
    """``weigh`` as a worker's remote call."""
    return weigh(worker.model_runner, sequences)


def maps_on(worker: Any) -> list[Tensor]:
    """The map of each layer of a worker, [H, S] int16 on the CPU, as a remote call."""
    impls = layers(worker.vllm_config)
    return [impl.slot_channel.cpu() for impl in impls if impl.slot_channel is not None]


def random_ids(config: VllmConfig) -> list[int]:
    """The fixed ids of the pass at start-up."""
    tokens = min(TOKENS, config.model_config.max_model_len)
    if config.lora_config:  # its buffers are no longer
        tokens = min(tokens, config.scheduler_config.max_num_batched_tokens)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(
        config.model_config.get_vocab_size(), (tokens,), generator=generator
    ).tolist()


def choose(runner: Any, impls: list[Int4KiviImpl]) -> tuple[list[Tensor], str]:
    """The map of each layer, [H, S] int16, and where they come from, for the log."""
    config: VllmConfig = runner.vllm_config
    if settings.plain_keys(config):
        maps = [channel_map.one_slot_each(x.num_kv_heads, x.head_size) for x in impls]
        return maps, "with one slot a channel"
    if path := settings.map_path(config):
        from vllm.distributed import get_tensor_model_parallel_rank as rank

        file = map_file.read(path)
        return file.of_rank(rank(), config.parallel_config.tensor_parallel_size), (
            f"from {path}, hash {file.hash}"
        )
    start = time.perf_counter()
    ids = random_ids(config)
    maps = [channel_map.allocate(w) for w in weigh(runner, [ids])]
    return maps, f"from {len(ids)} tokens in {time.perf_counter() - start:.1f} s"


def calibrate(runner: Any) -> None:
    """Give every int4_kivi layer of a model runner its ``slot_channel``.

    Not within the memory pool of the weights, whose contents sleep mode may discard.
    """
    from vllm.logger import init_logger

    impls = layers(runner.vllm_config)
    before = _allocated(runner.device)
    impls[0].prepare(impls, runner.vllm_config, runner.device)
    maps, source = choose(runner, impls)
    for impl, slot_channel in zip(impls, maps, strict=True):
        impl.slot_channel = slot_channel.to(runner.device)
    if grown := _allocated(runner.device) - before:
        # Memory profiling counts what is there before it only as far as the weights explain it.
        runner.model_memory_usage += grown
    init_logger("vllm.s4kv_ext").info_once(
        "int4_kivi: channel maps of %d layers %s", len(impls), source
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
