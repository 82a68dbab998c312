"""Order of a sealed page's bytes. Sizes and sections are ``format.py``'s; only the order of the
codes within a section is a backend's own: the CPU wants tokens or channels in vector lanes, a
GPU will want its matrix fragments.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from s4kv_ext.format import head_page_bytes, sections
from s4kv_ext.quantize import SealedBlock


class Packing(Protocol):
    """How a backend lays the codes of a block into a page."""

    def pack(self, block: SealedBlock) -> Tensor:
        """One page, uint8 [H, head_page_bytes]."""

    def unpack(self, page: Tensor, head_dim: int) -> SealedBlock:
        """Inverse of ``pack``."""


def write_page(head_dim: int, parts: dict[str, Tensor]) -> Tensor:
    """A page, uint8 [H, head_page_bytes], of the [H, ...] content of each section."""
    heads = parts["key_code"].shape[0]
    page = torch.zeros(heads, head_page_bytes(head_dim), dtype=torch.uint8)
    for name, (start, _) in sections(head_dim).items():
        raw = parts[name].contiguous().view(torch.uint8).reshape(heads, -1)
        page[:, start : start + raw.shape[1]] = raw
    return page


def read_section(page: Tensor, head_dim: int, name: str, dtype: torch.dtype) -> Tensor:
    """[H, elements of dtype]"""
    start, size = sections(head_dim)[name]
    return page[:, start : start + size].contiguous().view(dtype)


def _nibbles(low_first: Tensor) -> Tensor:
    """Pack the last dimension (even, codes 0..15): byte j has code j low and code j + half high."""
    low, high = low_first.chunk(2, -1)
    return low | (high << 4)


def _codes(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


class LanePacking:
    """Key codes slot by slot with the tokens in lanes, value codes token by token with the
    channels in lanes; byte j of a row has element j in its low nibble and element j + row/2 in
    its high one. Scales and offsets in natural order.
    """

    def pack(self, block: SealedBlock) -> Tensor:
        parts = {
            "key_code": _nibbles(block.key_code.transpose(1, 2)),
            "key_scale": block.key_scale,
            "key_offset": block.key_offset,
            "value_code": _nibbles(block.value_code),
            "value_scale": block.value_scale,
            "value_offset": block.value_offset,
            "exponents": torch.stack((block.key_exponent, block.value_exponent), 1),
        }
        return write_page(block.key_offset.shape[1], parts)

    def unpack(self, page: Tensor, head_dim: int) -> SealedBlock:
        heads, section = page.shape[0], functools.partial(read_section, page, head_dim)
        key_code = section("key_code", torch.uint8).reshape(heads, -1, 32)
        value_code = section("value_code", torch.uint8).reshape(heads, -1, head_dim // 2)
        exponents = section("exponents", torch.int8)
        return SealedBlock(
            _codes(key_code).transpose(1, 2),
            section("key_scale", torch.float16),
            section("key_offset", torch.float16),
            _codes(value_code),
            section("value_scale", torch.float16),
            section("value_offset", torch.float16),
            exponents[:, 0],
            exponents[:, 1],
        )
