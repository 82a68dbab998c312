"""The CUDA kernels (``csrc/cuda``), callable: plan a step once, then run its parts in every layer.

    plan = StepPlan(shape, max_requests, max_tokens, device)         # once; shared by all layers
    plan.update(query_start_loc, seq_lens, sealed_table, recent_table, num_tokens)   # each step
    store_and_seal(plan, key, value, pages)                          # each layer
    decode(plan, query, out, pages, scale)

Nothing here synchronises or allocates after construction, and every launch has a fixed grid, so all
of it can be captured in a CUDA graph; ``update`` reads device tensors only and may be captured too,
or run before the replay. Whoever captures keeps the tables and the plan where they are.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from s4kv_ext.format import BLOCK, head_page_bytes

_SHARE_INTS = 48  # plan.cuh
MAX_QUERIES = 8
"""Most query tokens a request may have in ``decode``."""


@functools.cache
def load() -> None:
    """Load the library once: beside this file in the wheel, or where S4KV_CUDA_LIBRARY says."""
    beside = Path(__file__).with_name("libs4kv_cuda.so")
    torch.ops.load_library(os.environ.get("S4KV_CUDA_LIBRARY", str(beside)))


@dataclass(frozen=True)
class DecodeShape:
    """How a thread block of ``decode`` is put together; see csrc/cuda/launch.h."""

    heads: int
    group: int
    head_dim: int
    tile_warps: int
    tiles: int
    warps: int
    stages: int
    together: int
    grid: int
    long_share: int = 300

    @property
    def lanes(self) -> int:
        """Heads of pages that a thread block can work on at a time."""
        return self.warps // self.tile_warps

    @property
    def few_lanes(self) -> int:
        """Those that one with few pages works on: each lane has a cost of its own."""
        return min(8, self.lanes)

    @property
    def shared_bytes(self) -> int:
        """csrc/cuda/decode.cuh, shared_layout"""
        d, rows = self.head_dim, self.tile_warps * self.tiles * 8 * self.together
        buffers = self.lanes * self.stages * (head_page_bytes(d) + 16)
        queries = rows * (2 * d + 4) + rows // 8 * (d // 8 + 1) * 256
        slots = (d + 16) * 2 * self.together
        sums = self.warps * self.tiles * 64 + self.lanes * 4
        return buffers + queries + slots + sums + 116  # and two segments, two barriers and a flag


def decode_shape(
    heads: int,
    group: int,
    head_dim: int,
    max_queries: int = 1,
    *,
    shared_bytes: int,
    processors: int,
    warps: int | None = None,
    stages: int | None = None,
) -> DecodeShape:
    """The shape for ``group * max_queries`` query rows and so much shared memory a block.

    heads: KV heads. The last two override what is chosen here, for experiments.
    """
    if not 1 <= group <= 16 or not 1 <= max_queries <= MAX_QUERIES:
        raise ValueError(
            f"decode takes 1..16 query heads a KV head and 1..{MAX_QUERIES} queries, "
            f"got {group}, {max_queries}"
        )
    row_tiles = -(-group * max_queries // 8)
    tiles = 1 if row_tiles == 1 else 2
    tile_warps = -(-row_tiles // tiles)
    most = warps or (11 if tiles == 1 else 7)  # csrc/cuda/decode.cuh, decode_warps
    for together in (math.gcd(heads, 4), 1) if row_tiles == 1 else (1,):
        for lanes in range(max(1, most // tile_warps), 0 if together == 1 else 7, -1):
            for depth in (stages,) if stages else (4, 3, 2):
                shape = DecodeShape(
                    heads,
                    group,
                    head_dim,
                    tile_warps,
                    tiles,
                    lanes * tile_warps,
                    depth,
                    together,
                    processors,
                )
                if shape.shared_bytes <= shared_bytes:
                    return shape
    raise ValueError(
        f"{group} x {max_queries} query rows of {head_dim} do not fit {shared_bytes} bytes of "
        f"shared memory"
    )


def decode_shape_for(
    device: torch.device, heads: int, group: int, head_dim: int, max_queries: int = 1, **override
) -> DecodeShape:
    p = torch.cuda.get_device_properties(device)
    return decode_shape(
        heads,
        group,
        head_dim,
        max_queries,
        shared_bytes=p.shared_memory_per_block_optin,
        processors=p.multi_processor_count,
        **override,
    )


@dataclass
class Pages:
    """One layer's cache, strided views of one memory: sealed [pages, H, bytes] uint8, recent
    [pages, H, 2, 16, D]. slot_channel [H, D + 16] int16."""

    sealed: Tensor
    recent: Tensor
    slot_channel: Tensor


class StepPlan:
    """What a step has to do, on the device, in buffers that stay where they are."""

    def __init__(
        self, shape: DecodeShape, max_requests: int, max_tokens: int, device: torch.device | str
    ) -> None:
        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        load()
        self.shape = shape
        self.header, self.request = ints(8), ints(max_requests, 4)
        self.share = ints(shape.grid, _SHARE_INTS)
        self.seal, self.slot = ints(max_tokens // BLOCK + max_requests, 4), ints(max_tokens)
        floats = torch.ops.s4kv_cuda.decode_partial_floats(
            shape.head_dim, shape.grid, shape.tile_warps, shape.tiles, shape.together
        )
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrivals = ints(max_requests * shape.heads)
        self.max_queries = shape.tile_warps * shape.tiles * 8 // shape.group
        self.tables: tuple[Tensor, ...] = ()
        self.buffers: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        own = (
            self.header,
            self.request,
            self.share,
            self.seal,
            self.slot,
            self.partial,
            self.arrivals,
        )
        return sum(t.nbytes for t in own)

    def update(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        sealed_table: Tensor,
        recent_table: Tensor,
        num_tokens: int,
        max_queries: int | None = None,
    ) -> None:
        """Plan the step of ``reference.Step``'s tensors; num_tokens may be padded.

        Requests without new tokens are skipped everywhere, those with more than ``max_queries`` in
        ``decode``.
        """
        requests = seq_lens.shape[0]
        self.tables = (query_start_loc, seq_lens, sealed_table, recent_table)
        self.buffers = (
            self.header,
            self.request,
            self.share,
            self.seal[: num_tokens // BLOCK + requests],
            self.slot[:num_tokens],
        )
        most = self.max_queries if max_queries is None else min(max_queries, self.max_queries)
        torch.ops.s4kv_cuda.plan_step(
            *self.tables,
            *self.buffers,
            most,
            self.shape.heads,
            self.shape.few_lanes,
            self.shape.lanes,
            self.shape.together,
            self.shape.long_share,
        )


def store_and_seal(plan: StepPlan, key: Tensor, value: Tensor, pages: Pages) -> None:
    """New keys and values [T, H, D] into recent pages, blocks that fell behind into sealed ones."""
    torch.ops.s4kv_cuda.store_and_seal(
        key, value, pages.sealed, pages.recent, pages.slot_channel, *plan.tables, *plan.buffers
    )


def decode(plan: StepPlan, query: Tensor, out: Tensor, pages: Pages, scale: float) -> None:
    """Attention output of the requests with few query tokens; query, out [T, H * group, D].

    The step's own keys and values are read from the recent pages, so store_and_seal comes first.
    """
    s = plan.shape
    torch.ops.s4kv_cuda.decode(
        query,
        out,
        pages.sealed,
        pages.recent,
        pages.slot_channel,
        *plan.tables,
        *plan.buffers,
        plan.partial,
        plan.arrivals,
        scale,
        s.group,
        s.tile_warps,
        s.tiles,
        s.warps,
        s.stages,
        s.together,
    )


def dequant_context(
    plan: StepPlan, pages: Pages, start: Tensor, rows: Tensor, key: Tensor, value: Tensor
) -> None:
    """Part of each request's context, in full precision, as its queries see it.

    Tokens start[i] (a multiple of 64) to start[i] + rows[i + 1] - rows[i], at most what was
    computed before the step, go to key and value [tokens, H, D] from row rows[i] on. start and rows
    are int32 on the device.
    """
    torch.ops.s4kv_cuda.dequant_context(
        pages.sealed, pages.recent, pages.slot_channel, *plan.tables, start, rows, key, value
    )


def check_pages(
    cells: Tensor,
    num_pages: int,
    step: Tensor,
    sealed_table: Tensor,
    recent_table: Tensor,
    page_tokens: int,
    withdraw: bool,
    wrong: Tensor,
) -> None:
    """Compare the tags of the pages that a step needs; meaning and shapes as in
    ``reference.check_pages``."""
    torch.ops.s4kv_cuda.check_pages(
        cells, num_pages, step, sealed_table, recent_table, page_tokens, withdraw, wrong
    )
