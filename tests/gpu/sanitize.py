"""Launch every kernel once or more, for compute-sanitizer: test_sanitizer.py runs this.

Nothing is timed and no graph is captured, so each tensor can be an allocation of its own
(PYTORCH_NO_CUDA_MEMORY_CACHING=1) and what is read or written outside of one is seen.
"""

from __future__ import annotations

import dataclasses

import torch

from s4kv_ext import cuda_ops
from s4kv_ext.cuda_ops import StepPlan
from tests.gpu.cases import Case, Request
from tests.tag_cases import IN_REACH, SIZES, assert_same, random_case

DECODE = [Request(n - 1, 1) for n in (1, 16, 17, 64, 80, 128, 129, 144, 192, 700, 2500)]
SPECULATIVE = [Request(n, 8) for n in (0, 56, 61, 120, 127, 135, 500)]
PREFILL = [Request(0, 200), Request(70, 58), Request(130, 300), Request(0, 0), Request(700, 3)]


def decode(case: Case) -> None:
    out = torch.full_like(case.query, torch.nan)
    case.update()
    cuda_ops.store_and_seal(case.plan, case.key, case.value, case.pages)
    cuda_ops.decode(case.plan, case.query, out, case.pages, case.scale)
    assert max(case.errors(out)) < 6e-3


def dequantise(case: Case) -> None:
    length = [r.computed for r in case.requests]
    rows = torch.tensor([0, *length], dtype=torch.int32).cumsum(0).int().cuda()
    start = torch.zeros(len(length), dtype=torch.int32, device="cuda")
    key = torch.empty(sum(length), case.heads, case.dim, dtype=case.dtype, device="cuda")
    value = torch.empty_like(key)
    cuda_ops.dequant_context(case.plan, case.pages, start, rows, key, value)


def main() -> None:
    for dim in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            for requests in (DECODE, SPECULATIVE, PREFILL):
                case = Case(requests, heads=2, group=7, dim=dim, dtype=dtype, unused_slots=3)
                decode(case)
                dequantise(case)
        case = Case(DECODE, heads=4, group=4, dim=dim)  # as if shares were long
        shape = dataclasses.replace(case.plan.shape, long_share=0)
        case.plan = StepPlan(shape, len(DECODE), case.tokens, "cuda")
        decode(case)
    for size in ("few", "many", "wide pages", "nobody"):
        for pinned in ((), IN_REACH):
            assert_same(random_case(0, **SIZES[size]), cuda_ops.check_pages, "cuda", pinned)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    cuda_ops.load()
    main()
