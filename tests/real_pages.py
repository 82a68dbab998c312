"""Workers that do the steps of a schedule with keys and values too, in pages that both kinds share.

``schedules.Worker`` watches which token a page holds; these read its key and value, and attend,
with the reference or with the kernels that an engine runs.

    with patch.object(schedules, "Worker", real_pages.CpuKernels):
        play(schedule)
"""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import schedules
import torch
from torch import Tensor

from s4kv_ext import cpu_ops, cuda_ops, reference
from s4kv_ext.channel_map import one_slot_each
from s4kv_ext.format import head_page_bytes
from s4kv_ext.packing import LanePacking

GROUP, DIM = 4, 128
SCALE = DIM**-0.5
VECTORS = torch.randn(4093, 2 + GROUP, DIM, generator=torch.Generator().manual_seed(0))
"""Key, value and queries of a token, by its tag modulo their number."""


class Reference(schedules.Worker):
    device = "cpu"
    wrong_token = 0.3  # error of a key or value by its norm; of another token's about 1.4
    wrong_output = 1e-5
    most_queries = 1 << 30  # of a request whose output is looked at

    def __init__(self, s: schedules.Settings, rng: Random) -> None:
        self.memory = torch.empty(
            s.pool + 1, head_page_bytes(DIM), dtype=torch.uint8, device=self.device
        )
        self.dtype = schedules.DTYPES[s.page_tokens]
        used = 2 * s.page_tokens * DIM * self.dtype.itemsize
        shape = (1, 2, s.page_tokens, DIM)
        self.pages = (
            self.memory[:, None],
            self.memory[:, :used].view(self.dtype).unflatten(1, shape),
        )
        self.slots = one_slot_each(1, DIM).to(self.device)
        self.vectors = VECTORS.to(self.device, self.dtype)
        super().__init__(s, rng)
        self.poison(slice(None))

    def poison(self, pages: Any) -> None:
        super().poison(pages)
        self.memory[pages] = 255  # NaN in every dtype

    def of_tokens(self, tags: list[np.ndarray]) -> Tensor:
        """[tokens, 2 + GROUP, DIM]."""
        index = torch.from_numpy(np.concatenate(tags) % len(VECTORS))
        return self.vectors[index.to(self.device)]

    def run(self, requests: list[tuple[str, int, int, int, np.ndarray]]) -> None:
        super().run(requests)
        _, rows, computed, end, tags = zip(*requests, strict=True)
        new = self.of_tokens([own[c:] for c, own in zip(computed, tags, strict=True)])
        start = [0, *itertools.accumulate(t - c for c, t in zip(computed, end, strict=True))]
        step = reference.Step(
            torch.tensor(start, dtype=torch.int32, device=self.device),
            torch.tensor(end, dtype=torch.int32, device=self.device),
            torch.from_numpy(self.sealed_table[list(rows)]).to(self.device),
            torch.from_numpy(self.recent_table[list(rows)]).to(self.device),
        )
        key, value, query = new[:, :1], new[:, 1:2], new[:, 2:]
        out = self.act(key, value, query, step)
        seen = self.contexts(list(computed), step)
        right = self.of_tokens([own[:c] for c, own in zip(computed, tags, strict=True)])
        right = right[:, :2].float()
        error = (seen - right).norm(dim=-1) / right.norm(dim=-1)
        assert (error < self.wrong_token).all(), "a wrong token, or NaN"
        before = seen.split(list(computed))
        for i, a, b in zip(range(len(rows)), start, start[1:], strict=False):
            if b - a <= self.most_queries:
                want = attention(query[a:b], torch.cat((before[i], new[a:b, :2].float())))
                error = (out[a:b] - want).norm(dim=-1) / want.norm(dim=-1)
                assert (error < self.wrong_output).all(), "wrong attention, or NaN"

    def act(self, key: Tensor, value: Tensor, query: Tensor, step: reference.Step) -> Tensor:
        """Store, seal, attend; the output [T, GROUP, DIM]."""
        where = (*self.pages, step, self.slots, LanePacking())
        reference.store_and_seal(key, value, *where)
        return reference.attend(query, key, value, *where, SCALE)

    def contexts(self, computed: list[int], step: reference.Step) -> Tensor:
        """Keys and values [tokens, 2, DIM] float32 of all requests' earlier tokens."""
        where = (*self.pages, step, self.slots, LanePacking())
        found = [torch.cat(reference.context(i, c, *where), 1) for i, c in enumerate(computed)]
        return torch.cat(found)


def attention(query: Tensor, kv: Tensor) -> Tensor:
    """Of the last tokens of ``kv`` [t, 2, DIM]; query, result [n, GROUP, DIM]."""
    n, t = len(query), len(kv)
    score = torch.einsum("qgd,kd->gqk", query.float(), kv[:, 0]) * SCALE
    position = torch.arange(t, device=kv.device)
    score = score.masked_fill(position > position[t - n :, None], -torch.inf)
    return torch.einsum("gqk,kd->qgd", score.softmax(-1), kv[:, 1])


class CpuKernels(Reference):
    wrong_output = 0.02  # bf16

    def act(self, key: Tensor, value: Tensor, query: Tensor, step: reference.Step) -> Tensor:
        cpu_ops.load()
        cpu_ops.store_and_seal(key, value, *self.pages, step, self.slots)
        out = torch.full_like(query, torch.nan)
        cpu_ops.attend(query, key, value, *self.pages, step, self.slots, SCALE, out)
        return out


class CudaKernels(Reference):
    """``most_queries`` new tokens are decoded, others only read their context."""

    device = "cuda"
    wrong_output = 0.02
    most_queries = cuda_ops.MAX_QUERIES

    def __init__(self, s: schedules.Settings, rng: Random) -> None:
        super().__init__(s, rng)
        gpu = torch.device(self.device)
        shape = cuda_ops.decode_shape_for(gpu, 1, GROUP, DIM, self.most_queries)
        self.plan = cuda_ops.StepPlan(shape, s.max_num_seqs, s.max_num_batched_tokens, gpu)

    def act(self, key: Tensor, value: Tensor, query: Tensor, step: reference.Step) -> Tensor:
        where = cuda_ops.Pages(*self.pages, self.slots)
        tables = (step.query_start_loc, step.seq_lens, step.sealed_table, step.recent_table)
        out = torch.full_like(query, torch.nan)
        self.plan.update(*tables, len(key), self.most_queries)
        cuda_ops.store_and_seal(self.plan, key, value, where)
        cuda_ops.decode(self.plan, query, out, where, SCALE)
        return out

    def contexts(self, computed: list[int], step: reference.Step) -> Tensor:
        rows = torch.tensor([0, *itertools.accumulate(computed)], dtype=torch.int32)
        start = torch.zeros(len(computed), dtype=torch.int32, device=self.device)
        kv = torch.full((2, sum(computed), 1, DIM), torch.nan, dtype=self.dtype, device=self.device)
        where = cuda_ops.Pages(*self.pages, self.slots)
        cuda_ops.dequant_context(self.plan, where, start, rows.to(self.device), *kv)
        return kv[:, :, 0].transpose(0, 1).float()
