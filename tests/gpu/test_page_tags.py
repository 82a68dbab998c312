"""Page tags on a GPU: the comparison is that of the CPU, and a wrong page ends its request under
full CUDA graphs, with either model runner, also with a step in flight."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from s4kv_ext.page_check import PageCheck, wrong_pages
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


@pytest.mark.parametrize("seed", range(5))
def test_the_same_as_on_a_cpu(seed):
    torch.manual_seed(seed)
    rows, width, pages = 130, 700, 5000
    tags = torch.randperm(1 << 20)[:pages].int()
    table = torch.randint(0, pages, (rows, width), dtype=torch.int32)
    expected = tags[table.long()]
    wrong = torch.rand(rows, width) < 1e-3
    table[wrong] = torch.randint(-9, pages + 9, (int(wrong.sum()),), dtype=torch.int32)
    first = torch.randint(0, width, (rows,))
    end = torch.randint(0, width + 1, (rows,))
    arguments = (tags, expected, table, first, end)
    want = wrong_pages(*arguments, 2)
    got = wrong_pages(*(x.cuda() for x in arguments), 2).cpu()
    found = want[:, 0] != 0
    print(f"{int(found.sum())} of {rows} rows wrong")
    assert torch.equal(got[:, 0], want[:, 0]) and torch.equal(got[found], want[found])


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
