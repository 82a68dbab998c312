"""Page tags on a GPU: the comparison is the reference's, and a wrong page ends its request under
full CUDA graphs, with either model runner, also with a step in flight."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tag_cases import IN_REACH, SIZES, assert_same, on, random_case

from s4kv_ext import cuda_ops
from s4kv_ext.page_check import PageCheck
from tests.gpu.cases import microseconds
from tests.gpu.engines import config, leads, pages_are_back, prompts, weights, write

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
LEAN = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 29,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.mark.parametrize("pinned", [(), IN_REACH], ids=["on the GPU", "pinned"])
@pytest.mark.parametrize("page_tokens", [8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_the_reference_s_result(size: str, page_tokens: int, pinned: tuple[str, ...]) -> None:
    rows = wrong = 0
    for seed in range(5):
        case = random_case(seed, page_tokens=page_tokens, **SIZES[size])
        found = assert_same(case, cuda_ops.check_pages, "cuda", pinned)
        rows, wrong = rows + len(found), wrong + int(found[:, 0].sum())
    print(f"{wrong} of {rows} rows wrong")
    assert rows == 0 or 0 < wrong < rows


def test_memory_out_of_reach_is_refused() -> None:
    case = on("cuda", random_case(0), pinned=IN_REACH)
    for name in IN_REACH:
        with pytest.raises(ValueError, match=f"{name} must be int32 on the GPU or in pinned"):
            cuda_ops.check_pages(**case | {name: case[name].clone()})


@pytest.mark.parametrize("context", [8192, 131_072])
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_cost_of_a_decode_step(batch: int, context: int) -> None:
    """With the tags of one page for each request."""
    widths = (context // 64, context // 16)
    num_pages = batch * (widths[0] + 8) + 1
    step = torch.tensor([[i, widths[0] - 1, context, widths[1]] for i in range(batch)])
    tables = [torch.ones(batch, width, dtype=torch.int32, device="cuda") for width in widths]
    given = torch.tensor([[1 + i, 0] for i in range(batch)])
    case = {
        "cells": torch.zeros(num_pages + batch * sum(widths), dtype=torch.int32, device="cuda"),
        "num_pages": num_pages,
        "step": torch.cat((step.flatten(), given.flatten())).int().pin_memory(),
        "sealed_table": tables[0],
        "recent_table": tables[1],
        "page_tokens": 16,
        "withdraw": True,
        "wrong": torch.empty(batch, 4, dtype=torch.int32, pin_memory=True),
    }
    time = microseconds(lambda: cuda_ops.check_pages(**case))
    print(f"batch {batch:4}, context {context:6}: {time:6.2f} us")
    assert not case["wrong"].any()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_wrong_page_ends_its_request(start, tmp_path, monkeypatch, v2, asynchronous):
    from vllm import SamplingParams, envs

    monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", v2)
    start.stop()
    model = write(tmp_path / "model", config(), weights())
    llm = start(model, **LEAN, async_scheduling=asynchronous)
    params = SamplingParams(
        max_tokens=40, temperature=0, ignore_eos=True, logprobs=2, detokenize=False
    )
    asked = prompts((300, 500, 900, 1500))
    right = llm.generate(asked, params, use_tqdm=False)
    assert llm.reset_prefix_cache()
    run, steps = PageCheck.run, []

    def spoil(self: PageCheck, req_ids: Any, tables: Any) -> None:
        if self._step is not None:
            steps.append(1)
            if len(steps) == 20:
                tables[0][1, 2] = tables[0][2, 2]
        run(self, req_ids, tables)

    monkeypatch.setattr(PageCheck, "run", spoil)
    spoilt = llm.generate(asked, params, use_tqdm=False)
    (i,) = (i for i, o in enumerate(spoilt) if o.outputs[0].finish_reason == "error")
    assert "not this request's any more" in spoilt[i].outputs[0].stop_reason
    got = spoilt[i].outputs[0].token_ids
    assert len(got) < 20 and list(got) == list(right[i].outputs[0].token_ids[: len(got)])
    del right[i], spoilt[i]
    assert all(len(o.outputs[0].token_ids) == 40 for o in spoilt)
    assert max(leads(right, spoilt), default=0) < 1.5  # without the ended one steps are others
    assert pages_are_back(llm)
