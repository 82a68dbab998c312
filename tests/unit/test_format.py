"""Sizes and the boundary of the format."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from s4kv_ext.format import (
    BLOCK,
    DTYPES,
    HEAD_SIZES,
    RECENT,
    head_page_bytes,
    key_slots,
    recent_page_tokens,
    sealed_tokens,
    sections,
)


@pytest.mark.parametrize(("dim", "size"), [(64, 5184), (128, 9536)])
def test_head_page_bytes(dim, size):
    assert head_page_bytes(dim) == size
    assert size % 32 == 0
    assert size * 8 / (2 * BLOCK * dim) < 5.1  # bits a value


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_sections_follow_each_other(dim):
    end = 0
    for start, size in sections(dim).values():
        assert start == end and size > 0
        end = start + size
    assert end == head_page_bytes(dim)
    assert sections(dim)["key_code"][1] == BLOCK * key_slots(dim) // 2
    assert sections(dim)["value_code"][1] == BLOCK * dim // 2


@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_recent_page_tokens(dim, dtype):
    tokens = recent_page_tokens(dim, dtype)
    assert tokens == (8 if dtype == torch.float32 else 16)
    assert tokens * 2 * dim * dtype.itemsize <= head_page_bytes(dim)


@given(st.integers(0, 1 << 20))
def test_boundary(computed):
    sealed = sealed_tokens(computed)
    assert sealed % BLOCK == 0
    assert 0 <= sealed_tokens(computed + 1) - sealed <= BLOCK
    if computed < RECENT + BLOCK:
        assert sealed == 0
    else:
        assert RECENT <= computed - sealed < RECENT + BLOCK
