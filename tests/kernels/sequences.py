"""Sequences that run step by step through pages of their own: a tiny allocator that hands out
pages as the engine would, and poisons whatever nobody may read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from s4kv_ext.channel_map import allocate
from s4kv_ext.format import BLOCK, SINKS, head_page_bytes, recent_page_tokens, sealed_tokens
from s4kv_ext.reference import Step

GARBAGE = (2**31 - 1, -7)  # what block tables hold past a request's own entries


def make_map(heads: int, dim: int, seed: int = 0) -> Tensor:
    """A channel map with channels of no, one and two slots."""
    g = torch.Generator().manual_seed(seed)
    return allocate(torch.rand(heads, dim, generator=g).pow(8))


class Pool:
    """Pages of one layer: sealed and recent are two views of the same memory, as in the engine."""

    def __init__(self, pages: int, heads: int, dim: int, dtype: torch.dtype, pad: int = 0, offset: int = 0):
        self.heads, self.dim, self.dtype = heads, dim, dtype
        self.page_tokens = recent_page_tokens(dim, dtype)
        stride = heads * head_page_bytes(dim) + pad
        offset *= dtype.itemsize
        raw = torch.full((offset + pages * stride,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
        self.sealed = raw.as_strided((pages, heads, head_page_bytes(dim)), (stride, head_page_bytes(dim), 1), offset)
        n, item = self.page_tokens, dtype.itemsize
        self.recent = raw.view(dtype).as_strided(
            (pages, heads, 2, n, dim), (stride // item, 2 * n * dim, n * dim, dim, 1), offset // item
        )
        self.free = list(range(pages - 1, 0, -1))

    def take(self) -> int:
        page = self.free.pop()
        self.sealed[page] = 0xFF
        return page

    def give(self, page: int) -> None:
        self.sealed[page] = 0xFF
        self.free.append(page)

    def clone(self) -> Pool:
        other = Pool(self.sealed.shape[0], self.heads, self.dim, self.dtype)
        other.sealed.copy_(self.sealed)
        other.free = list(self.free)
        return other


@dataclass
class Sequence:
    """One request: its tables, how far it is computed, and from where its next tokens come."""

    pool: Pool
    key: Tensor  # [tokens, H, D], all it will ever have
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
        n = self.pool.page_tokens
        for index in [i for i in self.recent_pages if SINKS <= i * n < sealed_tokens(self.computed)]:
            self.pool.give(self.recent_pages.pop(index))

    def hit(self, other: Sequence, tokens: int) -> None:
        """Start after a prefix hit on another sequence: its sealed pages and its sink pages."""
        assert self.computed == 0 and tokens % BLOCK == 0 and tokens <= len(other.sealed_pages) * BLOCK
        self.computed = tokens
        self.sealed_pages = other.sealed_pages[: tokens // BLOCK]
        self.recent_pages = {i: p for i, p in other.recent_pages.items() if i * self.pool.page_tokens < SINKS}


def make_step(work: list[tuple[Sequence, int]], generator: torch.Generator | None = None) -> tuple[Step, Tensor, Tensor]:
    """Step, key and value of sequences that each bring so many tokens; 0 tokens is a padding request."""
    for sequence, tokens in work:
        if tokens:
            sequence.extend(tokens)
    columns = 3 + max(len(s.sealed_pages) for s, _ in work)
    recent_columns = 3 + max([i for s, _ in work for i in s.recent_pages], default=0)
    sealed = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(work), columns)
    recent = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(work), recent_columns)
    start, lens, keys, values = [0], [], [], []
    for i, (s, tokens) in enumerate(work):
        start.append(start[-1] + tokens)
        lens.append(s.computed + tokens if tokens else 0)
        if not tokens:
            continue
        sealed[i, : len(s.sealed_pages)] = torch.tensor(s.sealed_pages, dtype=torch.int32)
        own = -(-lens[-1] // s.pool.page_tokens)
        recent[i, :own] = torch.tensor([s.recent_pages.get(p, 0) for p in range(own)], dtype=torch.int32)
        keys.append(s.key[s.computed : s.computed + tokens])
        values.append(s.value[s.computed : s.computed + tokens])
    as_int = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    return Step(as_int(start), as_int(lens), sealed, recent), torch.cat(keys), torch.cat(values)
