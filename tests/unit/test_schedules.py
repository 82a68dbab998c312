"""Random schedules through the real scheduler, and proof that they would see a mistake."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import real_pages
import schedules
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from schedules import Player, failure, play, random_schedule, random_settings, shrink
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from s4kv_ext.format import BLOCK, sealed_tokens
from s4kv_ext.managers import RecentManager, SealedManager


@pytest.mark.parametrize("first", range(0, 300, 25))
def test_fixed_seeds(first):
    """The schedules that `make soak` begins with."""
    for seed in range(first, first + 25):
        play(random_schedule(Random(seed)))


class AnySchedule(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which shortens what fails."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @initialize(rng=st.randoms(use_true_random=False))
    def begin(self, rng):
        self.player = Player(random_settings(rng))

    def do(self, name: str, *args: Any) -> None:
        getattr(self.player, name)(self.count, *args)
        self.count += 1

    @rule(
        family=st.integers(0, 2),
        share=st.floats(0, 1),
        tail=st.sampled_from((0, 1, 30, 100)),
        max_tokens=st.integers(1, 700),
        copies=st.integers(1, 3),
        salt=st.integers(0, 1),
        logprobs=st.booleans(),
        priority=st.integers(0, 2),
    )
    def add(self, family, share, tail, max_tokens, copies, salt, logprobs, priority):
        length = 1 + int(share * (self.player.limit - 2))
        self.do("add", family, length, tail, max_tokens, copies, salt, logprobs, priority)

    @rule(which=st.integers(0, 7), length=st.integers(1, 150), max_tokens=st.integers(1, 150))
    def next_turn(self, which, length, max_tokens):
        self.do("next_turn", which, length, max_tokens)

    @rule(which=st.integers(0, 7))
    def abort(self, which):
        self.do("abort", which)

    @rule(running=st.booleans())
    def reset(self, running):
        self.do("reset", running)

    @rule(times=st.integers(1, 130))
    def step(self, times):
        self.do("step", times)

    @rule()
    def run_all(self):
        self.do("run")

    def teardown(self):
        if hasattr(self, "player"):
            self.player.end()


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_hypothesis_would_find_a_mistake():
    quick = settings(TestAnySchedule.settings, phases=(Phase.generate,), report_multiple_bugs=False)
    with patch.object(schedules, "sealed_before", no_hit), pytest.raises(AssertionError):
        run_state_machine_as_test(AnySchedule, settings=quick)


@pytest.mark.parametrize("worker", [real_pages.Reference, real_pages.CpuKernels])
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_keys_and_values_of_the_same_steps(first, worker):
    candidates = (random_schedule(Random(seed)) for seed in itertools.count(10 * first))
    small = (s for s in candidates if s.settings.max_model_len <= 200)
    with patch.object(schedules, "Worker", worker):
        for schedule in itertools.islice(small, 5):
            play(schedule)


@pytest.mark.parametrize("reads", ["act", "contexts"])
def test_a_wrong_key_is_seen(reads):
    """Another page than the block table says, by a kernel alone."""
    read = getattr(real_pages.CpuKernels, reads)

    def wrong(self, *args):
        *others, step = args
        return read(self, *others, replace(step, sealed_table=step.sealed_table.roll(1, 1)))

    with (
        patch.object(schedules, "Worker", real_pages.CpuKernels),
        patch.object(real_pages.CpuKernels, reads, wrong),
    ):
        assert "or NaN" in first_failure()


def too_early(self, num_computed_tokens):
    return sealed_tokens(num_computed_tokens) + BLOCK


def no_margin(self, num_computed_tokens):
    return sealed_tokens(num_computed_tokens)


def keep_count(self, request_id, pop=RecentManager.pop_blocks_for_free):
    kept = dict(self._num_returned)
    blocks = pop(self, request_id)
    self._num_returned = kept
    return blocks


def no_hit(computed, row, page_tokens):
    return sealed_tokens(computed)


def one_after_another(self, requests):
    for request in requests:
        for part in (self._store, self._seal, self._attend):
            part(*request)


def own_length(cls, block_hashes, max_length, *args, **kwargs):
    find = FullAttentionManager.find_longest_cache_hit.__func__
    return find(cls, block_hashes, max(max_length - 2 * BLOCK, 0), *args, **kwargs)


def no_sinks(self, request, num_tokens, retention_interval=None):
    pass


def uncounted(add, name):
    """Adds what was hit, and leaves this counter as it was."""

    def wrong(self, *args):
        before = getattr(self, name)
        add(self, *args)
        setattr(self, name, before)

    return wrong


SKIP, FIND = "get_num_skipped_tokens", "find_longest_cache_hit"
READ: dict[str, Any] = {
    "recent pages given back a block early": patch.object(RecentManager, SKIP, too_early),
    "no margin for drafts": patch.object(RecentManager, SKIP, no_margin),
    "a hit that the worker forgets": patch.object(schedules, "sealed_before", no_hit),
    "attending before others sealed": patch.object(schedules.Worker, "run", one_after_another),
}
OWNED: dict[str, Any] = {
    "null gaps end the giving back": patch.object(
        RecentManager, "remove_skipped_blocks", SlidingWindowManager.remove_skipped_blocks
    ),
    "a count that outlives its request": patch.object(
        RecentManager, "pop_blocks_for_free", keep_count
    ),
    "hits cut short": patch.object(SealedManager, FIND, classmethod(own_length)),
    "sinks that are never cached": patch.object(RecentManager, "cache_blocks", no_sinks),
}


ADD = "add_local_computed_blocks"
COUNTED: dict[str, Any] = {
    "hits that are in use and not counted": patch.object(
        RecentManager, ADD, uncounted(RecentManager.add_local_computed_blocks, "pages_in_use")
    ),
    "hits that are held and not counted": patch.object(
        SealedManager, ADD, uncounted(SealedManager.add_local_computed_blocks, "num_held")
    ),
}


def first_failure() -> str:
    return next(filter(None, (failure(random_schedule(Random(seed))) for seed in range(200))), "")


@pytest.mark.parametrize("mistake", READ)
def test_a_wrong_page_is_seen_when_it_is_read(mistake):
    """Also by a worker that knows nothing of who owns a page."""
    with READ[mistake], patch.object(schedules.Engine, "_check_pages"):
        assert re.search("reads|seals", first_failure())


@pytest.mark.parametrize("mistake", OWNED)
def test_a_wrong_owner_is_seen(mistake):
    with OWNED[mistake]:
        assert re.search("recent pages|are there|idle", first_failure())


@pytest.mark.parametrize("mistake", COUNTED)
def test_a_wrong_count_is_seen(mistake):
    with COUNTED[mistake]:
        assert "in the metrics" in first_failure()


def test_shrinking_keeps_the_failure():
    with patch.object(schedules, "sealed_before", no_hit):
        schedule = next(
            s for s in (random_schedule(Random(seed)) for seed in range(50)) if failure(s)
        )
        small = shrink(schedule)
        assert failure(small)
        assert len(small.ops) <= len(schedule.ops)
    assert not failure(small)
