"""What one engine step does to the pages, in plain torch: the oracle of every kernel.

A step brings tokens [c, t) of each of its requests. It

1. stores the new tokens that stay unsealed, and the sinks, into recent pages;
2. seals each block that ends at or before ``sealed_tokens(t)`` and is not sealed yet;
3. attends: the step's own tokens as they are, the rest as it lay before the step.

All requests store and seal before any attends, for a request may have hit, in this very step,
blocks that another one seals in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from s4kv_ext.format import BLOCK, SINKS, sealed_tokens
from s4kv_ext.packing import Packing
from s4kv_ext.quantize import dequantize, quantize


@dataclass
class Step:
    """The requests of one step, R of them, T new tokens in all.

    query_start_loc [R + 1], seq_lens [R] (t of each request, after the step), sealed_table and
    recent_table [R, *]: page of each block of BLOCK tokens, and of each recent page of tokens.
    All int32. Entries past a request's own pages are garbage. Recent page 0 is the null page:
    never read, never written. A request whose first recent page is the null page takes no part:
    nothing of it is stored, and its output is zero (``page_check.py`` withdraws requests so).
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    sealed_table: Tensor
    recent_table: Tensor

    def requests(self):
        """(index, first row, end row, computed tokens c, t) of each request with new tokens."""
        start = self.query_start_loc.tolist()
        for i, t in enumerate(self.seq_lens.tolist()):
            if start[i + 1] > start[i] and self.recent_table[i, 0]:
                yield i, start[i], start[i + 1], t - (start[i + 1] - start[i]), t


def sealed_before(computed: int, recent_row: Tensor, page_tokens: int) -> int:
    """Sealed tokens of a request with ``computed`` tokens, before its step.

    ``sealed_tokens(computed)``, or one block more after a prefix hit: a hit ends on a block
    boundary and everything in it is sealed, so the block's recent pages are null.
    """
    end = sealed_tokens(computed)
    if end + BLOCK <= computed and recent_row[max(end, SINKS) // page_tokens] == 0:
        end += BLOCK
    return end


def _recent_tokens(recent: Tensor, row: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V [end - start, H, D] of tokens in recent pages; start is at a page boundary."""
    page_tokens = recent.shape[3]
    pages = recent[row[start // page_tokens : -(-end // page_tokens)].long()]
    kv = pages.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, : end - start]
    return kv[0], kv[1]


def store_and_seal(
    key: Tensor,
    value: Tensor,
    sealed: Tensor,
    recent: Tensor,
    step: Step,
    slot_channel: Tensor,
    packing: Packing,
) -> None:
    """Parts 1 and 2 of a step.

    key, value [T, H, D]; sealed [pages, H, head_page_bytes] uint8; recent [pages, H, 2,
    page_tokens, D], model dtype; both may be strided views of the same memory. slot_channel
    [H, S] int16.
    """
    page_tokens = recent.shape[3]
    for i, row, _, c, t in step.requests():
        for p in range(c, t):
            if p < SINKS or p >= sealed_tokens(t):
                page = recent[step.recent_table[i, p // page_tokens]]
                page[:, 0, p % page_tokens] = key[row + p - c]
                page[:, 1, p % page_tokens] = value[row + p - c]
    for i, row, _, c, t in step.requests():
        first = sealed_before(c, step.recent_table[i], page_tokens)
        for start in range(first, sealed_tokens(t), BLOCK):
            new = slice(row + max(start, c) - c, row + start + BLOCK - c)
            k, v = key[new], value[new]
            if start < c:
                old_k, old_v = _recent_tokens(
                    recent, step.recent_table[i], start, min(c, start + BLOCK)
                )
                k = torch.cat((old_k, k[: BLOCK - len(old_k)]))
                v = torch.cat((old_v, v[: BLOCK - len(old_v)]))
            block = quantize(k, v, slot_channel, start == 0)
            sealed[step.sealed_table[i, start // BLOCK]] = packing.pack(block)


def context(
    i: int,
    computed: int,
    sealed: Tensor,
    recent: Tensor,
    step: Step,
    slot_channel: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor]:
    """K and V [computed, H, D] float32 of a request's earlier tokens, as its queries see them."""
    heads, dim = recent.shape[1], recent.shape[4]
    k = torch.empty(computed, heads, dim)
    v = torch.empty(computed, heads, dim)
    row = step.recent_table[i]
    end = sealed_before(computed, row, recent.shape[3])
    for start in range(0, end, BLOCK):
        page = sealed[step.sealed_table[i, start // BLOCK]]
        k[start : start + BLOCK], v[start : start + BLOCK] = dequantize(
            packing.unpack(page, dim), slot_channel
        )
    if end:
        k[:SINKS], v[:SINKS] = _recent_tokens(recent, row, 0, SINKS)
    if computed > end:
        k[end:], v[end:] = _recent_tokens(recent, row, end, computed)
    return k, v


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sealed: Tensor,
    recent: Tensor,
    step: Step,
    slot_channel: Tensor,
    packing: Packing,
    scale: float,
) -> Tensor:
    """Part 3 of a step: attention output, float32 [T, heads, D]; query [T, heads, D]."""
    out = torch.zeros(query.shape, dtype=torch.float32)
    for i, row, end, c, t in step.requests():
        old_k, old_v = context(i, c, sealed, recent, step, slot_channel, packing)
        k = torch.cat((old_k, key[row:end].float()))
        v = torch.cat((old_v, value[row:end].float()))
        q = query[row:end].float().unflatten(1, (k.shape[1], -1))
        score = torch.einsum("qhgd,khd->hgqk", q, k) * scale
        seen = torch.arange(t) <= torch.arange(c, t)[:, None]
        p = score.masked_fill(~seen, -torch.inf).softmax(-1)
        out[row:end] = torch.einsum("hgqk,khd->qhgd", p, v).flatten(1, 2)
    return out


OUTSIDE = -1
"""The tag of a page that is not in the pool."""


def wrong_pages(
    tags: Tensor, expected: Tensor, table: Tensor, first: Tensor, end: Tensor, always: int = 0
) -> Tensor:
    """The first wrong entry of each row of a block table.

    tags [pages]: of each page, as they are. expected [R, width]: of each entry of the table
    [R, width]. first, end [R]: the columns that are needed, beside the leftmost ``always`` ones,
    which end with ``end`` too. All of any integer dtype.
    Returns [R, 4]: 1, page, expected, found; or zeros. Reads ``tags`` within bounds whatever the
    table holds.
    """
    page = table.long()
    inside = (page >= 0) & (page < len(tags))
    found = torch.where(inside, tags[page.clamp(0, len(tags) - 1)], OUTSIDE)
    column = torch.arange(table.shape[1])
    needed = (column < end[:, None]) & ((column >= first[:, None]) | (column < always))
    wrong = needed & (found != expected)
    at = wrong.int().argmax(1, keepdim=True)
    entry = torch.cat([x.gather(1, at) for x in (wrong.int(), page, expected, found)], 1)
    return entry * entry[:, :1]


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
    """Whether the pages that a step reads and writes have the tags that its requests expect.

    cells [num_pages + rows * columns]: the tag of each page; then, in rows as wide as the two
    tables together, the tags expected of a request's sealed pages and of its recent ones.
    step [4 * R + 2 * given]: row, sealed pages, computed tokens and recent pages of each request;
    then a cell and its new tag, for each that is set before anything is compared.
    wrong [R, 4] becomes 1, page, expected tag and tag found, of each request's first wrong sealed
    page or else recent page; or zeros. withdraw: such a request gets rows of null pages.
    All int32. Entries of the tables [R, *] that are not needed are garbage.
    """
    n = len(wrong)
    row, sealed, computed, recent = step[: 4 * n].view(n, 4).long().T
    cell, tag = step[4 * n :].view(-1, 2).T
    cells[cell.long()] = tag
    tags, tables = cells[:num_pages], (sealed_table[:n], recent_table[:n])
    widths = [t.shape[1] for t in tables]
    expected = cells[num_pages:].view(-1, sum(widths))[row].split(widths, 1)
    window = torch.tensor([sealed_tokens(c) // page_tokens for c in computed.tolist()])
    by_sealed = wrong_pages(tags, expected[0], tables[0], torch.zeros_like(row), sealed)
    by_recent = wrong_pages(tags, expected[1], tables[1], window, recent, SINKS // page_tokens)
    wrong.copy_(torch.where(by_sealed[:, :1] != 0, by_sealed, by_recent))
    if withdraw:
        for table in tables:
            table[wrong[:, 0] != 0] = 0
