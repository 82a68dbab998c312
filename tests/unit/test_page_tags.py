"""Page tags: what the comparison finds, faults put into random schedules, and steps without any."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import pytest
import torch
from page_faults import KINDS, CheckedEngine, FaultyEngine, clean, fault
from schedules import Settings

from s4kv_ext.page_check import PageCheck
from s4kv_ext.page_tags import MAX_TAG, PoolTags
from s4kv_ext.reference import OUTSIDE, wrong_pages


def first_wrong(tags, expected, table, first, end, always):
    for column, (want, page) in enumerate(zip(expected, table, strict=True)):
        if column < end and (column >= first or column < always):
            found = tags[page] if 0 <= page < len(tags) else OUTSIDE
            if found != want:
                return [1, page, want, found]
    return None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(20))
def test_the_first_wrong_page_of_each_row(seed, dtype):
    """Against plain loops; tables with garbage in all columns that are not needed."""
    torch.manual_seed(seed)
    rows, width, pages = 7, 23, 40
    tags = torch.randperm(1000)[:pages].int()
    table = torch.randint(0, pages, (rows, width)).to(dtype)
    expected = tags[table.long()]
    first = torch.randint(0, width, (rows,))
    end = torch.randint(0, width + 1, (rows,))
    always = seed % 3
    for row in range(rows):
        column = torch.arange(width)
        needed = (column < end[row]) & ((column >= first[row]) | (column < always))
        table[row, ~needed] = torch.randint(-(2**31), 2**31 - 1, (int((~needed).sum()),)).to(dtype)
    hits = torch.rand(rows, width) < 0.05
    table[hits] = torch.randint(-3, pages + 3, (int(hits.sum()),)).to(dtype)
    wrong = wrong_pages(tags, expected, table, first, end, always)
    found = 0
    for row in range(rows):
        arguments = (x[row].tolist() for x in (expected, table, first, end))
        right = first_wrong(tags.tolist(), *arguments, always)
        assert wrong[row].tolist() == (right or [0, 0, 0, 0])
        found += right is not None
    print(f"{found} of {rows} rows wrong")


def test_tags_of_a_pool_differ_and_wrap():
    class Block:
        is_null = False

        def __init__(self, i):
            self.block_id = i

    tags = PoolTags(4)
    tags._last = MAX_TAG - 2
    assert tags.give([Block(1), Block(2), Block(3), Block(1)]) == [MAX_TAG - 1, MAX_TAG, 1, 2]
    assert tags.now == [0, 2, MAX_TAG, 1]
    assert tags.take_given() == {1: 2, 2: MAX_TAG, 3: 1}
    assert tags.take_given() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_caught(kind):
    outcomes = [fault(kind, seed) for seed in range(25)]
    print({o: outcomes.count(o) for o in set(outcomes)})
    assert outcomes.count("caught") >= 15


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_comparison_they_are_missed(kind):
    """So that the test above can fail."""
    missed = 0
    with patch("s4kv_ext.cpu_ops.check_pages", lambda *arguments: arguments[-1].zero_()):
        for seed in range(4):
            try:
                missed += fault(kind, seed) != "caught"
            except Exception:
                missed += 1
    assert missed == 4


def test_no_alarm_without_a_fault():
    taken, alarms = clean(1500, seed=0)
    assert taken >= 1500 and not alarms


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_shares_what_was_not_written(asynchronous):
    """The second request hits pages that the first is to seal in the same step. The first has a
    wrong page and writes nothing: both end, a third of another prompt goes on, and a fourth does
    not find what was never written."""
    engine = FaultyEngine(Settings(max_num_batched_tokens=512, asynchronous=asynchronous), 0)
    same, other = [Random(i).choices(range(50), k=200) for i in (1, 2)]
    first, second = engine.add(same, 20), engine.add(same, 20)
    third = engine.add(other, 20)
    engine.worker.spoil_row = first
    engine.run()
    assert engine.caught == {first, second}
    assert len(engine.done[third]) == 220 and len(engine.done[first]) == 200
    fourth = engine.add(same, 20)
    request = engine.scheduler.requests[fourth]
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 0
    engine.run()
    assert len(engine.done[fourth]) == 220
    assert not engine.leaked()


def test_what_was_not_written_leaves_the_cache_with_its_request():
    """Its client leaves while the step with the wrong page is in flight: the pages that it was to
    seal are free by then, and in the prefix cache. Who shares what it had hit goes on."""
    s = Settings(max_num_batched_tokens=512, asynchronous=True, pages=200)
    engine = FaultyEngine(s, 0)
    begin, own = [Random(i).choices(range(50), k=200) for i in (1, 2)]
    engine.run(engine.add(begin, 1))
    sharing = engine.add(begin[:150] + [7] * 60, 40)
    first = engine.add(begin + own, 20)
    engine.worker.spoil_row = first
    engine.step()
    engine.abort(first)
    engine.step()
    assert engine.worker.victims == {first} and not engine.caught
    again = engine.add(begin + own, 20)
    request = engine.scheduler.requests[again]
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 128
    engine.run()
    assert len(engine.done[again]) == 420 and len(engine.done[sharing]) == 250
    assert not engine.caught and not engine.leaked()


def test_ranks_agree():
    """What one rank alone finds ends the request on all."""
    engine = FaultyEngine(Settings(pages=200), 0)
    first, second = [engine.add([i] * 200, 20) for i in (1, 2)]
    engine.worker.check.group = "both"
    steps = []

    def of_both(wrong, op, group):
        assert group == "both" and not wrong.any()
        steps.append(len(wrong))
        if len(steps) == 5:
            wrong[0] = torch.tensor([1, 7, 8, 9])

    with patch("torch.distributed.all_reduce", of_both):
        engine.run()
    assert engine.caught == {first}
    assert len(engine.done[second]) == 220 and not engine.leaked()


def test_a_request_without_rows_is_withdrawn():
    """What a worker runs without having been told of it may read nothing."""
    check = PageCheck(10, 2, (4, 4), 16, 0, torch.device("cpu"))
    engine = CheckedEngine(Settings())
    rid = engine.add([1] * 40, 5)
    out = engine.scheduler.schedule()
    check.begin(out)
    tables = [torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]).int() for _ in range(2)]
    check.run(["unheard of", rid], tables)
    assert not tables[0][0].any() and not tables[1][0].any()


def test_a_dummy_run_is_not_looked_at():
    """Also where the step before it had nothing to run, but requests that ended."""
    check = PageCheck(10, 2, (4, 4), 16, 0, torch.device("cpu"))
    engine = CheckedEngine(Settings())
    engine.abort(engine.add([1] * 40, 5))
    check.begin(engine.scheduler.schedule())
    tables = [torch.tensor([[1, 2, 3, 4]]) for _ in range(2)]
    check.run([], tables)
    check.run(["dummy"], tables)
    assert tables[0].all() and tables[1].all() and check.deliver("output") == "output"


def test_steps_without_tags_are_for_warm_up_alone():
    """The V2 runner warms up with steps of its own, before there is a scheduler."""
    check = PageCheck(10, 2, (4, 4), 16, 0, torch.device("cpu"))
    engine = CheckedEngine(Settings())
    rid = engine.add([1] * 40, 5)
    out = engine.scheduler.schedule()
    tags, out.kv_connector_metadata = out.kv_connector_metadata, None
    check.begin(out)
    tables = [torch.tensor([[1, 2, 3, 4]]).int() for _ in range(2)]
    check.run([rid], tables)
    assert tables[0].all() and tables[1].all() and check.deliver("output") == "output"
    out.kv_connector_metadata = tags
    check.begin(out)
    out.kv_connector_metadata = None
    with pytest.raises(AssertionError, match="a step without page tags"):
        check.begin(out)


def test_more_requests_than_rows():
    """A reset of the prefix cache sends running requests back to wait; others may come first."""
    s = Settings(max_num_seqs=2, policy="priority", pages=200)
    engine = CheckedEngine(s)
    for wave in range(4):
        for _ in range(2):
            engine.add([wave] * 100, 60, priority=-wave)
        for _ in range(5):
            engine.step()
        engine.reset(running=True)
    engine.run()
    assert len(engine.done) == 8 and not engine.faults.count
    assert all(len(t) == 160 for t in engine.done.values())
