"""store_and_seal against the reference, byte by byte."""

import pytest
import torch

from s4kv_ext import cuda_ops, reference
from s4kv_ext.format import SINKS, head_page_bytes
from s4kv_ext.packing_mma import MmaPacking
from tests.gpu.cases import Case, Request, microseconds

STEPS = {
    "decode": [
        Request(n - 1, 1) for n in (1, 16, 17, 127, 128, 129, 191, 192, 193, 256, 1024, 1025)
    ],
    "speculative": [Request(n, 8) for n in (0, 8, 56, 64, 119, 120, 121, 127, 128, 183, 184, 500)],
    "first chunks": [Request(0, n) for n in (1, 15, 64, 100, 127, 128, 129, 192, 400)],
    "later chunks": [
        Request(n, m)
        for n, m in ((10, 300), (64, 64), (70, 58), (100, 200), (128, 128), (130, 600), (63, 65))
    ],
    "prefix hits": [
        Request(64, 70, hit=True),
        Request(128, 1, hit=True),
        Request(256, 300, hit=True),
        Request(256, 300),
    ],
    "idle requests": [
        Request(0, 0),
        Request(127, 1),
        Request(0, 0),
        Request(5, 200),
        Request(300, 0),
    ],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", STEPS)
def test_bytes_are_the_reference_s(name: str, dim: int, dtype: torch.dtype) -> None:
    case = Case(STEPS[name], dim=dim, dtype=dtype, heads=3, unused_slots=5)
    count, stride, offset = case.pages.sealed.shape[0], case.pages.sealed.stride(0), 32
    expected = case.memory.cpu()
    sealed, recent = case.views(expected, count, stride, offset)
    reference.store_and_seal(
        case.key.cpu(),
        case.value.cpu(),
        sealed,
        recent,
        case.step(),
        case.slot_channel,
        MmaPacking(),
    )
    case.update()

    def run() -> None:
        cuda_ops.store_and_seal(case.plan, case.key, case.value, case.pages)

    run()
    got = case.memory.cpu()
    wrong = (got != expected).nonzero().flatten()
    seals = case.plan.header[2].item()
    time = microseconds(run)
    print(f"{name:20} D {dim} {dtype}: {seals:3} seals, {len(wrong)} bytes differ, {time:.2f} us")
    if len(wrong):
        place = (wrong - offset) % stride % head_page_bytes(dim)
        print("places in a head's part:", place[:40].tolist())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 5e36, 0.0])
def test_magnitudes(scale: float) -> None:
    case = Case([Request(0, 200), Request(100, 200)], heads=2)
    case.key.mul_(scale)
    case.value.mul_(scale)
    if scale == 0:  # the sign of a zero minimum is nobody's business
        case.key.abs_()
        case.value.abs_()
    expected = case.memory.cpu()
    sealed, recent = case.views(
        expected, case.pages.sealed.shape[0], case.pages.sealed.stride(0), 32
    )
    reference.store_and_seal(
        case.key.cpu(),
        case.value.cpu(),
        sealed,
        recent,
        case.step(),
        case.slot_channel,
        MmaPacking(),
    )
    case.update()
    cuda_ops.store_and_seal(case.plan, case.key, case.value, case.pages)
    assert torch.equal(case.memory.cpu(), expected)


def test_cost_in_decode() -> None:
    for batch in (1, 8, 32, 128):
        for due in (0, 1, batch):
            lengths = [1024 if i < due else 1050 for i in range(batch)]
            case = Case([Request(n - 1, 1) for n in lengths], heads=4)
            case.update()
            time = microseconds(
                lambda c=case: cuda_ops.store_and_seal(c.plan, c.key, c.value, c.pages)
            )
            plan = microseconds(case.update)
            print(f"batch {batch:4}, {due:4} seal: {time:6.2f} us, plan {plan:6.2f} us")


def test_prefill_chunk_of_8192() -> None:
    case = Case([Request(0, 8192)], heads=4)
    case.update()
    time = microseconds(
        lambda: cuda_ops.store_and_seal(case.plan, case.key, case.value, case.pages)
    )
    print(f"8192 new tokens, 4 heads: {time:.1f} us")
    assert SINKS == 16
