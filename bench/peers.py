"""Decode attention of others on the shape of Qwen2.5-7B, each called as its own engine calls it.

    for launch in PEERS["fa3_bf16"](batch=8, context=8192):     # one a setting; the best counts
        launch.runs[0]()                                        # reads the first of its caches

Every peer reads `context` - 1 tokens a request through a random block table. `expected` is plain
attention of the first request over what the first cache dequantises to, in float64. A peer that is
not installed raises ImportError.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cuda_timing import sets_for
from torch import Tensor

HEADS, GROUP, DIM = 4, 7, 128
PAGE = 16  # vLLM's default on CUDA
POOL = 2**16  # tokens that are quantised; a larger cache repeats them


@dataclass
class Launch:
    """runs: one a cache; each returns the output [batch, HEADS * GROUP, DIM]."""

    runs: list[Callable[[], Tensor]]
    nbytes: int
    expected: Tensor
    setting: dict[str, int] = field(default_factory=dict)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain attention, float64: query [HEADS * GROUP, DIM], key and value [tokens, HEADS, DIM]."""
    q = query.float().double().unflatten(0, (HEADS, GROUP))
    score = torch.einsum("hgd,thd->hgt", q, key.double()) * DIM**-0.5
    return torch.einsum("hgt,thd->hgd", score.softmax(-1), value.double()).flatten(0, 1)


def random_table(batch: int, context: int, page: int) -> Tensor:
    pages = -(-context // page)
    return torch.randperm(batch * pages, device="cuda").int().view(batch, pages)


def random(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def repeat_rows(x: Tensor, n: int) -> None:
    """The first n rows of x over all of it."""
    for start in range(n, len(x), n):
        x[start : start + n] = x[: min(n, len(x) - start)]


@functools.cache
def load_fa3(path: str | None) -> Any:
    """FlashAttention 3 of a _vllm_fa3_C.abi3.so, without a path that of the installed vLLM."""
    if path is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ImportError("no vLLM installed, and no --fa3")
        path = str(Path(spec.origin).parent / "vllm_flash_attn/_vllm_fa3_C.abi3.so")
    if not Path(path).exists():
        raise ImportError(f"no {path}")
    torch.ops.load_library(path)
    return torch.ops._vllm_fa3_C


def flash_attention_3(
    batch: int, context: int, fp8: bool = False, library: str | None = None
) -> Iterator[Launch]:
    """As vLLM runs it in decode graphs (metadata, at most 32 splits), and with its own splits."""
    fa3 = load_fa3(library)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    table = random_table(batch, context, PAGE)
    nbytes = 2 * batch * context * HEADS * DIM * dtype.itemsize
    shape = (2, table.numel(), PAGE, HEADS, DIM)
    caches = [random(*shape).to(dtype) for _ in range(sets_for(nbytes))]
    q = random(batch, HEADS * GROUP, DIM).to(dtype)
    out = torch.empty(q.shape, device="cuda", dtype=torch.bfloat16)
    used = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    start = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    one = torch.ones(1, 1, device="cuda").expand(batch, HEADS) if fp8 else None

    def run(kv: Tensor, meta: Tensor | None, splits: int) -> Tensor:
        fa3.fwd(
            q, kv[0], kv[1], None, None, None, out, start, None, None, None, used, 1, context,
            table, None, None, None, None, None, one, one, one, DIM**-0.5, True, -1, -1, 0.0, True,
            meta, splits, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out

    first = caches[0].view(torch.uint8)[:, table[0].long()].flatten(1, 2)[:, : context - 1]
    expected = attend(q[0], *first.view(dtype).float())
    for splits in (32, 0):
        meta = fa3.get_scheduler_metadata(
            batch, 1, context, HEADS * GROUP, HEADS, DIM, DIM, dtype, used, start, None, None, None,
            None, PAGE, 0, True, -1, -1, False, splits, None, 0,
        ) if splits else None  # fmt: skip
        runs = [functools.partial(run, kv, meta, splits) for kv in caches]
        yield Launch(runs, nbytes, expected, {"splits": splits})


def int4_per_token_head(batch: int, context: int) -> Iterator[Launch]:
    """vLLM's own int4 cache: its backend's forward pass of a decode step."""
    from vllm import _custom_ops  # noqa: F401  loads the Hadamard kernel that the engine uses
    from vllm.v1.attention.backends import triton_attn as backend
    from vllm.v1.attention.ops import int4_per_token_head as ops

    name = "int4_per_token_head"
    table = random_table(batch, context, PAGE)
    shape = backend.TritonAttentionBackend.get_kv_cache_shape(table.numel(), PAGE, HEADS, DIM, name)
    caches: list[tuple[Tensor, Any]] = []  # with the layer's impl: it keeps views of the scales
    for _ in range(sets_for(batch * context * 2 * HEADS * shape[-1])):
        kv = torch.empty(shape, dtype=torch.uint8, device="cuda")
        impl = backend.TritonAttentionImpl(HEADS * GROUP, DIM, DIM**-0.5, HEADS, None, None, name)
        impl._ensure_scale_caches(kv)
        if caches:
            kv.copy_(caches[0][0])
        else:
            n = min(POOL, table.numel() * PAGE)
            slots = torch.arange(n, device="cuda")
            impl.do_kv_cache_update(None, random(n, HEADS, DIM), random(n, HEADS, DIM), kv, slots)
            repeat_rows(kv, n // PAGE)
        caches.append((kv, impl))
    q = random(batch, HEADS * GROUP, DIM)
    out = torch.empty_like(q)
    threshold = backend.MIN_LAUNCH_GRID_SIZE_2D // HEADS  # a captured batch size, so not rounded
    segments = (threshold, HEADS * GROUP, backend.NUM_PAR_SOFTMAX_SEGMENTS)
    meta = backend.TritonAttentionMetadata(
        num_actual_tokens=batch,
        max_query_len=1,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        max_seq_len=context,
        seq_lens=torch.full((batch,), context - 1, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
        seq_threshold_3D=threshold,
        num_par_softmax_segments=segments[-1],
        softmax_segm_output=torch.empty(*segments, DIM, device="cuda"),
        softmax_segm_max=torch.empty(segments, device="cuda"),
        softmax_segm_expsum=torch.empty(segments, device="cuda"),
        causal=True,
        use_cascade=False,
        common_prefix_len=0,
        cu_prefix_query_lens=None,
        prefix_kv_lens=None,
        suffix_kv_lens=None,
    )

    def run(kv: Tensor, impl: Any) -> Tensor:
        return impl.forward(None, q, None, None, kv, meta, out)

    signs = ops._get_rht_signs(DIM, 0, q.device).double()
    hadamard = ops._get_hadamard_matrix(DIM, torch.float64, q.device)

    def dequantised(page: Tensor) -> Tensor:
        """[tokens, HEADS, bytes]: codes, a float32 scale with the zero point in its low bits."""
        code, bits = page[..., : DIM // 2], page[..., DIM // 2 :].contiguous().view(torch.int32)
        code = torch.stack((code & 15, code >> 4), -1).flatten(-2)
        rotated = (code.double() - (bits & 15)) * (bits & -16).view(torch.float32)
        return rotated @ hadamard * signs / DIM

    pages = caches[0][0][table[0].long()]  # [pages, 2, PAGE, HEADS, bytes]
    first = [dequantised(pages[:, i].flatten(0, 1)[: context - 1]) for i in range(2)]
    runs = [functools.partial(run, *c) for c in caches]
    yield Launch(runs, batch * context * 2 * HEADS * shape[-1], attend(q[0], *first))


GROUPS = 1  # quantisation groups a row of xformers' int4: its default, and the fewest bytes


def nibbles(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)


def pack_rows(x: Tensor) -> Tensor:
    """xformers' int4 rows of [..., DIM]: a float16 scale and offset a group, then the codes."""
    x = x.float().unflatten(-1, (GROUPS, -1))
    low = x.amin(-1, keepdim=True).half()
    scale = ((x.amax(-1, keepdim=True) - low) / 15).half()
    code = ((x - low) / scale).round().clamp(0, 15).int().flatten(-2).unflatten(-1, (-1, 8))
    words = (code << nibbles(x.device)).sum(-1, dtype=torch.int32)
    return torch.cat((torch.cat((scale, low), -1).view(torch.int32).flatten(-2), words), -1)


def unpack_rows(row: Tensor) -> Tensor:
    """What the kernel reads of ``pack_rows``: float16 sums, rounded to bfloat16."""
    scale, low = row[..., :GROUPS].contiguous().view(torch.half).unflatten(-1, (-1, 2)).split(1, -1)
    code = row[..., GROUPS:, None] >> nibbles(row.device) & 15
    code = code.flatten(-2).unflatten(-1, (GROUPS, -1)).half()
    return (code * scale + low).bfloat16().flatten(-2)


def xformers_int4(batch: int, context: int, splits: tuple[int, ...] = (0,)) -> Iterator[Launch]:
    """xformers' split-K kernel over pages of 64 tokens, its smallest; 0: its own splits."""
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask
    from xformers.ops.fmha.common import Inputs
    from xformers.ops.fmha.triton_splitk import FwOp

    assert FwOp.NUM_GROUPS == GROUPS
    page = FwOp.BLOCK_N
    table = random_table(batch, context, page)
    tokens = table.numel() * page
    width = GROUPS + DIM // 8
    nbytes = 2 * batch * context * HEADS * width * 4
    n = min(POOL, tokens)
    first = torch.empty(2, tokens, HEADS, width, dtype=torch.int32, device="cuda")
    for x in first:
        x[:n] = pack_rows(random(n, HEADS, DIM))
        repeat_rows(x, n)
    caches = [first] + [first.clone() for _ in range(sets_for(nbytes) - 1)]
    q = random(1, batch, HEADS, GROUP, DIM)
    mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [1] * batch, [context - 1] * batch, table, page, device=q.device
    )
    inputs = [
        Inputs(q, *(x[None, :, :, None].expand(-1, -1, -1, GROUP, -1) for x in kv), attn_bias=mask)
        for kv in caches
    ]
    rows = first.view(2, -1, page, HEADS, width)[:, table[0].long()].flatten(1, 2)
    expected = attend(q[0, 0].flatten(0, 1), *unpack_rows(rows[:, : context - 1]))

    def run(op: Any, x: Any) -> Tensor:
        return op.apply(x, needs_gradient=False)[0].view(batch, HEADS * GROUP, DIM)

    for count in splits:
        op = FwOp.get_operator(count) if count else FwOp
        runs = [functools.partial(run, op, x) for x in inputs]
        yield Launch(runs, nbytes, expected, {"splits": count})


PEERS: dict[str, Callable[..., Iterator[Launch]]] = {
    "fa3_bf16": flash_attention_3,
    "fa3_fp8": functools.partial(flash_attention_3, fp8=True),
    "int4_per_token_head": int4_per_token_head,
    "xformers_int4": xformers_int4,
}
