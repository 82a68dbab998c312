"""A step's worth of cache on the GPU, with everything it must not read poisoned, and its oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from s4kv_ext.channel_map import allocate
from s4kv_ext.cuda_ops import DecodeShape, Pages, StepPlan, decode_shape_for
from s4kv_ext.format import BLOCK, SINKS, head_page_bytes, sealed_tokens
from s4kv_ext.packing_mma import MmaPacking
from s4kv_ext.quantize import dequantize, quantize
from s4kv_ext.reference import Step

POOL = 24  # different sealed pages, repeated over a context
GARBAGE = 0x3FFFFFFF


@dataclass
class Request:
    """computed tokens before the step, new ones in it; hit: the step follows a prefix cache hit."""

    computed: int
    new: int
    hit: bool = False

    @property
    def total(self) -> int:
        return self.computed + self.new

    @property
    def sealed_before(self) -> int:
        return self.computed if self.hit else sealed_tokens(self.computed)


def slot_map(heads: int, dim: int, generator: torch.Generator, unused: int = 0) -> Tensor:
    """Channels with 0, 1 and 2 slots; the last `unused` slots of each head left empty."""
    slots = allocate(torch.rand(heads, dim, generator=generator) ** 4)
    if unused:
        slots[:, -unused:] = -1
    return slots


def random_tokens(
    n: int, heads: int, dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Keys with outlier channels and plain values, float32 [n, heads, dim]."""
    key = torch.randn(n, heads, dim, generator=generator)
    key[..., 5::32] += 12
    key[..., 7::16] *= 3
    return key, torch.randn(n, heads, dim, generator=generator)


class Case:
    """Requests of one step over one layer's pages, page 0 being the null page."""

    def __init__(
        self,
        requests: list[Request],
        heads: int = 2,
        group: int = 7,
        dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        *,
        pad: int = 96,
        offset: int = 32,
        seed: int = 0,
        max_queries: int | None = None,
        unused_slots: int = 0,
        value_scale: float = 1.0,
        query_scale: float = 1.0,
        **shape: int | None,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.requests, self.heads, self.group, self.dim, self.dtype = (
            requests,
            heads,
            group,
            dim,
            dtype,
        )
        new = [r.new for r in requests]
        self.tokens = sum(new)
        self.slot_channel = slot_map(heads, dim, g, unused_slots)
        device = torch.device("cuda")

        # Sealed pages: a pool of quantised blocks, each with its own magnitude.
        key, value = random_tokens(POOL * BLOCK, heads, dim, g)
        magnitude = 2.0 ** torch.randint(-2, 3, (POOL, 1, heads, 1), generator=g)
        value = (value.reshape(POOL, BLOCK, heads, dim) * magnitude * value_scale).flatten(0, 1)
        blocks = [
            x.to(dtype)
            .reshape(POOL, BLOCK, heads, dim)
            .transpose(0, 1)
            .reshape(BLOCK, POOL * heads, dim)
            for x in (key, value)
        ]
        block = quantize(*blocks, self.slot_channel.repeat(POOL, 1), False)
        pool = MmaPacking().pack(block).reshape(POOL, heads, -1)
        self.pool_kv = [
            x.transpose(0, 1).reshape(POOL, heads, BLOCK, dim).to(device)
            for x in dequantize(block, self.slot_channel.repeat(POOL, 1))
        ]

        # Tables over one shuffled set of page ids.
        sealed_rows, recent_rows = [], []
        for r in requests:
            sealed_rows.append(max(r.sealed_before, sealed_tokens(r.total)) // BLOCK)
            recent_rows.append(-(-r.total // SINKS))
        count = 1 + sum(sealed_rows) + sum(recent_rows)
        ids = iter((torch.randperm(count - 1, generator=g) + 1).tolist())
        sealed_table = torch.full((len(requests), max(sealed_rows) + 3), GARBAGE, dtype=torch.int32)
        recent_table = torch.full((len(requests), max(recent_rows) + 3), GARBAGE, dtype=torch.int32)
        for i, r in enumerate(requests):
            for j in range(sealed_rows[i]):
                sealed_table[i, j] = next(ids)
            for j in range(recent_rows[i]):
                first, last = j * SINKS, j * SINKS + SINKS - 1
                unsealed = last >= sealed_tokens(r.total) or first < r.computed
                kept = j == 0 or (last >= r.sealed_before and unsealed)
                recent_table[i, j] = next(ids) if kept else 0
        self.sealed_table, self.recent_table = sealed_table.to(device), recent_table.to(device)

        # Memory: 0xff is NaN in bf16 and fp16.
        head_bytes = head_page_bytes(dim)
        stride = heads * head_bytes + pad
        self.memory = torch.full((offset + count * stride,), 255, dtype=torch.uint8, device=device)
        self.pages = Pages(
            *self.views(self.memory, count, stride, offset), self.slot_channel.to(device)
        )

        # Old tokens that are not sealed, then the step's own.
        self.fill = []  # [pages of the pool] of each request
        self.old: list[tuple[Tensor, Tensor, Tensor]] = []
        pool = pool.to(device)
        for i, r in enumerate(requests):
            n = r.sealed_before // BLOCK
            index = torch.randint(0, POOL, (n,), generator=g).to(device)
            self.fill.append(index)
            if n:
                self.pages.sealed[self.sealed_table[i, :n].long()] = pool[index]
            start = r.sealed_before
            sinks = min(SINKS, r.computed) if start else 0
            position = torch.cat((torch.arange(sinks), torch.arange(start, r.computed)))
            k, v = (x.to(dtype).to(device) for x in random_tokens(len(position), heads, dim, g))
            v = v * value_scale
            page = self.recent_table[i, (position // SINKS).to(device)].long()
            place = (position % SINKS).to(device)
            self.pages.recent[page, :, 0, place] = k
            self.pages.recent[page, :, 1, place] = v
            self.old.append((position.to(device), k, v))
        k, v = (x.to(dtype).to(device) for x in random_tokens(self.tokens, heads, dim, g))
        self.key, self.value = k, v * value_scale
        self.query = (
            (torch.randn(self.tokens, heads * group, dim, generator=g) * query_scale)
            .to(dtype)
            .to(device)
        )
        self.query_start = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int().to(device)
        self.seq_lens = torch.tensor([r.total for r in requests], dtype=torch.int32, device=device)
        self.scale = dim**-0.5

        most = max_queries or max([r.new for r in requests if r.new <= 8], default=1)
        self.shape: DecodeShape = decode_shape_for(device, heads, group, dim, most, **shape)
        self.plan = StepPlan(self.shape, len(requests), max(self.tokens, 1), device)
        self.max_queries = most

    def views(self, memory: Tensor, count: int, stride: int, offset: int) -> tuple[Tensor, Tensor]:
        h, d = self.heads, self.dim
        sealed = memory[offset:].as_strided(
            (count, h, head_page_bytes(d)), (stride, head_page_bytes(d), 1), offset
        )
        typed = memory[: memory.numel() // 2 * 2].view(self.dtype)
        recent = typed.as_strided(
            (count, h, 2, SINKS, d), (stride // 2, 2 * SINKS * d, SINKS * d, d, 1), offset // 2
        )
        return sealed, recent

    def update(self) -> None:
        self.plan.update(
            self.query_start,
            self.seq_lens,
            self.sealed_table,
            self.recent_table,
            self.tokens,
            self.max_queries,
        )

    def step(self) -> Step:
        """The same for the reference, on the CPU."""
        return Step(
            self.query_start.cpu(),
            self.seq_lens.cpu(),
            self.sealed_table.cpu(),
            self.recent_table.cpu(),
        )

    def context(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V [H, computed, D] float32 of request i's earlier tokens, as its queries see."""
        r, index = self.requests[i], self.fill[i]
        k, v = (
            torch.full((self.heads, r.computed, self.dim), torch.nan, device="cuda")
            for _ in range(2)
        )
        n = r.sealed_before
        if n:
            for x, kv in zip((k, v), self.pool_kv, strict=True):
                x[:, :n] = kv[index].transpose(0, 1).flatten(1, 2)
        position, old_k, old_v = self.old[i]
        k[:, position], v[:, position] = (
            old_k.float().transpose(0, 1),
            old_v.float().transpose(0, 1),
        )
        return k, v

    def attend(self, i: int) -> Tensor:
        """Attention output of request i's queries, float64 [new, heads * group, D]."""
        r, rows = (
            self.requests[i],
            slice(self.query_start[i].item(), self.query_start[i + 1].item()),
        )
        k, v = self.context(i)
        k = torch.cat((k, self.key[rows].float().transpose(0, 1)), 1).double()
        v = torch.cat((v, self.value[rows].float().transpose(0, 1)), 1).double()
        q = self.query[rows].double().unflatten(1, (self.heads, self.group))
        out = torch.empty(
            r.new, self.heads, self.group, self.dim, dtype=torch.float64, device="cuda"
        )
        for j in range(r.new):
            n = r.computed + j + 1
            score = torch.einsum("hgd,hkd->hgk", q[j], k[:, :n]) * self.scale
            out[j] = torch.einsum("hgk,hkd->hgd", score.softmax(-1), v[:, :n])
        return out.flatten(1, 2)

    def errors(self, out: Tensor) -> list[float]:
        """``relative_error`` of each request that decode serves, in an output that was NaN before;
        the rows of prefills must be NaN still."""
        found = []
        for i, r in enumerate(self.requests):
            rows = slice(self.query_start[i].item(), self.query_start[i + 1].item())
            if r.new > self.max_queries:
                assert out[rows].isnan().all()
            elif r.new:
                found.append(relative_error(out[rows], self.attend(i)))
        return found

    def decode_bytes(self) -> int:
        """Bytes that decode has to read."""
        total = 0
        for r in self.requests:
            end = r.sealed_before
            recent = r.total - end + (SINKS if end else 0)
            total += end // BLOCK * head_page_bytes(self.dim) + recent * 4 * self.dim
        return total * self.heads


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Largest error of a row relative to its norm; NaN counts as infinite."""
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    return error.nan_to_num(torch.inf).max().item() if error.numel() else 0.0


def microseconds(run, repeats: int = 20) -> float:
    """Median time of run() inside a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 8)
    return sorted(times)[len(times) // 2]
