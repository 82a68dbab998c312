"""The GPU's page order: a bijection, and the order that the MMA fragments need."""

import pytest
import torch

from s4kv_ext.channel_map import one_slot_each
from s4kv_ext.format import BLOCK, head_page_bytes, key_slots, sections
from s4kv_ext.packing_mma import MmaPacking
from s4kv_ext.quantize import SealedBlock, quantize

FIELDS = list(SealedBlock.__dataclass_fields__)


def random_block(heads: int, dim: int) -> SealedBlock:
    g = torch.Generator().manual_seed(dim + heads)

    def code(width: int) -> torch.Tensor:
        return torch.randint(0, 16, (heads, BLOCK, width), generator=g, dtype=torch.uint8)

    def half(width: int) -> torch.Tensor:
        return torch.randn(heads, width, generator=g).half()

    def exponent() -> torch.Tensor:
        return torch.randint(-120, 123, (heads,), generator=g, dtype=torch.int8)

    slots = key_slots(dim)
    return SealedBlock(
        code(slots),
        half(slots),
        half(dim),
        code(dim),
        half(BLOCK),
        half(BLOCK),
        exponent(),
        exponent(),
    )


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_unpack_is_the_inverse_of_pack(heads: int, dim: int) -> None:
    block = random_block(heads, dim)
    page = MmaPacking().pack(block)
    assert page.shape == (heads, head_page_bytes(dim)) and page.dtype == torch.uint8
    again = MmaPacking().unpack(page, dim)
    for field in FIELDS:
        assert torch.equal(getattr(again, field), getattr(block, field)), field
    assert torch.equal(MmaPacking().pack(again), page)


@pytest.mark.parametrize("dim", [64, 128])
def test_words_are_mma_operands(dim: int) -> None:
    """Word by word from the definition of mma.m16n8k16's A operand, one nibble at a time."""
    block = random_block(2, dim)
    page = MmaPacking().pack(block)
    start, size = sections(dim)["key_code"]
    key = page[:, start : start + size].contiguous().view(torch.int32).reshape(2, -1, 32, 4)
    start, size = sections(dim)["value_code"]
    value = (
        page[:, start : start + size].contiguous().view(torch.int32).reshape(2, 4, dim // 64, 32, 4)
    )
    for lane in range(32):
        g, t = divmod(lane, 4)
        for tile in range(4):
            for register, mask, shift in (
                (0, 0x000F000F, 0),
                (1, 0x00F000F0, 0),
                (2, 0x000F000F, 8),
                (3, 0x00F000F0, 8),
            ):
                row, first_k = g + 8 * (register & 1), 2 * t + 8 * (register >> 1)
                for upper in range(2):  # the register's two halves: k and k + 1
                    bit = 16 * upper + 4 * (register & 1)
                    nibble = [
                        ((w >> shift) & mask) >> bit & 15 for w in key[1, :, lane, tile].tolist()
                    ]
                    j = 2 * (register >> 1) + upper
                    for step, code in enumerate(nibble):
                        base = (
                            step // 2 * 32 + t * 8 + step % 2 * 4
                            if step < dim // 16
                            else dim + t * 4
                        )
                        assert code == block.key_code[1, tile * 16 + row, base + j]
                    for step in range(4):
                        for half in range(dim // 64):
                            w = value[1, step, half, lane, tile].item()
                            channel = half * 64 + tile * 16 + row
                            assert ((w >> shift) & mask) >> bit & 15 == block.value_code[
                                1, step * 16 + first_k + upper, channel
                            ]


@pytest.mark.parametrize("dim", [64, 128])
def test_zero_block_is_zero_bytes_but_for_scales(dim: int) -> None:
    zero = torch.zeros(BLOCK, 2, dim)
    page = MmaPacking().pack(quantize(zero, zero, one_slot_each(2, dim), False))
    assert not page.any()
