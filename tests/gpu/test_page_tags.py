"""Page tags on a GPU: the comparison is the reference's, and a wrong page ends its request under
full CUDA graphs, with either model runner, also with a step in flight."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tag_cases import SIZES, assert_same, random_case

from s4kv_ext import cuda_ops
from s4kv_ext.page_check import PageCheck
from tests.gpu.cases import microseconds
from tests.gpu.engines import config, pages_are_back, prompts, weights, write

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
LEAN = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 29,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.mark.parametrize("page_tokens", [8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_the_reference_s_result(size: str, page_tokens: int) -> None:
    rows = wrong = 0
    for seed in range(5):
        case = random_case(seed, page_tokens=page_tokens, **SIZES[size])
        found = assert_same(case, cuda_ops.check_pages, "cuda")
        rows, wrong = rows + len(found), wrong + int(found[:, 0].sum())
    print(f"{wrong} of {rows} rows wrong")
    assert rows == 0 or 0 < wrong < rows


@pytest.mark.parametrize("context", [8192, 131_072])
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_cost_of_a_decode_step(batch: int, context: int) -> None:
    """Of the launches, with the tags of one page for each request; the copies are not in it."""
    widths = (context // 64, context // 16)
    num_pages = batch * (widths[0] + 8) + 1
    step = torch.tensor([[i, widths[0] - 1, context, widths[1]] for i in range(batch)])
    tables = [torch.ones(batch, width, dtype=torch.int32, device="cuda") for width in widths]
    given = torch.tensor([[1 + i, 0] for i in range(batch)])
    case = {
        "cells": torch.zeros(num_pages + batch * sum(widths), dtype=torch.int32, device="cuda"),
        "num_pages": num_pages,
        "step": torch.cat((step.flatten(), given.flatten())).int().cuda(),
        "sealed_table": tables[0],
        "recent_table": tables[1],
        "page_tokens": 16,
        "withdraw": True,
        "wrong": torch.empty(batch, 4, dtype=torch.int32, device="cuda"),
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
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    asked = prompts((300, 500, 900, 1500))
    right = [list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)]
    assert llm.reset_prefix_cache()
    run, steps = PageCheck.run, []

    def spoil(self: PageCheck, req_ids: Any, tables: Any) -> None:
        if self._step is not None:
            steps.append(1)
            if len(steps) == 20:
                tables[0][1, 2] = tables[0][2, 2]
        run(self, req_ids, tables)

    monkeypatch.setattr(PageCheck, "run", spoil)
    spoilt = [o.outputs[0] for o in llm.generate(asked, params, use_tqdm=False)]
    (i,) = (i for i, o in enumerate(spoilt) if o.finish_reason == "error")
    assert "not this request's any more" in spoilt[i].stop_reason
    got = [list(o.token_ids) for o in spoilt]
    assert len(got[i]) < 20 and got[i] == right[i][: len(got[i])]
    assert [g for g in got if len(g) == 40] == [*right[:i], *right[i + 1 :]]
    assert pages_are_back(llm)
