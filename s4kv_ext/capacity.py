"""The engine's last look at its KV cache before it serves: is one request safe, and what fits."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from s4kv_ext.format import BLOCK
from s4kv_ext.specs import RecentSpec, SealedSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

REPORTED_CONTEXT = 4096


def density(sealed: SealedSpec, recent: RecentSpec, num_tokens: int) -> float:
    """How many times less memory a sequence takes than in the model's dtype, at its peak."""
    plain = num_tokens * 2 * recent.num_kv_heads * recent.head_size * recent.dtype.itemsize
    return plain / (recent.decode_peak_pages(num_tokens) * sealed.page_size_bytes)


def check_and_report(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Called once the number of pages is known.

    Raises ValueError if a prompt of max_model_len tokens could not be computed: the check that
    vLLM makes counts a request as it decodes, and a chunk of a prompt holds a few pages more. If
    vLLM chose the length (--max-model-len auto), it is reduced instead.
    """
    from vllm.logger import init_logger

    specs = {type(g.kv_cache_spec): g for g in kv_cache_config.kv_cache_groups}
    if SealedSpec not in specs:
        return
    sealed, recent = specs[SealedSpec].kv_cache_spec, specs[RecentSpec].kv_cache_spec
    assert isinstance(sealed, SealedSpec) and isinstance(recent, RecentSpec)
    pool = kv_cache_config.num_blocks - 1  # page 0 is the null page
    model = vllm_config.model_config
    max_len = model.max_model_len

    need = recent.prefill_peak_pages
    fits = bisect_right(range(1, max_len + 1), pool, key=need)
    if fits and model.original_max_model_len == -1:
        max_len = model.max_model_len = fits
    if fits < max_len:
        remedy = f"set --max-model-len {fits} or less, or " if fits else ""
        raise ValueError(
            f"--kv-cache-dtype int4_kivi: a prompt of {max_len} tokens takes up to {need(max_len)} "
            f"pages and the KV cache has {pool}; {remedy}raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization"
        )
    layers = len(specs[SealedSpec].layer_names)
    context = min(REPORTED_CONTEXT, max_len)
    init_logger("vllm.s4kv_ext").info_once(
        "int4_kivi: %d layers, %.0f bytes a sealed token, %d pages; a request of %d tokens takes "
        "%d pages, %.2f times less than in %s",
        layers,
        layers * sealed.page_size_bytes / BLOCK,
        pool,
        context,
        recent.decode_peak_pages(context),
        density(sealed, recent, context),
        str(recent.dtype).removeprefix("torch."),
    )
