"""int4_kivi in the engine on a GPU: the same model with a full-precision cache is the judge."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.engines import (
    LIMIT,
    config,
    forced,
    leads,
    pages_are_back,
    prompts,
    weights,
    write,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytest.importorskip("vllm")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@pytest.fixture(scope="module", params=[128, 64], ids=lambda d: f"head_dim{d}")
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write(folder, config(request.param), weights(request.param))


def greedy(llm, lengths, tokens: int = 200) -> list:
    """Twice: the second time through prefix hits, where the pool was large enough to keep all."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=2
    )
    outs = [llm.generate(prompts(lengths), params, use_tqdm=False) for _ in range(2)]
    hits = [o.num_cached_tokens for o in outs[1]]
    assert all(h in (0, max(0, n - 65) // 64 * 64) for h, n in zip(hits, lengths)), hits
    return [o for out in outs for o in out]


LENGTHS = (1, 15, 63, 65, 129, 200, 1000, 3001, 5000)


def test_forced_logprobs_and_text(model, start):
    """Chunks of 2048 and of 256 beside a bf16 cache; graphs beside eager."""
    want = forced(start(model, kv_cache_dtype="auto"), prompts(LENGTHS))
    for chunk, limit in LIMIT.items():
        llm = start(model, max_num_batched_tokens=chunk)
        got = forced(llm, prompts(LENGTHS))
        error = (got - want).abs().mean().item()
        spread = want.std().item()
        print(f"chunk {chunk}: |dlogp| {error:.4f} of a spread of {spread:.3f}")
        assert error < limit * spread
        graphs = greedy(llm, LENGTHS)
        assert pages_are_back(llm)
    eager = greedy(start(model, max_num_batched_tokens=256, enforce_eager=True), LENGTHS)
    assert max(leads(graphs, eager), default=0) < 1.5


def test_many_requests_and_preemption(model, start):
    """A pool for a few of 32 requests: all end, pages come back, the log-probabilities hold."""
    lengths = [300 + 37 * i for i in range(32)]
    want = forced(start(model, kv_cache_dtype="auto"), prompts(lengths))
    llm = start(model, num_gpu_blocks_override=200, max_num_batched_tokens=512, max_model_len=2048)
    assert all(len(o.outputs[0].token_ids) == 200 for o in greedy(llm, lengths[:8]))
    error = (forced(llm, prompts(lengths)) - want).abs().mean().item()
    print(f"|dlogp| {error:.4f} of a spread of {want.std().item():.3f}")
    assert error < LIMIT[256] * want.std().item()
    assert pages_are_back(llm)
