"""Which key channels own which int4 slots.

A map is ``slot_channel`` [H, S] int16: the channel of each slot, ascending. A channel that
appears twice has an 8-bit code, its first slot the high nibble; one that does not appear is
stored as its block mean; -1 is an unused slot.

What a slot is worth: the error a key channel causes in the scores is E[q_c^2] * var(k_c), and it
varies over orders of magnitude within a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from s4kv_ext.format import BLOCK, key_slots

# Expected error of a channel of unit variance, uniform noise over a range of 5.2 sigma.
_ERROR = [1.0, 5.2**2 / 12 / 15**2, 5.2**2 / 12 / 255**2]


def importance(query: Tensor, key: Tensor) -> Tensor:
    """Weight of each key channel, float32 [H, D].

    query [T, heads, D], key [T, H, D], after rotary embedding, of one sequence of T tokens.
    """
    tokens, heads, dim = key.shape
    block = min(BLOCK, tokens)
    whole = tokens // block * block
    k = key[:whole].float().reshape(-1, block, heads, dim)
    variance = k.var(1, correction=0).mean(0)
    energy = query.float().square().mean(0).reshape(heads, -1, dim).mean(1)
    return (energy * variance).nan_to_num(0.0, posinf=torch.finfo(torch.float32).max)


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
