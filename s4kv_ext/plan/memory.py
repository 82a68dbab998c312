"""What a GPU has left for the KV cache once vLLM has looked: a model of that look.

At startup vLLM loads the weights, runs one step of --max-num-batched-tokens without attention, and
gives the cache

    utilization x total - weights - activations - FIXED

Activations
    The peak of that step, in the model's dtype. It is the larger of two moments. In an MLP: the
    residual, gate and up for every token and their product (hidden + 3 x intermediate values a
    token; in a mixture of experts as its kernel caches them, so many experts a token). In the
    sampler: the logits of --max-num-seqs requests in the model's dtype and in float32 beside the
    hidden states. Tensor parallelism divides the MLP's.

FIXED
    What grows with neither: kernels that CUDA loads, cuBLAS workspaces, hidden states that stay
    alive. Not derived but measured, once, so that the sum is what an H200 reported for the
    Qwen2.5-7B shape (bench/results/engine_qwen2.5-7b.json: utilization 0.85, 8192 tokens, 256
    requests). The cache of that run had 120,763 blocks of 0.875 MiB with bf16, twice as many with
    fp8, and 103,742 pages of 1.0186 MiB with int4_kivi, whose workspace did not count yet:
    105,667 MiB each time. So the KV cache dtype changes nothing here, and

        0.85 x 143,156 - 14,526 (weights) - 944 (activations) - 105,667 = 545 MiB

    On other GPUs, and with NCCL's buffers under tensor parallelism, it has not been measured.

int4_kivi's workspace
    It counts as weights; ``sizing`` takes it from the cache of that dtype alone.

What the engine does not count
    CUDA's context, CUDA graphs and the runner's buffers come out of the part of the GPU that
    --gpu-memory-utilization leaves: ``outside``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from s4kv_ext.plan.gpus import MIB

if TYPE_CHECKING:
    from vllm.config import ModelConfig

FIXED = 545 * MIB


@dataclass(frozen=True)
class Limits:
    """vLLM's options that decide over memory. utilization: of the GPU's total."""

    utilization: float = 0.92
    batched_tokens: int = 2048
    sequences: int = 256

    @classmethod
    def default(cls, large_gpu: bool) -> Limits:
        """Of ``vllm serve``: get_batch_defaults in its engine/arg_utils.py."""
        return cls(batched_tokens=8192, sequences=1024) if large_gpu else cls()


def activations(model: ModelConfig, limits: Limits, gpus: int) -> int:
    """Bytes on each GPU at the peak of the profiling step."""
    text, width = model.hf_text_config, model.dtype.itemsize
    hidden, tokens = model.get_hidden_size(), limits.batched_tokens
    mlp = tokens * (hidden + 3 * _intermediate(text) // gpus) * width
    if experts := model.get_num_experts():
        chosen = getattr(text, "num_experts_per_tok", experts)
        inner = (getattr(text, "moe_intermediate_size", 0) or _intermediate(text)) // gpus
        cached = chosen * (max(2 * inner, hidden) + inner)
        mlp = max(mlp, tokens * (2 * hidden + cached) * width)
    logits = limits.sequences * model.get_vocab_size() * (width + 4)
    return max(mlp, logits + tokens * hidden * width)


def _intermediate(text) -> int:
    return getattr(text, "intermediate_size", None) or 4 * text.hidden_size


def for_cache(total: int, weights: int, activation: int, limits: Limits) -> int:
    """Bytes left for the KV cache on one GPU of ``total`` bytes; negative if nothing is."""
    return int(total * limits.utilization) - weights - activation - FIXED


def outside(total: int, limits: Limits) -> int:
    """Bytes of a GPU that the engine leaves alone."""
    return total - int(total * limits.utilization)
