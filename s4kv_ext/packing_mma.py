"""Order of a sealed page's bytes on GPUs: codes lie as the operands of ``mma.m16n8k16``.

A warp lane loads 16 bytes and has, after two masks and a shift, the A operands of four matrix
products: tokens by slots for the keys, channels by tokens for the values. Within a 32-bit word,
nibble (r, j) belongs to row ``g + 8 r`` and to k index ``2 t + (0, 1, 8, 9)[j]`` of a 16 x 16
tile (lane = 4 g + t). Offsets of keys and scales of slots are in natural order; the scales and
offsets of values in the order in which a lane needs them. ``csrc/cuda/layout.cuh`` is the same in
C++.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from s4kv_ext.format import BLOCK, key_slots
from s4kv_ext.packing import read_section, write_page
from s4kv_ext.quantize import SealedBlock

_K_INDEX = torch.tensor([0, 1, 8, 9])


def _grid(*sizes: int) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")


def _slot(step: Tensor, t: Tensor, j: Tensor, head_dim: int) -> Tensor:
    """Slot of k16 step ``step``: a lane's slots of two steps are neighbours, as are the last's."""
    pair = (step >> 1) * 32 + t * 8 + (step & 1) * 4 + j
    return torch.where(step < head_dim // 16, pair, head_dim + t * 4 + j)


@functools.cache
def _key_order(head_dim: int) -> tuple[Tensor, Tensor]:
    """Token (of the low nibble; the high one's is 8 more) and slot of each byte of ``key_code``."""
    step, g, t, tile, byte = _grid(key_slots(head_dim) // 16, 8, 4, 4, 4)
    j = (byte >> 1) + 2 * (byte & 1)  # byte 1 of a word has j = 2, byte 2 has j = 1
    return (tile * 16 + g).flatten(), _slot(step, t, j, head_dim).flatten()


@functools.cache
def _value_order(head_dim: int) -> tuple[Tensor, Tensor]:
    """Token and channel (of the low nibble; the high one's is 8 more) of ``value_code``'s bytes."""
    step, half, g, t, tile, byte = _grid(4, head_dim // 64, 8, 4, 4, 4)
    j = (byte >> 1) + 2 * (byte & 1)
    token = step * 16 + 2 * t + _K_INDEX[j]
    return token.flatten(), (half * 64 + tile * 16 + g).flatten()


@functools.cache
def _scale_order() -> Tensor:
    """Token of each value scale and offset."""
    g, tile, r = _grid(8, 4, 2)
    return (tile * 16 + r * 8 + g).flatten()


class MmaPacking:
    """``Packing`` of the CUDA kernels. ``unpack`` also takes pages on a GPU, and many at once: its
    first dimension may be any number of (page, head) pairs.
    """

    def pack(self, block: SealedBlock) -> Tensor:
        dim = block.key_offset.shape[1]
        key, value = block.key_code, block.value_code
        token, slot = _key_order(dim)
        v_token, channel = _value_order(dim)
        scales = _scale_order()
        parts = {
            "key_code": key[:, token, slot] | key[:, token + 8, slot] << 4,
            "key_scale": block.key_scale,
            "key_offset": block.key_offset,
            "value_code": value[:, v_token, channel] | value[:, v_token, channel + 8] << 4,
            "value_scale": block.value_scale[:, scales],
            "value_offset": block.value_offset[:, scales],
            "exponents": torch.stack((block.key_exponent, block.value_exponent), 1),
        }
        return write_page(dim, parts)

    def unpack(self, page: Tensor, head_dim: int) -> SealedBlock:
        heads, section = page.shape[0], functools.partial(read_section, page, head_dim)

        def order(index: Tensor) -> Tensor:
            return index.to(page.device)

        token, slot = map(order, _key_order(head_dim))
        v_token, channel = map(order, _value_order(head_dim))
        scales = order(_scale_order())
        key_code = page.new_empty(heads, BLOCK, key_slots(head_dim))
        value_code = page.new_empty(heads, BLOCK, head_dim)
        raw = section("key_code", torch.uint8)
        key_code[:, token, slot], key_code[:, token + 8, slot] = raw & 15, raw >> 4
        raw = section("value_code", torch.uint8)
        value_code[:, v_token, channel], value_code[:, v_token, channel + 8] = raw & 15, raw >> 4
        value_scale, value_offset = (
            section("value_scale", torch.float16),
            section("value_offset", torch.float16),
        )
        exponents = section("exponents", torch.int8)
        return SealedBlock(
            key_code,
            section("key_scale", torch.float16),
            section("key_offset", torch.float16),
            value_code,
            torch.empty_like(value_scale).index_copy_(1, scales, value_scale),
            torch.empty_like(value_offset).index_copy_(1, scales, value_offset),
            exponents[:, 0],
            exponents[:, 1],
        )
