"""Tensor parallelism beside one rank: as two ranks that share one GPU, which says nothing of speed,
and, where there are two GPUs, on both with NCCL and CUDA graphs."""

from __future__ import annotations

import os
from typing import Any

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
    "gpu_memory_utilization": 0.1,
}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ON_ONE_GPU = {
    "disable_custom_all_reduce": True,
    "worker_cls": "tests.gpu.one_device.OneDeviceWorker",
}


def greedy(llm) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, detokenize=False)
    outs = llm.generate(prompts(LENGTHS, seed=1), params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


@pytest.mark.parametrize("gpus", [1, 2])
def test_two_ranks_beside_one(tmp_path, start, monkeypatch, gpus):
    """Each rank has half the KV heads, its own pages and its own channel maps."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    options: dict[str, Any] = OPTIONS | {"enforce_eager": gpus == 1}
    where: dict[str, Any] = TWO_RANKS
    if gpus == 1:
        if not torch.distributed.is_gloo_available():
            pytest.skip("this PyTorch has no gloo")
        monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
        where = TWO_RANKS | ON_ONE_GPU
    model = write(tmp_path / "model", config(), weights())
    want = forced(start(model, kv_cache_dtype="auto", **options), prompts(LENGTHS))
    one = start(model, **options)
    alone, text = forced(one, prompts(LENGTHS), tokens=64), greedy(one)
    two = start(model, **options | where)
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
