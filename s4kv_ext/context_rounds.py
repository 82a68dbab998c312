"""How the contexts of a step's prefills go through a workspace of fixed size, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from s4kv_ext.format import BLOCK


@dataclass
class Round:
    """One filling of the workspace: tokens start[i] … of request i go to rows rows[i] … rows[i+1].

    start [R], rows [R + 1], int32 on the device, R requests of the batch. Some neighbouring
    prefills have context in it: tokens are theirs among the prefills' tokens, query_start_loc and
    keys [P + 1] where each one's queries and workspace rows begin.
    """

    start: Tensor
    rows: Tensor
    tokens: slice
    query_start_loc: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int


def fill(computed: list[int], room: int) -> list[list[tuple[int, int]]]:
    """Cut contexts of ``computed`` tokens into rounds of at most ``room`` tokens, room >= BLOCK.

    A round has (start, tokens) of every request; starts are multiples of BLOCK.
    """
    done = [0] * len(computed)
    rounds = []
    while done != computed:
        left, this = room, []
        for i, total in enumerate(computed):
            take = min(total - done[i], left)
            if take < total - done[i]:
                take = take // BLOCK * BLOCK
            this.append((done[i], take))
            done[i] += take
            left -= take
        rounds.append(this)
    return rounds


def rounds(
    decodes: int, query_start: Tensor, computed: list[int], room: int, device: torch.device
) -> list[Round]:
    """The rounds of a batch whose first ``decodes`` requests are decoded, the others prefilled.

    query_start [P + 1]: where the prefills' queries begin, the first at 0; computed: tokens of
    each before the step. Copies to the device once, without waiting for it.
    """
    filled = fill(computed, room)
    n = decodes + len(computed)
    # A line each: start [n], rows [n + 1], query_start_loc [n + 1].
    host = torch.zeros(len(filled), 3 * n + 2, dtype=torch.int32, pin_memory=device.type == "cuda")
    spans = []
    for line, this in zip(host, filled, strict=True):
        start, rows, queries = line.split((n, n + 1, n + 1))
        takes = torch.tensor([take for _, take in this], dtype=torch.int32)
        start[decodes:] = torch.tensor([at for at, _ in this])
        rows[decodes + 1 :] = takes.cumsum(0)
        having = takes.nonzero()
        first, last = int(having[0]), int(having[-1])
        spans.append((first, last + 1))
        queries[: last - first + 2] = query_start[first : last + 2] - query_start[first]
    made = []
    for line, this, (a, b) in zip(host.to(device, non_blocking=True), filled, spans, strict=True):
        start, rows, queries = line.split((n, n + 1, n + 1))
        made.append(
            Round(
                start,
                rows,
                slice(int(query_start[a]), int(query_start[b])),
                queries[: b - a + 1],
                rows[decodes + a : decodes + b + 1],
                int(query_start[a : b + 1].diff().max()),
                max(take for _, take in this),
            )
        )
    return made
