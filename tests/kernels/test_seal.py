"""Sealed bytes: equal to the reference's for any input, and a function of K and V alone."""

import pytest
import torch
from kernels.sequences import Pool, Sequence, make_map, make_sequences, make_step

from s4kv_ext import cpu_ops
from s4kv_ext.format import BLOCK, head_page_bytes, sections
from s4kv_ext.packing import LanePacking
from s4kv_ext.quantize import quantize

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dim", [64, 128])
def test_sections_are_those_of_the_format(dim):
    ours = torch.ops.s4kv_cpu.sections(dim)
    assert ours == [start for start, _ in sections(dim).values()] + [head_page_bytes(dim)]


def seal(key, value, slot_channel):
    """Sealed pages [blocks, H, bytes] of one sequence in one step."""
    pool = Pool(len(key) // BLOCK + 40, *key.shape[1:], key.dtype)
    sequence = Sequence(pool, key, value)
    step, k, v = make_step([(sequence, len(key))])
    cpu_ops.store_and_seal(k, v, pool.sealed, pool.recent, step, slot_channel)
    return pool.sealed[sequence.sealed_pages]


def extremes(dtype: torch.dtype, dim: int) -> torch.Tensor:
    """[tokens, 2, dim]: a block of each kind, and 64 tokens more."""
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    shape = (BLOCK, 2, dim)
    signs = torch.randint(0, 2, shape) * 2.0 - 1
    blocks = [
        torch.randn(shape),
        torch.randn(shape) * 1e-3 + 100,
        torch.zeros(shape),
        -torch.zeros(shape),
        torch.full(shape, 3.14159),
        torch.full(shape, -1e-7),
        signs * top,
        torch.rand(shape).pow(20) * signs * top,
        signs * tiny,
        torch.randn(shape) * tiny / 64,  # subnormal
        torch.where(torch.rand(shape) < 0.5, 0.0, -0.0) * torch.ones(shape),
        torch.where(torch.rand(shape) < 0.01, signs * top, torch.randn(shape)),
        torch.where(torch.rand(shape) < 0.9, 0.0, signs * tiny),
        torch.exp(torch.randn(shape) * 20).clamp(tiny, top) * signs,
        torch.arange(BLOCK)[:, None, None].expand(shape) / 15.0,  # ties
        torch.randint(-3, 4, shape) * 0.5,
        torch.randn(shape),
    ]
    return torch.cat(blocks).to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("dim", [64, 128])
def test_extreme_values(isa, report, dtype, dim):
    key, value = extremes(dtype, dim), extremes(dtype, dim).flip(1)
    slot_channel = make_map(2, dim)
    ours = seal(key, value, slot_channel)
    for i, page in enumerate(ours):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        block = quantize(key[rows], value[rows], slot_channel, i == 0)
        expected = LanePacking().pack(block)
        assert torch.equal(page, expected), f"block {i}"
    report(f"{dtype} dim {dim} {isa:8}: {len(ours)} extreme blocks equal")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_many_random_blocks(isa, dtype):
    key, value = torch.randn(2, 1 + 40 * BLOCK, 2, 64).mul(3).to(dtype).unbind()
    slot_channel = make_map(2, 64)
    for i, page in enumerate(seal(key, value, slot_channel)):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        block = quantize(key[rows], value[rows], slot_channel, i == 0)
        assert torch.equal(page, LanePacking().pack(block)), f"block {i}"


def test_bytes_do_not_depend_on_chunks_neighbours_or_old_pages(isa):
    slot_channel = make_map(2, 64)
    total, pages = 700, []
    for chunks in ([700], [1] * 700, [17] * 41 + [3], [300, 1, 63, 64, 272], [129] * 5 + [55]):
        torch.manual_seed(0)
        pool = Pool(200, 2, 64, BF16)
        one, neighbour = make_sequences(pool, 2, total + 400)
        pool.raw[:] = len(chunks) % 251  # another old content each time
        for i, chunk in enumerate(chunks):
            work = [(one, chunk)]
            if i % 3 == 0 and neighbour.computed < 900:
                work.insert(0, (neighbour, 1 + 40 * (i % 5)))
            step, key, value = make_step(work)
            cpu_ops.store_and_seal(key, value, pool.sealed, pool.recent, step, slot_channel)
            for s, tokens in work:
                s.advance(tokens)
        assert one.computed == total
        pages.append(pool.sealed[one.sealed_pages].clone())
    for other in pages[1:]:
        assert torch.equal(pages[0], other)
