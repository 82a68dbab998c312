"""Every context token meets its request's queries once, in a workspace that is too small."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from s4kv_ext.context_rounds import rounds
from s4kv_ext.format import BLOCK

CPU = torch.device("cpu")


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1000)), min_size=1, max_size=6),
    st.integers(1, 8).map(lambda blocks: blocks * BLOCK),
)
def test_rounds_cover_every_context_once(decodes, prefills, room):
    queries, computed = [q for q, _ in prefills], [c for _, c in prefills]
    query_start = torch.tensor([0, *queries]).cumsum(0)
    done = [0] * len(prefills)
    for r in rounds(decodes, query_start, computed, room, CPU):
        start, rows = r.start.tolist(), r.rows.tolist()
        assert rows[: decodes + 1] == [0] * (decodes + 1) and 0 < rows[-1] <= room
        taken = [b - a for a, b in zip(rows[decodes:], rows[decodes + 1 :])]
        having = [i for i, take in enumerate(taken) if take]
        a, b = having[0], having[-1] + 1
        assert r.tokens == slice(int(query_start[a]), int(query_start[b]))
        assert r.query_start_loc.diff().tolist() == queries[a:b]
        assert r.keys.tolist() == rows[decodes + a : decodes + b + 1]
        assert r.max_queries == max(queries[a:b]) and r.max_keys == max(taken)
        for i, take in enumerate(taken):
            if take:
                assert start[decodes + i] == done[i] and done[i] % BLOCK == 0
            done[i] += take
    assert done == computed


def test_no_context_is_no_round():
    assert rounds(2, torch.tensor([0, 5, 9]), [0, 0], 64, CPU) == []


def test_a_round_has_only_the_requests_it_serves():
    """Eight requests of 100 tokens in a workspace for two: no request waits for another's round."""
    made = rounds(0, torch.arange(0, 72, 8), [128] * 8, 256, CPU)
    assert [r.tokens for r in made] == [slice(16 * i, 16 * i + 16) for i in range(4)]
