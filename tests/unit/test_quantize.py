"""The error bound that format.py states, for any input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s4kv_ext.channel_map import allocate, one_slot_each
from s4kv_ext.format import BLOCK, DTYPES, HEAD_SIZES, SINKS
from s4kv_ext.quantize import dequantize, hadamard, quantize, slots_of_channel

# Besides what format.py states: x - offset and the division are rounded to float32.
ROUNDING = 1 + 2.0**-14


def make_map(heads: int, dim: int) -> torch.Tensor:
    return allocate(torch.rand(heads, dim).pow(8))


def exact_key(block, slot_channel):
    """format.py's formula for keys, in float64: [H, BLOCK, D]."""
    heads = len(block.key_offset)
    key = block.key_offset.double()[:, None].repeat(1, BLOCK, 1)
    part = block.key_code.double() * block.key_scale.double()[:, None]
    channel = slot_channel.clamp(min=0).long()[:, None].expand(heads, BLOCK, -1)
    key.scatter_add_(2, channel, part)
    return key * torch.exp2(block.key_exponent.double())[:, None, None]


def exact_value(block):
    value = block.value_code.double() * block.value_scale.double()[..., None]
    value = hadamard(value + block.value_offset.double()[..., None])
    return value * torch.exp2(block.value_exponent.double())[:, None, None] / value.shape[-1]


def check(key, value, slot_channel, has_sinks=False):
    """Everything format.py promises of one block; key, value [BLOCK, H, D]."""
    block = quantize(key, value, slot_channel, has_sinks)
    k, v = (x.double().transpose(0, 1) for x in (key, value))
    counted = slice(SINKS if has_sinks else 0, None)
    k, v = k[:, counted], v[:, counted]
    dim = k.shape[-1]
    for name, tensor in vars(block).items():
        assert torch.isfinite(tensor.float()).all(), name

    unit = torch.exp2(block.key_exponent.double())[:, None]
    top = k.abs().amax((1, 2)) / unit[:, 0]
    assert ((top < 32) & ((top >= 16) | (block.key_exponent == -120) | (top == 0))).all()
    low, high = k.amin(1), k.amax(1)
    slots = slots_of_channel(slot_channel, dim)
    steps = (16.0**slots - 1).clamp(min=1).double()
    scale = (high - low) * (1 + 0.61 / steps) + 2**-10 * low.abs()
    scale = scale / steps * (1 + 2**-10) + 2**-23 * unit
    error = (exact_key(block, slot_channel)[:, counted] - k).abs()
    bound = torch.where(slots > 0, scale / 2 * ROUNDING, (high - low) * ROUNDING)
    # A mean is rounded to float16, like an offset.
    bound = bound + torch.where(slots == 0, 2**-10 * k.abs().amax(1) + 2**-24 * unit, 0.0)
    assert (error <= bound[:, None]).all(), (error / bound[:, None]).max()

    unit = torch.exp2(block.value_exponent.double())[:, None]
    scale = block.value_scale.double()[:, counted] * unit
    error = (exact_value(block)[:, counted] - v).abs().amax(-1)
    # The float32 transform rounds each of its log2(D) sums.
    assert (error <= scale / 2 * ROUNDING + math.log2(dim) * 2**-19 * unit).all()
    rotated = hadamard(v)
    low, high = rotated.amin(-1), rotated.amax(-1)
    bound = (high - low) * (1 + 0.61 / 15) + 2**-10 * low.abs()
    bound = bound / 15 * (1 + 2**-10) + 2**-24 * unit
    assert (scale <= bound + 2**-12 * unit).all()

    limit = torch.finfo(torch.float32).max
    for got, want in zip(
        dequantize(block, slot_channel), (exact_key(block, slot_channel), exact_value(block))
    ):
        want = want.transpose(0, 1).clamp(-limit, limit)
        assert torch.isfinite(got).all()
        assert (
            (got.double() - want).abs() <= 1e-5 * want.abs().amax((0, 2))[:, None] + 1e-44
        ).all()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_error_bound(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype, dim = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(HEAD_SIZES))
    info = torch.finfo(dtype)

    def some():
        """Channels and tokens of very different size, around very different centers."""
        size = 10.0 ** draw(st.floats(-45, 39))
        spread = torch.exp(torch.randn(1, 2, dim) * draw(st.floats(0, 20)))
        center = torch.randn(1, 2, dim) * 10.0 ** draw(st.floats(-3, 6))
        outlier = 1 + 10.0 ** draw(st.floats(0, 6)) * (torch.rand(BLOCK, 2, 1) < 0.02)
        x = (torch.randn(BLOCK, 2, dim) * spread + center).double() * outlier * size
        return x.clamp(info.min, info.max).to(dtype)

    slot_channel = make_map(2, dim) if draw(st.booleans()) else one_slot_each(2, dim)
    check(some(), some(), slot_channel, draw(st.booleans()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_extremes(dtype, dim):
    info, shape = torch.finfo(dtype), (BLOCK, 2, dim)
    signs = torch.randint(0, 2, shape) * 2.0 - 1
    for x in (
        torch.zeros(shape),
        torch.full(shape, 1.1),
        torch.full(shape, info.max),
        torch.full(shape, info.min),
        signs.double() * info.max,
        signs.double() * info.smallest_normal,
        signs.double() * info.smallest_normal * info.eps,
        torch.where(torch.rand(shape) < 0.01, info.max, 1.0),
    ):
        check(x.to(dtype), x.to(dtype), make_map(2, dim))


def test_sinks_do_not_count():
    key, value = torch.randn(2, BLOCK, 2, 64)
    slot_channel = make_map(2, 64)
    one = quantize(key, value, slot_channel, True)
    key[:SINKS] = 1e6
    value[:SINKS] = -1e6
    other = quantize(key, value, slot_channel, True)
    for name, tensor in vars(one).items():
        assert torch.equal(tensor, vars(other)[name]), name


def test_signs_of_zero_do_not_count():
    """A minimum over 0 and -0 may be either, so neither may show in the bytes."""
    key = torch.randint(0, 2, (BLOCK, 2, 64)).float()
    slot_channel = make_map(2, 64)
    one = quantize(key, key, slot_channel, False)
    negative = torch.where(torch.rand(key.shape) < 0.5, -0.0, 0.0)
    key = torch.where(key == 0, negative, key)
    other = quantize(key, key, slot_channel, False)
    for name, tensor in vars(one).items():
        same = tensor.view(torch.uint8) if tensor.is_contiguous() else tensor
        its = vars(other)[name]
        assert torch.equal(same, its.view(torch.uint8) if its.is_contiguous() else its), name
    assert not (one.key_offset.view(torch.int16) == -32768).any()  # -0


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_hadamard(dim):
    matrix = torch.tensor([[1.0]])
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randint(-100, 100, (5, dim)).float()
    assert torch.equal(hadamard(x), x @ matrix)
    assert torch.equal(hadamard(hadamard(x)) / dim, x)
