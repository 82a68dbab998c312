"""The oracle itself: equal to plain attention where nothing is quantised, and close to it after."""

import pytest
import torch

from s4kv_ext.channel_map import allocate
from s4kv_ext.format import BLOCK, SINKS, head_page_bytes, recent_page_tokens, sealed_tokens
from s4kv_ext.packing import LanePacking
from s4kv_ext.reference import Step, attend, sealed_before, store_and_seal

HEADS, GROUP, DIM = 2, 3, 64


def run(chunks, seed=0):
    """Outputs and sealed pages of one sequence in chunks; it never gives a page back."""
    torch.manual_seed(seed)
    total, n = sum(chunks), recent_page_tokens(DIM, torch.float32)
    key, value = torch.randn(2, total, HEADS, DIM)
    query = torch.randn(total, HEADS * GROUP, DIM)
    slot_channel = allocate(torch.ones(HEADS, DIM))
    sealed_pages, recent_pages = total // BLOCK + 1, -(-total // n)
    pages = 1 + sealed_pages + recent_pages
    sealed = torch.full((pages, HEADS, head_page_bytes(DIM)), 0xFF, dtype=torch.uint8)
    recent = torch.full((pages, HEADS, 2, n, DIM), torch.nan)
    table = torch.arange(1, pages, dtype=torch.int32)[None]
    out, done = [], 0
    for chunk in chunks:
        rows = slice(done, done + chunk)
        done += chunk
        as_int = [torch.tensor(x, dtype=torch.int32) for x in ([0, chunk], [done])]
        step = Step(*as_int, table[:, :sealed_pages], table[:, sealed_pages:])
        args = (sealed, recent, step, slot_channel, LanePacking())
        store_and_seal(key[rows], value[rows], *args)
        out.append(attend(query[rows], key[rows], value[rows], *args, DIM**-0.5))
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    return torch.cat(out), plain, sealed[1 : 1 + sealed_tokens(total) // BLOCK]


def test_one_chunk_is_plain_attention():
    out, plain, _ = run([300])
    assert torch.allclose(out, plain, atol=1e-5)


def test_window_is_exact_and_context_close():
    out, plain, _ = run([1] * 127 + [1, 1, 200, 1])
    assert torch.allclose(out[:128], plain[:128], atol=1e-5)  # nothing was sealed before
    assert not torch.allclose(out[129:], plain[129:], atol=1e-5)
    assert (out - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("chunks", [[1] * 300, [17] * 17 + [11], [129, 171], [64] * 4 + [44]])
def test_sealed_bytes_do_not_depend_on_chunks(chunks):
    assert torch.equal(run(chunks)[2], run([300])[2])


def test_sealed_before():
    n = 8
    row = torch.ones(40, dtype=torch.int32)
    for computed in range(300):
        assert sealed_before(computed, row, n) == sealed_tokens(computed)
    for hit in (64, 128, 192):  # after a hit everything is sealed; only the sinks have pages
        row[:] = 0
        row[: SINKS // n] = 1
        assert sealed_before(hit, row, n) == hit
        row[hit // n :] = 1
        assert sealed_before(hit + 1, row, n) == hit
