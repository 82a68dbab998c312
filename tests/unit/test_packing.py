"""A page and back."""

import pytest
import torch

from s4kv_ext.channel_map import allocate
from s4kv_ext.format import BLOCK, HEAD_SIZES, head_page_bytes, sections
from s4kv_ext.packing import LanePacking
from s4kv_ext.quantize import quantize


def block_of(dim: int):
    key, value = torch.randn(2, BLOCK, 3, dim)
    return quantize(key, value, allocate(torch.rand(3, dim).pow(8)), False)


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_round_trip(dim):
    block = block_of(dim)
    page = LanePacking().pack(block)
    assert page.shape == (3, head_page_bytes(dim)) and page.dtype == torch.uint8
    back = LanePacking().unpack(page, dim)
    for name, tensor in vars(block).items():
        assert torch.equal(tensor, vars(back)[name]), name
    assert (page[:, sections(dim)["exponents"][0] + 2 :] == 0).all()


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_lanes(dim):
    """Tokens of a key slot, channels of a value token: element j low, j + half high."""
    block = block_of(dim)
    page = LanePacking().pack(block)
    key, value = sections(dim)["key_code"][0], sections(dim)["value_code"][0]
    for slot, token in ((0, 0), (5, 31), (dim + 15, 7)):
        byte = page[1, key + slot * 32 + token].item()
        assert byte & 15 == block.key_code[1, token, slot]
        assert byte >> 4 == block.key_code[1, token + 32, slot]
    for token, channel in ((0, 0), (63, dim // 2 - 1), (17, 5)):
        byte = page[2, value + token * dim // 2 + channel].item()
        assert byte & 15 == block.value_code[2, token, channel]
        assert byte >> 4 == block.value_code[2, token, channel + dim // 2]
