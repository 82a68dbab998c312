"""Which key channels own which int4 slots.

A map is ``slot_channel`` [H, S] int16: the channel of each slot, ascending. A channel that
appears twice has an 8-bit code, its first slot the high nibble; one that does not appear is
stored as its block mean; -1 is an unused slot.

What a slot is worth: the error a key channel causes in the scores is E[q_c^2] * var(k_c), and it
varies over orders of magnitude within a head. A query that looks at the sinks or at its neighbours
does not read that error, so queries count by what they read of sealed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from s4kv_ext.format import BLOCK, RECENT, SINKS, key_slots

# Expected error of a channel of unit variance, uniform noise over a range of 5.2 sigma.
_ERROR = [1.0, 5.2**2 / 12 / 15**2, 5.2**2 / 12 / 255**2]

FIRST = RECENT + BLOCK
"""The first position whose query finds a sealed block."""
QUERIES = 128
"""So many queries of a sequence are looked at, evenly spread."""


def importance(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Weight of each key channel, float32 [H, D].

    query [T, heads, D], key [T, H, D], after rotary embedding, of one sequence of T tokens; scale:
    of the scores.
    """
    tokens, heads, dim = key.shape
    block = min(BLOCK, tokens)
    whole = tokens // block * block
    k = key[:whole].float().reshape(-1, block, heads, dim)
    variance = k.var(1, correction=0).mean(0)
    at = torch.linspace(min(FIRST, tokens - 1), tokens - 1, min(QUERIES, tokens)).long()
    q = query[at.to(query.device)].float().reshape(len(at), heads, -1, dim)
    energy = torch.einsum("qhg,qhgd->hd", read_of_sealed(q, key, at, scale), q.square()) / len(at)
    return (energy * variance).nan_to_num(0.0, posinf=torch.finfo(torch.float32).max)


def read_of_sealed(q: Tensor, key: Tensor, at: Tensor, scale: float) -> Tensor:
    """Sum of squared probabilities of a query's sealed tokens, float32 [Q, H, G].

    If their scores err independently, the output errs by that much, squared. q [Q, H, G, D], key
    [T, H, D], at [Q] positions. A sequence that is too short to have sealed tokens counts all its
    queries alike, and next to nothing beside longer ones.
    """
    if len(key) <= FIRST:
        return torch.full_like(q[..., 0], 1e-6)
    score = torch.einsum("qhgd,khd->qhgk", q, key.float()) * scale
    behind = (at[:, None] - torch.arange(len(key)))[:, None, None].to(q.device)
    p = score.masked_fill(behind < 0, -torch.inf).softmax(-1)
    p[..., :SINKS] = 0
    return p.masked_fill(behind < RECENT, 0).square().sum(-1)


def allocate(weight: Tensor) -> Tensor:
    """The map that saves most error, from ``importance``: [H, D] -> [H, S] int16.

    A channel's second slot always saves less than its first, so the best S slots of all are a
    valid choice; ties go to first slots and to low channels.
    """
    dim = weight.shape[-1]
    weight = weight.double().cpu()
    gain = torch.cat((weight * (_ERROR[0] - _ERROR[1]), weight * (_ERROR[1] - _ERROR[2])), -1)
    best = gain.sort(dim=-1, descending=True, stable=True).indices[:, : key_slots(dim)]
    return (best % dim).sort(dim=-1).values.to(torch.int16)


def one_slot_each(heads: int, head_dim: int) -> Tensor:
    """Plain KIVI: one slot for every channel, the others unused."""
    row = torch.full((key_slots(head_dim),), -1, dtype=torch.int16)
    row[:head_dim] = torch.arange(head_dim, dtype=torch.int16)
    return row.repeat(heads, 1)
