"""The operators' own edges: calibration's attention, untouched rows, and what they refuse."""

import pytest
import torch
from kernels.sequences import Pool, error, fused, make_map, make_sequences, make_step

from s4kv_ext import cpu_ops
from s4kv_ext.packing import LanePacking
from s4kv_ext.reference import Step, attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "group"), [(1, 2, 1), (7, 1, 7), (300, 3, 3)])
def test_causal_attend(isa, dtype, tokens, heads, group):
    q, k, v = fused(*(torch.randn(tokens, n, 64).to(dtype) for n in (heads * group, heads, heads)))
    out = torch.empty(tokens, heads * group, 64, dtype=dtype)
    cpu_ops.causal_attend(q, k, v, 0.1, out)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.1, enable_gqa=True
    ).transpose(0, 1)
    limit = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 8e-4}[dtype]
    assert error(out, expected) <= limit


@pytest.mark.parametrize("size", [1e38, 1e30, 1e-25, 0.0])
@pytest.mark.parametrize("side", ["key", "value"])
def test_attention_over_extreme_values(size, side):
    """As large as they come, sums over the context must not overflow."""
    pool = Pool(200, 2, 64, torch.float32)
    (sequence,) = make_sequences(pool, 1, 1400)
    getattr(sequence, side).mul_(size / 10)
    slot_channel = make_map(2, 64)
    for chunk in (1200, 1, 100):
        step, key, value = make_step([(sequence, chunk)])
        query = torch.randn(chunk, 6, 64)
        if side == "key":
            query /= max(size, 1e-25)
        pages = (pool.sealed, pool.recent, step, slot_channel)
        cpu_ops.store_and_seal(key, value, *pages)
        expected = attend(query, key, value, *pages, LanePacking(), 0.125)
        out = torch.empty_like(query)
        cpu_ops.attend(query, key, value, *pages, 0.125, out)
        sequence.advance(chunk)
        assert torch.isfinite(out).all()
        assert error(out, expected) <= 1e-5 if size or side == "key" else not out.any()


def one_step(tokens: int = 200):
    pool = Pool(60, 2, 64, torch.float32)
    (sequence,) = make_sequences(pool, 1, tokens)
    step, key, value = make_step([(sequence, tokens)])
    return pool, step, key, value, make_map(2, 64)


def test_rows_past_the_last_request_stay():
    pool, step, key, value, slot_channel = one_step()
    more = torch.full((9, 2, 64), torch.nan)
    key, value = torch.cat((key, more)), torch.cat((value, more))
    query, out = torch.randn(209, 2, 64), torch.full((209, 2, 64), 7.0)
    cpu_ops.store_and_seal(key, value, pool.sealed, pool.recent, step, slot_channel)
    pages = (pool.sealed, pool.recent, step, slot_channel)
    cpu_ops.attend(query, key, value, *pages, 0.125, out)
    assert torch.isfinite(out).all() and (out[200:] == 7).all() and (out[:200] != 7).all()


def test_no_requests():
    pool, step, key, value, slot_channel = one_step()
    none = Step(step.query_start_loc[:1], step.seq_lens[:0], *(2 * [torch.empty(0, 0).int()]))
    before = pool.raw.clone()
    pages = (pool.sealed, pool.recent, none, slot_channel)
    cpu_ops.store_and_seal(key, value, *pages)
    cpu_ops.attend(key, key, value, *pages, 0.125, torch.empty_like(key))
    assert torch.equal(pool.raw, before)


def replaced(step: Step, **changes) -> Step:
    return Step(**{**vars(step), **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"recent_table": s.recent_table * (s.recent_table == s.recent_table[0, 0])},
            "of request 0 is 0",
        ),
        (lambda s: {"sealed_table": s.sealed_table + 1000}, "sealed page 0 of request 0 is"),
        (lambda s: {"recent_table": s.recent_table[:, :5]}, "needs 25 entries of its recent table"),
        (lambda s: {"sealed_table": s.sealed_table[:, :1]}, "needs 2 entries of its sealed table"),
        (lambda s: {"seq_lens": s.seq_lens - 1}, "request 0 of length 199 has rows"),
        (lambda s: {"query_start_loc": s.query_start_loc * 2}, "has rows"),
        (lambda s: {"seq_lens": s.seq_lens.long()}, "expected int32"),
    ],
)
def test_wrong_tables_are_refused(change, message):
    pool, step, key, value, slot_channel = one_step()
    step = replaced(step, **change(step))
    before = pool.raw.clone()
    with pytest.raises(RuntimeError, match=message):
        cpu_ops.store_and_seal(key, value, pool.sealed, pool.recent, step, slot_channel)
    assert torch.equal(pool.raw, before)


def test_wrong_tensors_are_refused():
    pool, step, key, value, slot_channel = one_step()

    def run(key=key, value=value, sealed=pool.sealed, recent=pool.recent, slots=slot_channel):
        cpu_ops.store_and_seal(key, value, sealed, recent, step, slots)

    for message, arguments in {
        "head_dim is 64 or 128": {"key": key[..., :32], "value": value[..., :32]},
        "takes float32": {"key": key.double(), "value": value.double()},
        "value is": {"value": value.half()},
        "sealed is": {"sealed": pool.sealed[..., :5000]},
        "recent is": {"recent": pool.recent.half()},
        "slot_channel is": {"slots": slot_channel[:, :64]},
        "slot_channel has": {"slots": slot_channel + 100},
    }.items():
        with pytest.raises(RuntimeError, match=message):
            run(**arguments)


def test_a_withdrawn_request_takes_no_part():
    """One of three has a table of null pages: its output is zero, nothing of it is stored."""
    pool = Pool(200, 2, 64, torch.float32)
    sequences = make_sequences(pool, 3, 400)
    slot_channel = make_map(2, 64)
    for chunk in (290, 20):
        step, key, value = make_step([(s, chunk) for s in sequences])
        step.sealed_table[1] = 0
        step.recent_table[1] = 0
        query, out = torch.randn(3 * chunk, 4, 64), torch.full((3 * chunk, 4, 64), torch.nan)
        before = pool.sealed.clone()
        pages = (pool.sealed, pool.recent, step, slot_channel)
        cpu_ops.store_and_seal(key, value, *pages)
        cpu_ops.attend(query, key, value, *pages, 0.125, out)
        own = [0, *sequences[1].sealed_pages, *sequences[1].recent_pages.values()]
        assert torch.equal(pool.sealed[own], before[own])
        expected = attend(query, key, value, *pages, LanePacking(), 0.125)
        (first, withdrawn, last), others = out.split(chunk), expected.split(chunk)[::2]
        assert not withdrawn.any()
        assert error(torch.cat((first, last)), torch.cat(others)) <= 1e-5
        for s in sequences:
            s.advance(chunk)
