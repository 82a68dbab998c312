"""decode against float64 attention over what the pages hold."""

import dataclasses

import pytest
import torch

from s4kv_ext import cuda_ops
from s4kv_ext.cuda_ops import StepPlan
from tests.gpu.cases import Case, Request, microseconds, relative_error

BOUNDARIES = [
    1,
    2,
    15,
    16,
    17,
    63,
    64,
    65,
    79,
    80,
    81,
    127,
    128,
    129,
    143,
    144,
    145,
    191,
    192,
    193,
    255,
    256,
    257,
]
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 3e-3}


def run(case: Case, name: str) -> torch.Tensor:
    """Store, seal and decode; compare every request; print error, time and bandwidth.

    Once as planned, and once as if shares were long, which is what many long requests come to.
    """
    out = run_as_planned(case, name)
    shape = dataclasses.replace(case.plan.shape, long_share=0)
    if shape.together > 1 or shape.lanes > shape.few_lanes:
        planned, case.plan = case.plan, StepPlan(shape, len(case.requests), case.tokens, "cuda")
        run_as_planned(case, f"{name}, {shape.together} heads together")
        case.plan = planned
    return out


def run_as_planned(case: Case, name: str) -> torch.Tensor:
    out = torch.full_like(case.query, torch.nan)
    case.update()
    cuda_ops.store_and_seal(case.plan, case.key, case.value, case.pages)
    cuda_ops.decode(case.plan, case.query, out, case.pages, case.scale)
    assert not case.plan.arrivals.any()
    errors = case.errors(out)
    error = max(errors, default=0.0)
    time = microseconds(lambda: cuda_ops.decode(case.plan, case.query, out, case.pages, case.scale))
    print(
        f"{name:60} error {error:.1e} {time:8.2f} us {case.decode_bytes() / time / 1000:7.0f} GB/s"
    )
    assert error < LIMIT[case.dtype], errors
    return out


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_heads(dim: int, heads: int) -> None:
    lengths = (1, 17, 90, 700, 4000, 64, 2, 129)
    run(Case([Request(n, 1) for n in lengths], heads=heads, dim=dim), f"{heads} heads, D {dim}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths_around_every_boundary(dim: int, dtype: torch.dtype) -> None:
    requests = [Request(n - 1, 1) for n in BOUNDARIES]
    run(Case(requests, dim=dim, dtype=dtype), f"lengths 1..257, D {dim}, {dtype}")


@pytest.mark.parametrize("length", [*BOUNDARIES, 1000, 4097])
def test_one_request(length: int) -> None:
    run(Case([Request(length - 1, 1)]), f"1 x {length}")


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("dim", [64, 128])
def test_groups(dim: int, group: int) -> None:
    run(Case([Request(299, 1), Request(700, 1)], group=group, dim=dim), f"group {group}, D {dim}")


@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("dim", [64, 128])
def test_query_tokens(dim: int, group: int, queries: int) -> None:
    requests = [Request(n, queries) for n in (0, 3, 61, 120, 121, 127, 135, 185, 400, 1500)]
    run(Case(requests, group=group, dim=dim), f"group {group}, {queries} queries, D {dim}")


@pytest.mark.parametrize("dim", [64, 128])
def test_mixed_batch_skips_prefills(dim: int) -> None:
    requests = [
        Request(700, 1),
        Request(0, 100),
        Request(0, 0),
        Request(300, 4),
        Request(64, 8),
        Request(128, 30),
        Request(500, 2),
    ]
    run(Case(requests, dim=dim), f"mixed, D {dim}")


@pytest.mark.parametrize("dim", [64, 128])
def test_step_after_a_prefix_hit(dim: int) -> None:
    requests = [
        Request(64, 1, hit=True),
        Request(128, 8, hit=True),
        Request(640, 3, hit=True),
        Request(640, 3),
    ]
    run(Case(requests, dim=dim), f"prefix hit, D {dim}")


@pytest.mark.parametrize("grid", [1, 2, 7, 132, 500])
@pytest.mark.parametrize("dim", [64, 128])
def test_one_share_and_many(dim: int, grid: int) -> None:
    case = Case([Request(n, 2) for n in (1000, 3, 2500, 90, 64)], dim=dim)
    shape = cuda_ops.DecodeShape(**{**vars(case.shape), "grid": grid})
    case.plan = cuda_ops.StepPlan(shape, len(case.requests), case.tokens, "cuda")
    run(case, f"{grid} shares, D {dim}")


def test_small_shared_memory() -> None:
    """The shape of cards with 99 KB a block."""
    case = Case([Request(n, 1) for n in (1000, 3, 2500)])
    shape = cuda_ops.decode_shape(2, 7, 128, shared_bytes=99 * 1024, processors=132)
    s = case.shape
    assert s.shared_bytes == torch.ops.s4kv_cuda.decode_shared_bytes(
        128, s.tile_warps, s.tiles, s.warps, s.stages, s.together
    )
    case.plan = cuda_ops.StepPlan(shape, len(case.requests), case.tokens, "cuda")
    run(case, f"99 KB: {shape.warps} warps, {shape.stages} stages")


def test_a_launch_that_fails_says_the_shapes() -> None:
    case = Case([Request(100, 1)])
    case.update()
    case.plan.shape = dataclasses.replace(case.plan.shape, stages=99)  # more than any card has
    with pytest.raises(RuntimeError, match=r"decode: .*query \[1, 14, 128\].* seq_lens \[1\]"):
        cuda_ops.decode(case.plan, case.query, case.query.clone(), case.pages, case.scale)


@pytest.mark.parametrize(
    "batch,length", [(32, 1024), (8, 8192), (32, 8192), (1, 32768), (1, 131072)]
)
def test_long_contexts(batch: int, length: int) -> None:
    """Error does not grow with the context; one split and many agree."""
    case = Case([Request(length - 1 - i % 70, 1) for i in range(batch)], heads=4)
    run(case, f"{batch} x {length}")


@pytest.mark.parametrize(
    "value_scale,query_scale", [(1e-30, 1.0), (1e30, 1.0), (1.0, 4.0), (1.0, 1e-20), (1.0, 0.0)]
)
def test_magnitudes(value_scale: float, query_scale: float) -> None:
    case = Case(
        [Request(700, 1), Request(130, 2)], value_scale=value_scale, query_scale=query_scale
    )
    run(case, f"values x {value_scale:g}, queries x {query_scale:g}")


def test_unused_slots_and_padded_strides() -> None:
    for pad, offset in ((0, 0), (32, 16), (160, 4096)):
        run(
            Case([Request(700, 1)], pad=pad, offset=offset, unused_slots=16),
            f"pad {pad}, offset {offset}",
        )


def test_graph_replay_follows_the_device_tensors() -> None:
    """One capture of plan + store + decode, replayed over lengths that only the device knows."""
    steps = [
        [1, 40, 300, 5000],
        [2, 41, 301, 5001],
        [130, 64, 65, 66],
        [200, 1, 1, 9000],
        [0, 128, 0, 191],
    ]
    first = Case([Request(max(s[i] for s in steps), 1) for i in range(4)])
    out = torch.empty_like(first.query)

    def launch() -> None:
        first.update()
        cuda_ops.store_and_seal(first.plan, first.key, first.value, first.pages)
        cuda_ops.decode(first.plan, first.query, out, first.pages, first.scale)

    keep = first.memory.clone()
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seed, lengths in enumerate(steps):
        case = Case([Request(max(n - 1, 0), min(n, 1)) for n in lengths], seed=seed)
        for name in ("seq_lens",):
            getattr(first, name).copy_(getattr(case, name))
        first.query_start.copy_(case.query_start)
        first.memory.copy_(keep)
        first.memory[: case.memory.numel()] = case.memory
        for table in ("sealed_table", "recent_table"):
            small, large = getattr(case, table), getattr(first, table)
            large.fill_(0x3FFFFFFF)
            large[:, : small.shape[1]] = small
        first.pages.slot_channel.copy_(case.pages.slot_channel)
        for name in ("query", "key", "value"):
            getattr(first, name)[: case.tokens] = getattr(case, name)
        out.fill_(torch.nan)
        graph.replay()
        for i in range(4):
            rows = slice(case.query_start[i].item(), case.query_start[i + 1].item())
            assert relative_error(out[rows], case.attend(i)) < LIMIT[case.dtype], (lengths, i)
        assert out[case.tokens :].isnan().all()
