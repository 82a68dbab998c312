"""Tensor parallelism beside one rank. Two ranks share one GPU here, so it says nothing of speed."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.engines import LIMIT, config, forced, pages_are_back, prompts, weights, write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytest.importorskip("vllm")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

LENGTHS = (1, 15, 65, 129, 700, 2001)
OPTIONS = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 29,
    "enforce_eager": True,
}
TWO_RANKS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
    "worker_cls": "tests.gpu.one_device.OneDeviceWorker",
}


def greedy(llm) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, detokenize=False)
    outs = llm.generate(prompts(LENGTHS, seed=1), params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


def test_two_ranks_beside_one(tmp_path, start, monkeypatch):
    """Each rank has half the KV heads, its own pages and its own channel maps."""
    from s4kv_ext import checks

    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    monkeypatch.setattr(checks, "_platform", lambda config: iter(()))  # whatever it refuses
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    model = write(tmp_path / "model", config(), weights())
    want = forced(start(model, kv_cache_dtype="auto", **OPTIONS), prompts(LENGTHS))
    one = start(model, **OPTIONS)
    alone, text = forced(one, prompts(LENGTHS), tokens=64), greedy(one)
    two = start(model, **OPTIONS | TWO_RANKS)
    together, text_of_two = forced(two, prompts(LENGTHS), tokens=64), greedy(two)
    spread = want.std()
    errors = {
        "one rank": ((alone - want).abs().mean() / spread).item(),
        "two ranks": ((together - want).abs().mean() / spread).item(),
        "two beside one": ((together - alone).abs().mean() / spread).item(),
    }
    same = [sum(a == b for a, b in zip(x, y)) for x, y in zip(text, text_of_two)]
    print("|dlogp| in the spread:", {k: f"{v:.4f}" for k, v in errors.items()})
    print(f"tokens equal of 100: {same}")
    assert errors["two ranks"] < LIMIT[256]
    assert errors["two ranks"] < 1.1 * errors["one rank"]
    assert errors["two beside one"] < LIMIT[256]
    assert pages_are_back(two)
