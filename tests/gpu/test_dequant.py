"""dequant_context against the reference's reading of the pages."""

import pytest
import torch

from s4kv_ext import cuda_ops
from tests.gpu.cases import Case, Request, microseconds

REQUESTS = [
    Request(5, 9),
    Request(700, 300),
    Request(0, 40),
    Request(128, 64, hit=True),
    Request(1000, 20),
    Request(127, 100),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [64, 192, 1024])
def test_chunks(size: int, dim: int, dtype: torch.dtype) -> None:
    """Every request's context in chunks of at most `size` tokens each."""
    case = Case(REQUESTS, dim=dim, dtype=dtype)
    case.update()
    for first in range(0, max(r.computed for r in REQUESTS), size):
        length = [max(0, min(r.computed - first, size)) for r in REQUESTS]
        rows = torch.tensor([0, *length], dtype=torch.int32).cumsum(0).int().cuda()
        start = torch.full((len(REQUESTS),), first, dtype=torch.int32, device="cuda")
        key = torch.full(
            (int(rows[-1]) + 5, case.heads, dim), torch.nan, dtype=dtype, device="cuda"
        )
        value = key.clone()
        cuda_ops.dequant_context(case.plan, case.pages, start, rows, key, value)
        for i, n in enumerate(length):
            at = rows[i].item()
            for got, want in zip((key, value), case.context(i), strict=True):
                want = want[:, first : first + n].transpose(0, 1).to(dtype)
                assert torch.equal(got[at : at + n], want), (
                    first,
                    i,
                    (got[at : at + n] - want).abs().max(),
                )
        assert key[rows[-1] :].isnan().all() and value[rows[-1] :].isnan().all()


def test_speed() -> None:
    case = Case([Request(32768, 2048)], heads=4)
    case.update()
    n = 16384
    key = torch.empty(n, 4, 128, dtype=torch.bfloat16, device="cuda")
    value = torch.empty_like(key)
    rows, start = (
        torch.tensor([0, n], dtype=torch.int32).cuda(),
        torch.tensor([4096], dtype=torch.int32).cuda(),
    )
    time = microseconds(
        lambda: cuda_ops.dequant_context(case.plan, case.pages, start, rows, key, value)
    )
    print(
        f"{n} tokens, 4 heads: {time:.1f} us, "
        f"{(key.nbytes * 2 + n // 64 * 4 * 9536) / time / 1000:.0f} GB/s"
    )
