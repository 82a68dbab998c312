"""Who gets the slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s4kv_ext.channel_map import allocate, importance, one_slot_each, read_of_sealed
from s4kv_ext.format import EXTRA_SLOTS, HEAD_SIZES, key_slots
from s4kv_ext.quantize import is_low_nibble, slots_of_channel


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(HEAD_SIZES), st.floats(0, 40), st.integers(0, 2**31))
def test_allocation(dim, spread, seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.exp(torch.randn(2, dim, generator=g) * spread)
    rows = allocate(weight)
    assert rows.shape == (2, key_slots(dim)) and rows.dtype == torch.int16
    assert (rows.diff(dim=-1) >= 0).all() and (rows >= 0).all()
    slots = slots_of_channel(rows, dim)
    assert (slots <= 2).all() and (slots.sum(-1) == key_slots(dim)).all()
    assert (is_low_nibble(rows).sum(-1) == (slots == 2).sum(-1)).all()
    # More weight never means fewer slots.
    for w, n in zip(weight, slots):
        assert (n[w.argsort(stable=True)].diff() >= 0).all() or w.unique().numel() < dim


def test_ties_and_zeros():
    """Equal channels: one slot each, the extra ones to the first."""
    for weight in (torch.ones(1, 64), torch.zeros(1, 64)):
        slots = slots_of_channel(allocate(weight), 64)[0]
        assert slots.tolist() == [2] * EXTRA_SLOTS + [1] * (64 - EXTRA_SLOTS)


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_plain_kivi(dim):
    rows = one_slot_each(3, dim)
    assert rows.shape == (3, key_slots(dim))
    assert (slots_of_channel(rows, dim) == 1).all() and (rows[:, dim:] == -1).all()


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_importance(tokens):
    """Energy of the query times variance of the key, per channel of each KV head."""
    query, key = torch.randn(tokens, 6, 64), torch.randn(tokens, 2, 64)
    query[:, :, 5] *= 100
    key[:, 1, 9] *= 100
    weight = importance(query, key, 64**-0.5)
    assert weight.shape == (2, 64) and torch.isfinite(weight).all()
    if tokens > 1:
        assert weight[0].argmax() == 5 and (
            weight[1].topk(2).indices.sort().values.tolist() == [5, 9]
        )


def test_queries_count_by_what_they_read_of_sealed_tokens():
    """Half of the queries look at the sinks alone; what they are large in does not matter."""
    tokens = 256
    key = torch.randn(tokens, 1, 64) * 0.1
    key[:, 0, 0] = 0
    key[:16, 0, 0] = 30.0
    query = torch.randn(tokens, 1, 64)
    query[::2, 0, 0], query[::2, 0, 7] = 30.0, 100.0
    query[1::2, 0, 0], query[1::2, 0, 9] = -30.0, 5.0
    weight = importance(query, key, 64**-0.5)[0]
    plain = (query[:, 0].square().mean(0) * key[:, 0].var(0))[[7, 9]]
    print(f"by energy alone {plain.tolist()}, as read {weight[[7, 9]].tolist()}")
    assert plain[0] > plain[1] and weight[9] > 10 * weight[7]


@pytest.mark.parametrize("tokens", [129, 300])
def test_read_of_sealed(tokens):
    """Beside a loop that says what it means."""
    q, key, scale = torch.randn(3, 2, 3, 64), torch.randn(tokens, 2, 64), 0.3
    at = torch.tensor([128, tokens // 2 + 64, tokens - 1])
    got = read_of_sealed(q, key, at, scale)
    for i, position in enumerate(at.tolist()):
        for h in range(2):
            for g in range(3):
                p = (key[: position + 1, h] @ q[i, h, g] * scale).softmax(-1)
                want = p[16 : position - 63].square().sum()
                assert torch.isclose(got[i, h, g], want, rtol=1e-4), (i, h, g)


def test_importance_of_extreme_activations_is_finite():
    key = torch.full((64, 2, 64), 3e38) * torch.randint(-1, 2, (64, 2, 64))
    assert torch.isfinite(importance(key, key, 64**-0.5)).all()
