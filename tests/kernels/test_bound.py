"""Any finite input through store, seal and attend: finite, and within the bound of format.py.

The exact attention is that of the keys and values as they came, in float64. A key error of at most
`dk` moves a score by at most d = scale * sum |q| dk, and so a probability by a factor of
exp(2 d) at most; the rest of the bound is the values' own error.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernels.sequences import TOLERANCE, Pool, Sequence, available, make_step
from torch import Tensor

from s4kv_ext import cpu_ops
from s4kv_ext.channel_map import allocate
from s4kv_ext.format import BLOCK, SINKS
from s4kv_ext.quantize import hadamard, slots_of_channel

HEADS, GROUP = 2, 3
SCORE_ERROR = 0.02  # queries are so small that scores may err by as much
TOP = 1e30  # a softmax sums up values in float32: the sum must be finite, not only each of them


def unit(x: Tensor) -> Tensor:
    """[H], two to the power of the block's exponent; x [tokens, H, D]."""
    top = x.abs().amax((0, 2))
    return torch.where(top > 0, torch.exp2((torch.frexp(top).exponent - 5).clamp(min=-120)), 0.0)


def key_bound(k: Tensor, slot_channel: Tensor) -> Tensor:
    """[H, D], of keys [tokens, H, D] that share a block."""
    low, high = k.amin(0), k.amax(0)
    u = unit(k)[:, None]
    slots = slots_of_channel(slot_channel, k.shape[-1])
    steps = (16.0**slots - 1).clamp(min=1).double()
    scale = (high - low) * (1 + 0.61 / steps) + 2**-10 * low.abs()
    scale = scale / steps * (1 + 2**-10) + 2**-23 * u
    mean = (high - low) + 2**-10 * k.abs().amax(0) + 2**-24 * u
    return torch.where(slots > 0, scale / 2, mean) * (1 + 2**-14)


def value_bound(v: Tensor) -> Tensor:
    """[tokens, H], of values [tokens, H, D] that share a block."""
    rotated = hadamard(v)
    low, high = rotated.amin(-1), rotated.amax(-1)
    u = unit(v)
    scale = (high - low) * (1 + 0.61 / 15) + 2**-10 * low.abs()
    scale = scale / 15 * (1 + 2**-10) + 2**-12 * u
    return scale / 2 * (1 + 2**-14) + math.log2(v.shape[-1]) * 2**-19 * u


KINDS = {
    "normal": lambda x: x,
    "zero": lambda x: x * 0,
    "constant": lambda x: x * 0 + 3.14159,
    "constant and large": lambda x: x * 0 - TOP,
    "far from zero": lambda x: x * 1e-3 + 100,
    "large": lambda x: x.sign() * TOP,
    "small": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-39,
    "one outlier": lambda x: torch.where(x == x.max(), TOP, x),
    "outlier channel": lambda x: torch.cat((x[..., :1] * 1e4, x[..., 1:]), -1),
    "all magnitudes": lambda x: x.sign() * torch.exp(x * 20).clamp(1e-38, TOP),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("alone", [False, True])
def test_error_is_bounded(report, dtype, dim, kind, alone):
    """One decode step over a sink page, two sealed blocks and a window of each kind of input.

    alone: only one sealed token has a value, so that no error averages out.
    """
    tokens, scale = 3 * BLOCK, dim**-0.5
    slot_channel = allocate(1 + torch.rand(HEADS, dim))  # no channel is dropped
    k, v = (KINDS[kind](torch.randn(tokens + 1, HEADS, dim)).to(dtype) for _ in range(2))
    if alone:
        v[torch.arange(tokens + 1) != BLOCK + 10] = 0
    dk = torch.zeros(tokens + 1, HEADS, dim, dtype=torch.float64)
    dv = torch.zeros(tokens + 1, HEADS, dtype=torch.float64)
    for block in (slice(SINKS, BLOCK), slice(BLOCK, 2 * BLOCK)):
        dk[block] = key_bound(k[block].double(), slot_channel)
        dv[block] = value_bound(v[block].double())
    q = torch.randn(1, HEADS, GROUP, dim).double()
    most = scale * torch.einsum("qhgd,khd->hgqk", q.abs(), dk).amax()
    q = (q * min(1.0, SCORE_ERROR / max(most.item(), 1e-300))).to(dtype)

    def weigh(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("hgqk,khd->qhgd", x, y).flatten(1, 2)

    score = scale * torch.einsum("qhgd,khd->hgqk", q.double(), k.double())
    p = score.softmax(-1)
    factor = torch.exp(2 * scale * torch.einsum("qhgd,khd->hgqk", q.double().abs(), dk).amax())
    expected, size = weigh(p, v.double()), weigh(p, v.double().abs())
    bound = factor * weigh(p, dv[..., None].expand(v.shape)) + (factor - 1) * size
    tiny = torch.finfo(torch.float32).tiny  # what is below it may be flushed
    bound += TOLERANCE[dtype] * size.amax(-1, keepdim=True) + tiny
    best, worst = cpu_ops.isa(), {}
    for isa in available():
        cpu_ops.use_isa(isa)
        pool = Pool(60, HEADS, dim, dtype)
        sequence = Sequence(pool, k, v)
        step, key, value = make_step([(sequence, tokens)])
        cpu_ops.store_and_seal(key, value, pool.sealed, pool.recent, step, slot_channel)
        sequence.advance(tokens)
        step, key, value = make_step([(sequence, 1)])
        out = torch.full((1, HEADS * GROUP, dim), torch.nan, dtype=dtype)
        pages = (pool.sealed, pool.recent, step, slot_channel)
        cpu_ops.store_and_seal(key, value, *pages)
        cpu_ops.attend(q.flatten(1, 2), key, value, *pages, scale, out)
        assert torch.isfinite(out).all(), isa
        worst[isa] = ((out.double() - expected).abs() / bound).amax().item()
    cpu_ops.use_isa(best)
    report(f"{kind}{' alone' * alone}, {dtype} dim {dim}: error / bound {max(worst.values()):.3f}")
    assert max(worst.values()) <= 1, worst
