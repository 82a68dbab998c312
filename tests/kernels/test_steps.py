"""Store, seal and attend against the reference, on many schedules at once: each step is a mixed
batch of requests, each test runs every instruction set. All memory is compared, so that a byte
written anywhere else fails as well; unused memory is NaN and unused table entries are garbage.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.sequences import (
    TOLERANCE,
    Pool,
    Results,
    available,
    make_map,
    make_sequences,
    make_step,
    run_step,
)

from s4kv_ext import cpu_ops
from s4kv_ext.channel_map import one_slot_each
from s4kv_ext.format import BLOCK, head_page_bytes, sealed_tokens

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 129, 143, 144, 145, 191, 192]
SHAPES = [  # dtype, head_dim, KV heads, group
    (F32, 64, 3, 3),
    (F32, 128, 1, 7),
    (BF16, 64, 2, 1),
    (BF16, 128, 1, 16),
    (F16, 64, 2, 5),
    (F16, 128, 1, 3),
]


@pytest.mark.parametrize(("dtype", "dim", "heads", "group"), SHAPES)
def test_every_length_and_chunk(report, dtype, dim, heads, group):
    pool = Pool(700, heads, dim, dtype)
    slot_channel = make_map(heads, dim)
    results = Results()
    for chunk in (1, 2, 17, 64, 130, 300):
        lengths = [*LENGTHS, 1000] if chunk in (1, 300) else LENGTHS
        sequences = make_sequences(pool, len(lengths), max(lengths) + chunk + 1)
        run_step(list(zip(sequences, lengths)), slot_channel, group, results)
        run_step([(s, chunk) for s in sequences], slot_channel, group, results)
        run_step([(s, 1) for s in sequences], slot_channel, group, results)
        for sequence in sequences:
            for page in [*sequence.sealed_pages, *sequence.recent_pages.values()]:
                pool.give(page)
    report(f"{dtype} dim {dim} group {group}: {results}")
    assert results.worst() <= TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "dim", "group"), [(F32, 64, 3), (BF16, 128, 4)])
@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (4, 1)])
def test_long_context(report, dtype, dim, heads, group, batch):
    """Decode and a chunk over a context that is split among cores."""
    pool = Pool(300 * batch, heads, dim, dtype)
    slot_channel = make_map(heads, dim)
    sequences = make_sequences(pool, batch, 3100)
    run_step([(s, 3000 - 64 * i) for i, s in enumerate(sequences)], slot_channel, group)
    for chunk in (1, 2, 40):
        results = run_step([(s, chunk) for s in sequences], slot_channel, group)
        sealed = sum(sealed_tokens(s.computed) for s in sequences) // BLOCK
        rate = sealed * heads * head_page_bytes(dim) / results.ms[available()[-1]] / 1e6
        report(
            f"{dtype} dim {dim} batch {batch}, {chunk:2} tokens at 3000: {results}; "
            f"{rate:.1f} GB/s of sealed pages"
        )
        assert results.worst() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_plain_kivi(dtype):
    pool = Pool(200, 2, 64, dtype)
    sequences = make_sequences(pool, 2, 600)
    for chunks in ((400, 129), (1, 64), (1, 1)):
        results = run_step(list(zip(sequences, chunks)), one_slot_each(2, 64), 3)
        assert results.worst() <= TOLERANCE[dtype]


def test_prefix_hits():
    """A hit at every block boundary, on what was sealed before and on what this step seals."""
    pool = Pool(400, 2, 64, F32)
    slot_channel = make_map(2, 64)
    first, *others = make_sequences(pool, 9, 1200)
    for chunk, hitting in ((300, others[:3]), (400, others[3:])):
        first.extend(chunk)
        blocks = sealed_tokens(first.computed + chunk) // BLOCK
        work = [(first, chunk)]
        for i, other in enumerate(hitting):
            other.hit(first, (blocks - i) * BLOCK)
            work.append((other, 64 + 7 * i))
        assert run_step(work, slot_channel, 3).worst() <= 1e-5
    for chunk in (1, 63, 1, 100):
        results = run_step([(s, chunk) for s in others], slot_channel, 3)
        assert results.worst() <= 1e-5


def test_padding_requests_and_tokens():
    pool = Pool(150, 2, 64, F32)
    slot_channel = make_map(2, 64)
    sequences = make_sequences(pool, 4, 400)
    for chunks in ((0, 200, 0, 3), (130, 0, 0, 1), (0, 0, 0, 0), (0, 0, 200, 0)):
        results = run_step(list(zip(sequences, chunks)), slot_channel, 3)
        assert results.worst() <= 1e-5


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_random_schedules(data):
    draw = data.draw
    dtype, dim = draw(st.sampled_from([F32, BF16, F16])), draw(st.sampled_from([64, 128]))
    heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 17))
    torch.manual_seed(draw(st.integers(0, 1000)))
    pool = Pool(300, heads, dim, dtype, draw(st.integers(0, 3)) * 8, draw(st.integers(0, 3)) * 8)
    slot_channel = make_map(heads, dim)
    sequences = make_sequences(pool, 3, 1600)
    for _ in range(draw(st.integers(1, 5))):
        size = st.one_of(st.integers(0, 4), st.integers(0, 300))
        work = [(s, draw(size)) for s in sequences]
        donor = sequences[0]
        for s, tokens in work[1:]:
            hit = sealed_tokens(donor.computed)
            if tokens and not s.computed and hit and draw(st.booleans()):
                s.hit(donor, draw(st.integers(1, hit // BLOCK)) * BLOCK)
        assert run_step(work, slot_channel, group).worst() <= TOLERANCE[dtype]


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads(threads):
    """The same bits, however many threads share the work."""
    slot_channel = make_map(3, 64)
    before, memory, outputs = torch.get_num_threads(), [], []
    try:
        for n in (1, threads):
            torch.manual_seed(1)
            torch.set_num_threads(n)
            pool = Pool(300, 3, 64, F32)
            sequences = make_sequences(pool, 3, 2000)
            for chunks in ((1700, 500, 90), (1, 1, 200), (30, 1, 1)):
                work = list(zip(sequences, chunks))
                step, key, value = make_step(work)
                query = torch.randn(len(key), 9, 64)
                out = torch.empty_like(query)
                pages = (pool.sealed, pool.recent, step, slot_channel)
                cpu_ops.store_and_seal(key, value, *pages)
                cpu_ops.attend(query, key, value, *pages, 0.125, out)
                outputs.append(out)
                for s, tokens in work:
                    s.advance(tokens)
            memory.append(pool.raw)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*memory)
    for one, other in zip(outputs[:3], outputs[3:]):
        assert torch.equal(one, other)
