"""Who owns which page, one situation a test; ``schedules.Engine`` checks every page of every step.

Random mixtures of all of them are in ``test_schedules.py``.
"""

from __future__ import annotations

import pytest
from schedules import SINKS, Engine, Settings

from s4kv_ext.format import BLOCK, sealed_tokens
from s4kv_ext.specs import prefill_peak_pages

PAGE_TOKENS = pytest.mark.parametrize("page_tokens", [16, 8])


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 50 for i in range(length)]


def recent_of(engine: Engine, rid: str) -> list[int]:
    """Indices of its recent pages."""
    return [i for i, b in enumerate(engine.managers[1].req_to_blocks[rid]) if not b.is_null]


@PAGE_TOKENS
def test_a_prompt_in_chunks(page_tokens):
    """Each step keeps the window behind it, the window before it and the sinks, and no more."""
    engine = Engine(Settings(page_tokens, max_model_len=1024, max_num_batched_tokens=300))
    rid = engine.add(prompt(700), max_tokens=5)
    sinks = [*range(SINKS // page_tokens)]

    def window(start, end):
        return [*range(start // page_tokens, -(-end // page_tokens))]

    engine.step()  # 0..300, sealed 0..192
    assert recent_of(engine, rid) == sinks + window(192, 300)
    engine.step()  # 300..600, sealed ..512
    assert recent_of(engine, rid) == sinks + window(192, 300) + window(512, 600)
    engine.step()  # 600..700, sealed ..576
    assert recent_of(engine, rid) == sinks + window(512, 700)
    engine.step()  # decodes
    assert recent_of(engine, rid) == sinks + window(576, 701)
    engine.run()
    assert not engine.leaked()


@PAGE_TOKENS
@pytest.mark.parametrize("drafts", [0, 1, 5, 63])
@pytest.mark.parametrize("chunk", [64, 65, 100, 127, 128, 512])
def test_the_smallest_pool_never_stalls(page_tokens, drafts, chunk):
    """One request of exactly max_model_len tokens in a pool of what one may need."""
    for max_model_len in (66, 129, 300):
        engine = Engine(Settings(page_tokens, max_model_len, 0, chunk, drafts=drafts))
        for length in (1, max_model_len // 2, max_model_len - 1):
            rid = engine.add(prompt(length), max_tokens=max_model_len)
            engine.run()
            assert len(engine.done[rid]) == max_model_len
        assert not engine.preemptions
        assert not engine.leaked()


@PAGE_TOKENS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_hits_end_on_a_block_and_leave_the_window(page_tokens, asynchronous):
    """Of every length; the sequence before it gave its recent pages back long ago."""
    engine = Engine(Settings(page_tokens, 700, 300, asynchronous=asynchronous))
    engine.run(engine.add(prompt(600), max_tokens=100))
    for length in (1, 16, 64, 127, 128, 129, 192, 193, 300, 577, 599, 600):
        rid = engine.add(prompt(length), max_tokens=2)
        engine.run()
        assert engine.hits[rid] == sealed_tokens(length - 1)
    assert not engine.leaked()


def test_small_chunks_after_a_hit():
    """The exception to the boundary lasts until the first block after the hit is sealed."""
    engine = Engine(Settings(16, 700, 300, 128, long_prefill_token_threshold=17))
    engine.run(engine.add(prompt(600), max_tokens=1))
    for length in range(320, 400, 7):
        rid = engine.add(prompt(length), max_tokens=70)
        engine.run()
        assert engine.hits[rid] == sealed_tokens(length - 1)
    assert not engine.leaked()


@PAGE_TOKENS
def test_a_hit_in_the_step_that_seals_it(page_tokens):
    """n = 3: the copies share what the first seals in this very step, and its sinks."""
    engine = Engine(Settings(page_tokens, 512, 200, max_num_batched_tokens=1024))
    ids = [engine.add(prompt(300), max_tokens=100) for _ in range(3)]
    engine.step()
    assert [engine.hits[rid] for rid in ids] == [0, 192, 192]
    tables = [engine.managers[0].req_to_blocks[rid] for rid in ids]
    assert tables[0] == tables[1] == tables[2]
    sinks = [engine.managers[1].req_to_blocks[rid][: SINKS // page_tokens] for rid in ids]
    assert sinks[0] == sinks[1] == sinks[2]
    used = engine.s.pool - engine.block_pool.get_num_free_blocks()
    windows = [-(-(300 - 192) // page_tokens)] * 3
    assert used == 3 + SINKS // page_tokens + sum(windows)
    engine.run()
    assert len({tuple(engine.done[rid]) for rid in ids}) == 3  # each went its own way
    assert not engine.leaked()


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_conversation(drafts, asynchronous):
    """Each turn hits prompt and answer of the turn before, as far as they were sealed."""
    engine = Engine(Settings(16, 1024, 300, drafts=drafts, asynchronous=asynchronous))
    text = prompt(100)
    for turn in range(6):
        rid = engine.add(text, max_tokens=90)
        engine.run()
        if turn:  # the last token of the turn before was sampled, not computed
            sealed = sealed_tokens(len(text) - 40 - 1)
            assert sealed - (BLOCK if drafts else 0) <= engine.hits[rid] <= sealed
        text = engine.done[rid] + prompt(40, turn)
    assert not engine.leaked()


@PAGE_TOKENS
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_resume(page_tokens, caching):
    pages = prefill_peak_pages(512, page_tokens)
    engine = Engine(Settings(page_tokens, 512, pages + 3, 128, prefix_caching=caching))
    ids = [engine.add(prompt(100 + i, i), max_tokens=400) for i in range(4)]
    engine.run()
    assert engine.preemptions
    assert [len(engine.done[rid]) for rid in ids] == [500, 501, 502, 503]
    assert not engine.leaked()


@PAGE_TOKENS
def test_a_prompt_is_admitted_if_all_its_chunks_fit(page_tokens):
    """Or it would be preempted by its own second chunk, again and again."""
    most = prefill_peak_pages(640, page_tokens)
    for pages in range(most, 2 * most, 3):
        engine = Engine(Settings(page_tokens, 640, pages, 128, prefix_caching=False))
        engine.add(prompt(500), max_tokens=30)
        for _ in range(5):
            engine.step()
        engine.add(prompt(600), max_tokens=1)
        engine.run()
        assert not engine.preemptions
        assert not engine.leaked()


@PAGE_TOKENS
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_aborts_at_any_time(page_tokens, drafts, asynchronous):
    """A copy stays and reads on from the pages that it shared."""
    engine = Engine(Settings(page_tokens, 400, 100, 100, drafts=drafts, asynchronous=asynchronous))
    for steps in range(0, 80, 3):
        ids = [engine.add(prompt(250, steps), max_tokens=100) for _ in range(2)]
        for _ in range(steps):
            engine.step()
        engine.abort(ids[0])
        engine.run()
        assert len(engine.done[ids[1]]) == 350
        engine.step()
        assert not engine.leaked()


def test_reset_prefix_cache():
    engine = Engine(Settings(16, 512, 200))
    engine.run(engine.add(prompt(300), max_tokens=10))
    running = engine.add(prompt(300), max_tokens=100)
    engine.step()
    assert engine.hits[running] == 192
    assert not engine.reset()  # refused while a request has pages
    for _ in range(20):
        engine.step()
    assert engine.reset(running=True)  # which is preempted and begins anew
    engine.run()
    assert len(engine.done[running]) == 400
    assert engine.reset()
    again = engine.add(prompt(300), max_tokens=1)
    engine.run()
    assert engine.hits[again] == 0
    assert not engine.leaked()


@PAGE_TOKENS
def test_eviction_shortens_a_hit_from_its_end(page_tokens):
    """Block by block, sinks last: what is left of a prefix is still hit."""
    engine = Engine(Settings(page_tokens, 1024, 100, max_num_batched_tokens=1024))
    hits = []
    for evicted in range(100):
        engine.reset()
        engine.run(engine.add(prompt(600), max_tokens=1))
        pages = engine.block_pool.get_new_blocks(evicted)
        engine.block_pool.free_blocks(pages)
        engine.worker.poison([page.block_id for page in pages])
        rid = engine.add(prompt(600), max_tokens=1)
        engine.run()
        hits.append(engine.hits[rid])
    assert hits == sorted(hits, reverse=True)
    assert set(hits) == set(range(0, 513, BLOCK))
    assert hits[100 - SINKS // page_tokens - 1] == BLOCK  # the last but the sinks


def test_salts_share_nothing():
    engine = Engine(Settings(16, 512, 200))
    for salt in (0, 1, 2):
        rid = engine.add(prompt(300), max_tokens=1, salt=salt)
        engine.run()
        assert engine.hits[rid] == 0
        rid = engine.add(prompt(300), max_tokens=1, salt=salt)
        engine.run()
        assert engine.hits[rid] == 192


def test_prompt_logprobs_read_no_prefix():
    engine = Engine(Settings(16, 512, 200))
    engine.run(engine.add(prompt(300), max_tokens=1))
    rid = engine.add(prompt(300), max_tokens=1, logprobs=True)
    engine.run()
    assert engine.hits[rid] == 0


@PAGE_TOKENS
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [1, 5, 63])
def test_only_accepted_drafts_are_sealed(page_tokens, asynchronous, drafts):
    """The worker accepts at random and would see a rejected token in a sealed page."""
    engine = Engine(Settings(page_tokens, 700, 300, drafts=drafts, asynchronous=asynchronous))
    ids = [engine.add(prompt(90 + i), max_tokens=500) for i in range(4)]
    engine.run()
    assert [len(engine.done[rid]) for rid in ids] == [590, 591, 592, 593]
    assert not engine.leaked()


@PAGE_TOKENS
def test_preempted_by_priority_after_it_was_scheduled(page_tokens):
    """What such a request was to compute in that step leaves the prefix cache."""
    for pages in range(25, 56):
        engine = Engine(
            Settings(
                page_tokens, 320, pages, 256, long_prefill_token_threshold=50, policy="priority"
            )
        )
        engine.add(prompt(147, first=7), max_tokens=20)
        engine.add(prompt(155), max_tokens=100, priority=2)
        engine.step()
        engine.add(prompt(184), max_tokens=200, priority=1)
        engine.run()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_of_one_token_beside_others_that_draft(asynchronous):
    """It is padded with drafts, but not where the prefill threshold would cut them off again."""
    engine = Engine(
        Settings(
            *(8, 130, 60, 64, 4),
            long_prefill_token_threshold=17,
            drafts=63,
            asynchronous=asynchronous,
        )
    )
    engine.add(prompt(57), max_tokens=65)
    for _ in range(5):
        engine.step()
    engine.add(prompt(1), max_tokens=65)
    while engine.unfinished:
        engine.step()
        assert all(r.num_computed_tokens >= 0 for r in engine.scheduler.requests.values())
    engine.step()
    assert not engine.leaked()
