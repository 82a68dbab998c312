"""Page sizes, the pages a request may hold, and what is said about capacity."""

from __future__ import annotations

import pytest
import torch
from schedules import DTYPES, Engine, Settings, make_config, make_kv_cache_config
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
)

from s4kv_ext.capacity import check_and_report
from s4kv_ext.format import BLOCK, SINKS, head_page_bytes, recent_page_tokens, sealed_tokens
from s4kv_ext.specs import (
    RecentSpec,
    SealedSpec,
    decode_peak_pages,
    prefill_peak_pages,
    recent_spec,
    sealed_spec,
)

PAGE_TOKENS = pytest.mark.parametrize("page_tokens", [16, 8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_both_groups_have_pages_of_one_size(heads, head_dim, dtype):
    sealed, recent = sealed_spec(heads, head_dim), recent_spec(heads, head_dim, dtype)
    assert sealed.page_size_bytes == recent.page_size_bytes == heads * head_page_bytes(head_dim)
    assert recent.block_size == recent_page_tokens(head_dim, dtype)
    assert recent.real_page_size_bytes <= recent.page_size_bytes


def layers(count: int, heads: int, dtype: torch.dtype, first: int = 0, drafts: int = 0) -> dict:
    """Specs of ``count`` attention layers and their recent layers, head_dim 128."""
    specs = {}
    for i in range(first, first + count):
        specs[f"layers.{i}.attn"] = sealed_spec(heads, 128)
        specs[f"layers.{i}.attn.recent"] = recent_spec(heads, 128, dtype, drafts)
    return specs


def test_the_groups_of_a_model():
    """vLLM makes two groups, sealed first, and one tensor a layer that both use."""
    s = Settings()
    config = make_config(s)
    cache = get_kv_cache_configs(config, [layers(5, 2, torch.bfloat16)], [1 << 40])[0]
    sealed, recent = cache.kv_cache_groups
    assert type(sealed.kv_cache_spec) is SealedSpec
    assert type(recent.kv_cache_spec) is RecentSpec
    assert [t.shared_by for t in cache.kv_cache_tensors] == [
        [f"layers.{i}.attn", f"layers.{i}.attn.recent"] for i in range(5)
    ]


@PAGE_TOKENS
@pytest.mark.parametrize("drafts", [0, 1, 5, 63])
def test_peaks_bound_what_any_step_holds(page_tokens, drafts):
    """Against a sequence's pages said in tokens, over all chunks and lengths up to 400."""

    def held(c: int, t: int) -> int:
        """In the step from ``c`` to ``t`` tokens; ``drafts`` of ``c`` may have been rejected."""
        kept = range(sealed_tokens(c - drafts), c)
        new = range(max(c, sealed_tokens(t)), t)
        pages = {p // page_tokens for p in (*kept, *new, *range(min(SINKS, t)))}
        return len(pages) + sealed_tokens(t) // BLOCK

    tight = 0.0
    for max_len in (64, 100, 127, 128, 191, 256, 400):
        steps = range(max(1, max_len - 2 * BLOCK), max_len + 1)
        most = max(held(c, t) for t in steps for c in range(max(0, t - 256), t, 3))
        bound = prefill_peak_pages(max_len, page_tokens, drafts)
        assert most <= bound
        tight = max(tight, most / bound)
        decode = max(held(c, t) for t in steps for c in range(max(0, t - 1 - drafts), t))
        assert decode <= decode_peak_pages(max_len, page_tokens, drafts)
    assert tight > 0.95  # the bound is not idle


@PAGE_TOKENS
def test_one_request_really_holds_a_third_of_auto(page_tokens, report):
    """Bytes of its pages while it decodes, head_dim 128, against every token in the model dtype."""
    engine = Engine(Settings(page_tokens, max_model_len=8192, max_num_batched_tokens=2048))
    held = {}
    for length in (4096, 8000):
        rid = engine.add(list(range(length - 200)), max_tokens=201)
        while (request := engine.scheduler.requests[rid]).num_output_tokens < 70:
            engine.step()
        engine.peak.clear()  # the prompt is computed: from here on it decodes
        while request.num_computed_tokens < length:
            engine.step()
        held[length] = engine.peak[rid]
        engine.run()
        plain = length * 2 * 128 * DTYPES[page_tokens].itemsize
        ratio = plain / (held[length] * head_page_bytes(128))
        report(
            f"{length} tokens, {page_tokens} a recent page: at most {held[length]} pages,"
            f" {ratio:.2f} times less than auto"
        )
        assert held[length] == decode_peak_pages(length, page_tokens)
        if page_tokens == 16:  # bf16
            assert ratio >= {4096: 3.0, 8000: 3.2}[length]
    assert not engine.leaked()


@PAGE_TOKENS
def test_prefill_takes_hardly_more_than_decoding(page_tokens, report):
    """One 4096-token prompt in chunks of 2048, against decoding around 4096 tokens."""
    engine = Engine(Settings(page_tokens, max_model_len=8192, max_num_batched_tokens=2048))
    rid = engine.add(list(range(4096)), max_tokens=130)
    engine.step(), engine.step()
    prefill = engine.peak.pop(rid)
    steady = decode_peak_pages(4096, page_tokens)
    engine.run()
    report(f"{page_tokens} a recent page: {prefill} pages in prefill, {steady} after")
    assert engine.peak[rid] in (steady, steady + 1, steady + 2)
    assert prefill <= 1.1 * steady


def really_run(s: Settings, count: int, prompt: int) -> bool:
    """Whether ``count`` requests of max_model_len tokens run at once and none is preempted."""
    engine = Engine(s)
    for i in range(count):
        engine.add([i] * prompt, max_tokens=s.max_model_len)
    most = 0
    while engine.unfinished and not engine.preemptions:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    return most == count and not engine.preemptions


@PAGE_TOKENS
@pytest.mark.parametrize("pages", [100, 400, 1500])
def test_printed_concurrency_is_what_runs(page_tokens, pages, report):
    """Requests of 4096 tokens that run at once, none preempted."""
    s = Settings(
        page_tokens, 4096, pages, max_num_batched_tokens=2048, max_num_seqs=64, prefix_caching=False
    )
    config = make_config(s)
    printed = get_max_concurrency_for_kv_cache_config(config, make_kv_cache_config(config, s))
    count = int(printed * 1.1) + 1
    while not really_run(s, count, prompt=4000):
        count -= 1
    report(
        f"{page_tokens} a recent page, {pages} pages: {printed:.2f} times 4096 tokens"
        f" printed, {count} run"
    )
    assert min(abs(printed - count), abs(int(printed) - count)) <= 0.1 * count


@PAGE_TOKENS
@pytest.mark.parametrize("drafts", [0, 5, 63])
def test_a_pool_too_small_is_refused_and_the_named_length_works(page_tokens, drafts):
    need = prefill_peak_pages(1000, page_tokens, drafts)
    for pages in (need, need - 1, need - 9, 30):
        s = Settings(page_tokens, 1000, pages, max_num_batched_tokens=300, drafts=drafts)
        config = make_config(s)
        # vLLM's own check comes first; here it is ours that speaks.
        config.cache_config.num_gpu_blocks_override = None
        cache = get_kv_cache_configs(config, [layers(1, 1, DTYPES[page_tokens], drafts=drafts)],
                                     [1 << 40])[0]  # fmt: skip
        cache.num_blocks = pages + 1
        if pages == need:
            check_and_report(config, cache)
            continue
        with pytest.raises(ValueError, match="a prompt of 1000 tokens takes up to") as error:
            check_and_report(config, cache)
        fits = int(str(error.value).split("--max-model-len ")[1].split()[0])
        assert prefill_peak_pages(fits, page_tokens, drafts) <= pages
        assert prefill_peak_pages(fits + 1, page_tokens, drafts) > pages
        s = Settings(page_tokens, fits, pages, max_num_batched_tokens=100, drafts=drafts)
        engine = Engine(s)
        check_and_report(make_config(s), engine.kv_cache_config)
        engine.add(list(range(fits - 1)), max_tokens=1)
        engine.run()
        assert not engine.leaked()


def test_nothing_fits():
    s = Settings(max_model_len=64, pages=64)
    config = make_config(s)
    cache = make_kv_cache_config(config, s)
    cache.num_blocks = 3
    with pytest.raises(ValueError, match="and the KV cache has 2; raise --kv-cache-memory-bytes"):
        check_and_report(config, cache)


def test_an_automatic_length_is_reduced():
    """With --max-model-len auto vLLM counts a request as it decodes: a few pages too short."""
    pages = decode_peak_pages(20_000, 16)
    config = make_config(Settings(max_model_len=30_000, pages=pages))
    config.model_config.original_max_model_len = -1
    cache = get_kv_cache_configs(config, [layers(1, 1, torch.bfloat16)], [1 << 40])[0]
    assert config.model_config.max_model_len >= 20_000
    check_and_report(config, cache)
    fits = config.model_config.max_model_len
    assert 19_400 < fits < 20_000
    assert prefill_peak_pages(fits, 16) <= pages < prefill_peak_pages(fits + 1, 16)


# Layers, KV heads, bytes a token of int4_kivi and of bf16; head_dim 128.
MODELS = {
    "Qwen2.5-1.5B": (28, 2, 8344, 28672),
    "Qwen2.5-7B": (28, 4, 16688, 57344),
    "Llama-3.2-3B": (28, 8, 33376, 114688),
    "Llama-3.1-8B": (32, 8, 38144, 131072),
}


@pytest.mark.parametrize("model", MODELS)
def test_bytes_a_sealed_token(model):
    """As the pool is really sized: a later vLLM that counts otherwise is seen here."""
    count, heads, sealed_bytes, plain_bytes = MODELS[model]
    config = make_config(Settings())
    config.cache_config.num_gpu_blocks_override = None
    cache = get_kv_cache_configs(config, [layers(count, heads, torch.bfloat16)], [1 << 30])[0]
    total = sum(t.size for t in cache.kv_cache_tensors)
    assert total / cache.num_blocks / BLOCK == sealed_bytes
    assert cache.num_blocks == (1 << 30) // (sealed_bytes * BLOCK)
    assert plain_bytes == count * heads * 128 * 2 * 2
    assert 3.43 < plain_bytes / sealed_bytes < 3.44


def test_memory_is_checked_for_each_pipeline_stage():
    """Stages of 10 and 20 layers: each stage needs memory for its own."""
    s = Settings(max_model_len=4096)
    config = make_config(s)
    config.cache_config.num_gpu_blocks_override = None
    stages = [layers(10, 8, torch.bfloat16), layers(20, 8, torch.bfloat16, first=10)]
    page = 8 * head_page_bytes(128)
    need = decode_peak_pages(4096, 16) * page
    small, large = get_kv_cache_configs(config, stages, [10 * need, 20 * need])
    assert small.num_blocks == large.num_blocks == need // page
    assert sum(t.size for t in small.kv_cache_tensors) == 10 * need
    assert sum(t.size for t in large.kv_cache_tensors) == 20 * need
    for memory in ([10 * need - 1, 20 * need], [10 * need, 20 * need - 1]):
        with pytest.raises(ValueError, match="4096"):
            get_kv_cache_configs(config, stages, memory)
