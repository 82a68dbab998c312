"""Quantise one block and read it back, in plain torch: the meaning of a sealed page.

Every kernel is compared with this file, bit for bit where it seals: the operations below are
exact or correctly rounded in float32 and their order is fixed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from s4kv_ext.format import BLOCK, SINKS, key_slots

_MIN_EXPONENT = -120  # 2**-exponent stays finite; anything smaller comes back as zero
_MOVES = (0.0, -0.3, 0.3)  # of a step, of either end of a range; less than half: nothing is clipped


@dataclass
class SealedBlock:
    """The codes of one block of all KV heads (H heads, S key slots, D channels).

    key_code [H, BLOCK, S] uint8, key_scale [H, S] f16, key_offset [H, D] f16,
    value_code [H, BLOCK, D] uint8, value_scale and value_offset [H, BLOCK] f16,
    key_exponent and value_exponent [H] int8.
    """

    key_code: Tensor
    key_scale: Tensor
    key_offset: Tensor
    value_code: Tensor
    value_scale: Tensor
    value_offset: Tensor
    key_exponent: Tensor
    value_exponent: Tensor


def hadamard(x: Tensor) -> Tensor:
    """Unnormalised Walsh-Hadamard transform of the last dimension: its inverse times its size."""
    d, half = x.shape[-1], 1
    while half < d:
        x = x.unflatten(-1, (d // (2 * half), 2, half))
        a, b = x.unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x


def _round_down(x: Tensor) -> Tensor:
    """Largest float16 not above x (float32, |x| < 65504)."""
    near = x.half()
    return torch.where(near.float() > x, near.nextafter(torch.full_like(near, -torch.inf)), near)


def _round_up(x: Tensor) -> Tensor:
    return -_round_down(-x)


def _exponent(x: Tensor) -> Tensor:
    """Per head e with max |x| * 2**-e in [16, 32); x [H, BLOCK, D]."""
    top = x.abs().amax((1, 2))
    e = (torch.frexp(top).exponent - 5).clamp(min=_MIN_EXPONENT)
    return torch.where(top > 0, e, torch.zeros_like(e))


def _power(e: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(e, dtype=torch.float32), e)


def _choose_range(x: Tensor, dim: int, steps: Tensor, ends: bool) -> tuple[Tensor, Tensor]:
    """Offset and scale, float16, of the range along ``dim`` that errs least; x float32.

    Each end of the range from the least to the largest stays or moves a little: of the nine, the
    first with the least sum of squared errors. steps, at least 1, broadcasts against x. With
    ``ends`` an error counts by its distance from the middle: attention reads the largest keys
    most. Errors are summed as integers, so that the choice does not depend on the order.
    """
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / steps
    best: tuple[Tensor, Tensor, Tensor] | None = None
    unit, weight = torch.zeros(()), torch.ones(())
    for a, b in itertools.product(_MOVES, _MOVES):
        offset = _round_down(low + a * step)
        scale = _round_up((high + b * step - offset.float()) / steps)
        inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
        if best is None:
            unit = inverse
            if ends:
                z = (x - (low + high) * 0.5) * (unit * 2 / steps)
                weight = z * z + 0.1
        d = x - offset.float()
        code = torch.minimum((d * inverse).round().clamp(min=0), steps)
        u = (d - code * scale.float()) * unit
        errors = ((u * u * weight).clamp(max=1) * 2.0**20).round()
        error = errors.long().sum(dim, keepdim=True)
        if best is None:
            best = error, offset, scale
        else:
            less = error < best[0]
            best = (
                torch.where(less, error, best[0]),
                torch.where(less, offset, best[1]),
                torch.where(less, scale, best[2]),
            )
    assert best is not None
    return best[1].squeeze(dim), best[2].squeeze(dim)


def _codes(x: Tensor, offset: Tensor, scale: Tensor, steps: Tensor | float) -> Tensor:
    code = ((x - offset.float()) / scale.float()).round()
    code = torch.where(scale > 0, code, torch.zeros_like(code))
    return torch.minimum(code.clamp(min=0), torch.as_tensor(steps, dtype=torch.float32))


def slots_of_channel(slot_channel: Tensor, head_dim: int) -> Tensor:
    """Number of slots (0, 1 or 2) of each channel; slot_channel [H, S] -> [H, D]."""
    hot = slot_channel[..., None] == torch.arange(head_dim, device=slot_channel.device)
    return hot.sum(-2)


def is_low_nibble(slot_channel: Tensor) -> Tensor:
    """Which slots are the second of their channel; the slots of a channel are neighbours."""
    low = torch.zeros_like(slot_channel, dtype=torch.bool)
    low[:, 1:] = (slot_channel[:, 1:] == slot_channel[:, :-1]) & (slot_channel[:, 1:] >= 0)
    return low


def quantize(key: Tensor, value: Tensor, slot_channel: Tensor, has_sinks: bool) -> SealedBlock:
    """Seal one block.

    key, value: [BLOCK, H, D], any float dtype, finite. slot_channel: [H, S] int16, from
    ``channel_map``. has_sinks: this is block 0, so its first SINKS tokens do not count.
    """
    heads, dim = key.shape[1:]
    assert key.shape == value.shape == (BLOCK, heads, dim), key.shape
    assert slot_channel.shape == (heads, key_slots(dim)), slot_channel.shape
    k, v = (x.float().transpose(0, 1).clone() for x in (key, value))
    if has_sinks:
        k[:, :SINKS], v[:, :SINKS] = k[:, SINKS, None], v[:, SINKS, None]

    key_exponent, value_exponent = _exponent(k), _exponent(v)
    # + 0 turns -0 into 0: which of the two a minimum returns would depend on the kernel.
    k = k * _power(-key_exponent)[:, None, None] + 0.0
    v = hadamard(v * _power(-value_exponent)[:, None, None] + 0.0)

    slots = slots_of_channel(slot_channel, dim)
    steps = (16.0**slots - 1).float()
    offset, scale = _choose_range(k, 1, steps.clamp(min=1)[:, None], ends=True)
    code = _codes(k, offset[:, None], scale[:, None], steps[:, None]).int()
    total = torch.zeros_like(steps)  # summed in token order: a mean must not depend on the kernel
    for token in range(BLOCK):
        total = total + k[:, token]
    offset = torch.where(slots == 0, (total / BLOCK).half(), offset)

    channel = slot_channel.clamp(min=0).long()
    lower = is_low_nibble(slot_channel)
    pair = slots.gather(1, channel) == 2
    of_slot = code.gather(2, channel[:, None].expand(heads, BLOCK, -1))
    key_code = torch.where((pair & ~lower)[:, None], of_slot >> 4, of_slot & 15)
    key_scale = scale.gather(1, channel) * torch.where(pair & ~lower, 16.0, 1.0).half()
    unused = slot_channel < 0

    value_offset, value_scale = _choose_range(v, 2, torch.full((), 15.0), ends=False)
    return SealedBlock(
        key_code.masked_fill(unused[:, None], 0).to(torch.uint8),
        key_scale.masked_fill(unused, 0),
        offset,
        _codes(v, value_offset[..., None], value_scale[..., None], 15.0).to(torch.uint8),
        value_scale,
        value_offset,
        key_exponent.to(torch.int8),
        value_exponent.to(torch.int8),
    )


def dequantize(block: SealedBlock, slot_channel: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a block, float32 [BLOCK, H, D]; finite whatever was sealed."""
    heads, dim = block.key_offset.shape
    limit = torch.finfo(torch.float32).max
    k = block.key_offset.float()[:, None].expand(heads, BLOCK, dim).clone()
    channel = slot_channel.clamp(min=0).long()[:, None].expand(heads, BLOCK, -1)
    k.scatter_add_(2, channel, block.key_code.float() * block.key_scale.float()[:, None])
    k = k * _power(block.key_exponent.int())[:, None, None]
    v = block.value_code.float() * block.value_scale.float()[..., None]
    v = hadamard(v + block.value_offset.float()[..., None]) / dim
    v = v * _power(block.value_exponent.int())[:, None, None]
    return tuple(x.clamp(-limit, limit).transpose(0, 1) for x in (k, v))
