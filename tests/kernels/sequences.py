"""Sequences that run step by step through pages of their own: a tiny allocator that hands out
pages as the engine would, and poisons whatever nobody may read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from s4kv_ext import cpu_ops, reference
from s4kv_ext.channel_map import allocate
from s4kv_ext.format import BLOCK, SINKS, head_page_bytes, recent_page_tokens, sealed_tokens
from s4kv_ext.packing import LanePacking
from s4kv_ext.reference import Step

ISAS = ("baseline", "avx2", "avx512")
GARBAGE = (2**31 - 1, -7)  # what block tables hold past a request's own entries
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 8e-4}


def make_map(heads: int, dim: int) -> Tensor:
    """A channel map with channels of no, one and two slots."""
    return allocate(torch.rand(heads, dim).pow(8))


class Pool:
    """Pages of one layer: sealed and recent are two views of the same memory, as in the engine.

    Pages lie `pad` elements apart, the first `offset` elements from the start.
    """

    def __init__(
        self,
        pages: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        pad: int = 24,
        offset: int = 8,
    ):
        self.heads, self.dim, self.dtype = heads, dim, dtype
        self.pages, self.pad, self.offset = pages, pad, offset
        self.page_tokens = n = recent_page_tokens(dim, dtype)
        item, bytes_ = dtype.itemsize, head_page_bytes(dim)
        stride = heads * bytes_ + pad * item
        self.raw = torch.full((offset * item + pages * stride,), 0xFF, dtype=torch.uint8)  # NaN
        self.sealed = self.raw.as_strided(
            (pages, heads, bytes_), (stride, bytes_, 1), offset * item
        )
        self.recent = self.raw.view(dtype).as_strided(
            (pages, heads, 2, n, dim), (stride // item, 2 * n * dim, n * dim, dim, 1), offset
        )
        self.free = list(range(pages - 1, 0, -1))

    def take(self) -> int:
        return self.free.pop()

    def give(self, page: int) -> None:
        self.sealed[page] = 0xFF
        self.free.append(page)

    def copy(self) -> Pool:
        """The same memory, for somebody else to write to."""
        args = (self.pages, self.heads, self.dim, self.dtype, self.pad, self.offset)
        other = Pool(*args)
        other.raw.copy_(self.raw)
        return other


@dataclass
class Sequence:
    """One request: its tables, how far it is computed, and all its keys and values."""

    pool: Pool
    key: Tensor  # [tokens, H, D]
    value: Tensor
    computed: int = 0
    sealed_pages: list[int] = field(default_factory=list)
    recent_pages: dict[int, int] = field(default_factory=dict)

    def extend(self, tokens: int) -> None:
        """Pages for the next step, as the engine allocates them."""
        n, t = self.pool.page_tokens, self.computed + tokens
        while len(self.sealed_pages) < sealed_tokens(t) // BLOCK:
            self.sealed_pages.append(self.pool.take())
        for p in range(self.computed, t):
            if (p < SINKS or p >= sealed_tokens(t)) and p // n not in self.recent_pages:
                self.recent_pages[p // n] = self.pool.take()

    def advance(self, tokens: int) -> None:
        """The step is over; recent pages whose tokens are sealed go back."""
        self.computed += tokens
        n, end = self.pool.page_tokens, sealed_tokens(self.computed)
        for index in [i for i in self.recent_pages if SINKS <= i * n < end]:
            self.pool.give(self.recent_pages.pop(index))

    def hit(self, other: Sequence, tokens: int) -> None:
        """Start after a prefix hit on another sequence: its sealed pages and its sink pages."""
        assert self.computed == 0 and tokens % BLOCK == 0
        assert SINKS <= tokens <= len(other.sealed_pages) * BLOCK
        n = self.pool.page_tokens
        self.computed = tokens
        self.sealed_pages = other.sealed_pages[: tokens // BLOCK]
        self.recent_pages = {i: p for i, p in other.recent_pages.items() if i * n < SINKS}
        for mine, its in ((self.key, other.key), (self.value, other.value)):
            mine[:tokens] = its[:tokens]


Work = list[tuple[Sequence, int]]


def make_sequences(pool: Pool, count: int, tokens: int, scale: float = 2.0) -> list[Sequence]:
    shape = (tokens, pool.heads, pool.dim)
    # Channels of different size and offset, as real keys have them.
    spread = torch.rand(pool.heads, pool.dim).pow(3) * scale
    center = torch.randn(pool.heads, pool.dim)
    return [
        Sequence(
            pool,
            (torch.randn(shape) * spread + center).to(pool.dtype),
            torch.randn(shape).to(pool.dtype),
        )
        for _ in range(count)
    ]


def make_step(work: Work) -> tuple[Step, Tensor, Tensor]:
    """Step, key and value of sequences that bring so many tokens; 0 is a padding request."""
    for sequence, tokens in work:
        if tokens:
            sequence.extend(tokens)
    columns = 3 + max(len(s.sealed_pages) for s, _ in work)
    recent_columns = 3 + max([i for s, _ in work for i in s.recent_pages], default=0)
    sealed = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(work), columns)
    recent = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(work), recent_columns)
    start, lens = [0], []
    keys, values = [work[0][0].key[:0]], [work[0][0].value[:0]]
    for i, (s, tokens) in enumerate(work):
        start.append(start[-1] + tokens)
        lens.append(s.computed + tokens if tokens else 0)
        if not tokens:
            continue
        sealed[i, : len(s.sealed_pages)] = torch.tensor(s.sealed_pages, dtype=torch.int32)
        own = -(-lens[-1] // s.pool.page_tokens)
        pages = [s.recent_pages.get(p, 0) for p in range(own)]
        recent[i, :own] = torch.tensor(pages, dtype=torch.int32)
        keys.append(s.key[s.computed : s.computed + tokens])
        values.append(s.value[s.computed : s.computed + tokens])
    as_int = [torch.tensor(x, dtype=torch.int32) for x in (start, lens)]
    return Step(*as_int, sealed, recent), torch.cat(keys), torch.cat(values)


def fused(*parts: Tensor) -> list[Tensor]:
    """The same tensors as views into one [T, heads of all, D], as a fused projection gives."""
    whole = torch.cat(parts, 1)
    return list(whole.split([p.shape[1] for p in parts], 1))


def error(out: Tensor, expected: Tensor) -> float:
    """Largest relative error of a row, by norms."""
    if not expected.numel():
        return 0.0
    difference = (out.double() - expected.double()).norm(dim=-1)
    return (difference / expected.double().norm(dim=-1)).max().item()


def available() -> tuple[str, ...]:
    """Instruction sets that run here, S4KV_CPU_ISA taken into account."""
    return ISAS[: ISAS.index(cpu_ops.isa()) + 1]


@dataclass
class Results:
    """Of steps that every instruction set and the reference have run."""

    error: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float, error: float = 0.0) -> None:
        self.error[name] = max(error, self.error.get(name, 0.0))
        self.ms[name] = self.ms.get(name, 0.0) + seconds * 1e3

    def worst(self) -> float:
        return max(self.error.values())

    def __str__(self) -> str:
        kernels = (f"{isa} {self.error[isa]:.1e} {self.ms[isa]:.1f} ms" for isa in available())
        return f"{', '.join(kernels)}, reference {self.ms['reference']:.0f} ms"


def run_step(
    work: Work, slot_channel: Tensor, group: int, results: Results | None = None
) -> Results:
    """One step, from the same memory, with the reference and with every instruction set.

    After store and seal all memory must equal the reference's.
    """
    results = results or Results()
    pool = work[0][0].pool
    step, key, value = make_step(work)
    query = torch.randn(len(key), pool.heads * group, pool.dim).to(pool.dtype)
    query, key, value = fused(query, key, value)
    scale, threads, best = pool.dim**-0.5, torch.get_num_threads(), cpu_ops.isa()
    before, expected_pool = pool.copy(), pool.copy()

    torch.set_num_threads(1)  # small tensors: threads only wait for each other
    begin = time.perf_counter()
    args = (expected_pool.sealed, expected_pool.recent, step, slot_channel, LanePacking())
    reference.store_and_seal(key, value, *args)
    expected = reference.attend(query, key, value, *args, scale)
    results.add("reference", time.perf_counter() - begin)
    torch.set_num_threads(threads)
    assert torch.isfinite(expected).all()

    for isa in available():
        cpu_ops.use_isa(isa)
        pool.raw.copy_(before.raw)
        out = torch.full(query.shape, torch.nan, dtype=query.dtype)
        pages = (pool.sealed, pool.recent, step, slot_channel)
        begin = time.perf_counter()
        cpu_ops.store_and_seal(key, value, *pages)
        cpu_ops.attend(query, key, value, *pages, scale, out)
        results.add(isa, time.perf_counter() - begin, error(out, expected))
        assert torch.equal(pool.raw, expected_pool.raw), f"{isa}: memory differs"
    cpu_ops.use_isa(best)
    for sequence, tokens in work:
        if tokens:
            sequence.advance(tokens)
    return results
