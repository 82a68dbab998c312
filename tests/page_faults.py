"""Faults put into the pages of random schedules, and whether their tags tell.

The real scheduler, the worker of ``schedules.py``, and between them what a server has: the
scheduler sends tags, ``PageCheck`` looks at the block tables before the worker reads them. The
worker sees a page that holds anything but its request's own tokens: a fault is missed if it does,
if a request that the fault concerns goes on, or if a token of such a step leaves.

    python tests/page_faults.py --faults 10000 [--seed 0]
    python tests/page_faults.py --clean-steps 100000
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import schedules
import torch
from schedules import Settings
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from s4kv_ext.format import SINKS
from s4kv_ext.page_check import PageCheck
from s4kv_ext.page_faults import PageFaults
from s4kv_ext.reference import sealed_before
from s4kv_ext.specs import prefill_peak_pages


class CheckedWorker(schedules.Worker):
    """A worker as a server's: requests with wrong pages run on null pages, and that is not looked
    at, for their tokens must not leave."""

    def __init__(self, s: Settings, rng: Random) -> None:
        super().__init__(s, rng)
        tables = (self.sealed_table, self.recent_table)
        self.check = PageCheck(
            s.pool + 1,
            s.max_num_seqs,
            [t.shape[1] for t in tables],
            s.page_tokens,
            s.drafts,
            torch.device("cpu"),
        )
        self.ended: set[str] = set()  # requests with wrong pages in this step
        self.misled: set[str] = set()  # those that read what such a one was to write in this step

    def execute(self, out: SchedulerOutput) -> ModelRunnerOutput:
        self.check.begin(out)
        result = self.check.deliver(super().execute(out))
        result.misled = self.misled
        return result

    def run(self, requests: list[tuple[str, int, int, int, np.ndarray]]) -> None:
        rows = [row for _, row, *_ in requests]
        tables = [torch.from_numpy(t[rows]) for t in (self.sealed_table, self.recent_table)]
        self.before_check([rid for rid, *_ in requests], tables)
        self.check.run([rid for rid, *_ in requests], tables)
        found = self.check._found
        assert found is not None
        wrong = found.wrong[:, 0].tolist()
        self.ended = {rid for (rid, *_), w in zip(requests, wrong, strict=True) if w}
        for (row, w), sealed, recent in zip(zip(rows, wrong, strict=True), *tables, strict=True):
            assert not w or not (sealed.any() or recent.any())
            self.sealed_table[row], self.recent_table[row] = sealed.numpy(), recent.numpy()
        self.misled = set[str]()
        for part in (self._store, self._seal, self._attend):
            for request in requests:
                if request[0] in self.ended | self.misled:
                    continue
                try:
                    part(*request)
                except AssertionError:
                    if not self.ended:
                        raise
                    self.misled.add(request[0])

    def before_check(self, ids: list[str], tables: list[torch.Tensor]) -> None:
        """Where a fault of the block tables comes in."""


class CheckedEngine(schedules.Engine):
    worker: CheckedWorker

    def __init__(self, s: Settings, seed: int = 0) -> None:
        super().__init__(s, seed)
        self.worker = CheckedWorker(s, Random(seed))
        self.faults = PageFaults(self.scheduler)
        self.scheduler.page_faults = self.faults
        self.steps = 0

    def step(self) -> bool:
        self.steps += 1
        return super().step()


KINDS = ("stale", "swapped", "two owners", "freed early", "late write")


class FaultyWorker(CheckedWorker):
    """Spoils what attention is to read, in the step after ``spoil`` was set."""

    def __init__(self, s: Settings, rng: Random) -> None:
        super().__init__(s, rng)
        self.spoil = ""
        self.spoil_row = ""  # the request whose first page is to be wrong
        self.victims: set[str] = set()
        self.gone: list[tuple[str, Any]] = []  # what the worker knew of requests that ended

    def needed(self, q: schedules.Sequence) -> tuple[list[int], list[int]]:
        """Columns of its block tables that attention reads or writes, sealed and recent."""
        size = self.s.page_tokens
        sealed, recent = self.row_pages[q.row]
        window = range(sealed_before(q.computed, self.recent_table[q.row], size) // size, recent)
        columns = sorted({*range(min(SINKS // size, recent)), *window})
        return list(range(sealed)), [c for c in columns if self.recent_table[q.row, c]]

    def update(self, out: SchedulerOutput, requests: dict[str, Request]) -> None:
        for rid in out.finished_req_ids & self.sequences.keys():
            q = self.sequences[rid]
            rows = self.sealed_table[q.row].copy(), self.recent_table[q.row].copy()
            self.gone.append((rid, (q, rows)))
        super().update(out, requests)

    def run(self, requests: list[tuple[str, int, int, int, np.ndarray]]) -> None:
        before = self.spoil
        if self.spoil == "late write" and self.gone:
            rid, (q, rows) = self.gone[-1]
            row = len(self.sealed_table) - 1  # nobody's
            self.sealed_table[row], self.recent_table[row] = rows
            requests = [*requests, (rid, row, q.computed, q.computed + 1, q.tag([*q.tokens, 0]))]
            self.spoil, self.victims = "", {rid}
        super().run(requests)
        if before and not self.spoil:
            assert self.victims <= self.ended, f"{self.victims - self.ended} not found"

    def before_check(self, ids: list[str], tables: list[torch.Tensor]) -> None:
        if self.spoil_row in ids:
            tables[1][ids.index(self.spoil_row), 0] = -1
            self.victims, self.spoil_row = {self.spoil_row}, ""
        if self.spoil not in ("stale", "swapped"):
            return
        cells = [
            (i, group, column)
            for i, rid in enumerate(ids)
            for group, columns in enumerate(self.needed(self.sequences[rid]))
            for column in columns
        ]
        i, group, column = self.rng.choice(cells)
        j, other_group, other_column = self.rng.choice(cells)
        page = tables[group][i, column].item()
        new = tables[other_group][j, other_column].item()
        if self.spoil == "stale":  # any page at all, also one that does not exist
            new = self.rng.choice((*range(len(self.sealed)), -1, 1 << 20))
        if new == page:
            return
        tables[group][i, column] = new
        self.victims.add(ids[i])
        if self.spoil == "swapped":
            tables[other_group][j, other_column] = page
            self.victims.add(ids[j])
        self.spoil = ""


class FaultyEngine(CheckedEngine):
    """Gives pages away that are somebody's, when it is told to."""

    worker: FaultyWorker

    def __init__(self, s: Settings, seed: int) -> None:
        super().__init__(s, seed)
        self.rng = Random(seed)
        self.worker = FaultyWorker(s, self.rng)
        self.victims: set[str] = set()
        self.caught: set[str] = set()
        self.give_twice = False
        self._get_new_blocks = self.block_pool.get_new_blocks
        self.block_pool.get_new_blocks = self._give  # type: ignore[method-assign]

    def _check_pages(self, *_: Any) -> None:
        """The model of who owns what does not hold with a fault."""

    _check_hits = _check_pages

    def _give(self, n: int) -> list[KVCacheBlock]:
        new = self._get_new_blocks(n)
        if self.give_twice and new and (page := self._somebodys()):
            self.give_twice = False
            self.block_pool.evict_blocks({page.block_id})
            self.block_pool.free_blocks([new[-1]])
            new[-1] = page
        return new

    def _somebodys(self) -> KVCacheBlock | None:
        """A page that one running request holds and will read."""
        running = [r.request_id for r in self.scheduler.running]
        held = [
            (rid, manager.req_to_blocks[rid][c])
            for rid in running
            if rid in self.worker.sequences
            for manager, columns in zip(
                self.managers, self.worker.needed(self.worker.sequences[rid]), strict=True
            )
            for c in columns
            if c < len(manager.req_to_blocks[rid])
        ]
        own = [(r, b) for r, b in held if b.ref_cnt == 1 and not b.is_null]
        if not own:
            return None
        rid, page = self.rng.choice(own)
        self.victims.add(rid)
        return page

    def inject(self, kind: str) -> None:
        if kind == "two owners":
            self.give_twice = True
        elif kind == "freed early":
            if page := self._somebodys():
                self.block_pool.evict_blocks({page.block_id})
                self.block_pool.free_blocks([page])  # and it is the next to be given out
        else:
            self.worker.spoil = kind

    def _finish_step(self, out: SchedulerOutput, result: ModelRunnerOutput) -> None:
        requests = dict(self.scheduler.requests)
        lengths = {rid: r.num_output_tokens for rid, r in requests.items()}
        super()._finish_step(out, result)
        for rid, request in requests.items():
            if request.status == RequestStatus.FINISHED_ERROR:
                assert request.num_output_tokens == lengths[rid], "a token left"
                self.caught.add(rid)
        going_on = result.misled & self.scheduler.requests.keys()
        assert not going_on, f"{going_on} read what was not written"


def fault(kind: str, seed: int) -> str:
    """One fault in one run: "caught", or why it came to nothing. Raises if it was missed."""
    rng = Random(f"{kind} {seed}")
    s = schedules.random_schedule(rng).settings
    s = replace(s, max_model_len=max(200, s.max_model_len), max_num_seqs=max(3, s.max_num_seqs))
    s = replace(s, pages=3 * prefill_peak_pages(s.max_model_len, s.page_tokens, s.drafts))
    engine = FaultyEngine(s, seed)
    for i in range(rng.randint(3, 8)):
        n = rng.randint(1, s.max_model_len // 2)
        shared = Random(rng.randrange(2)).choices(range(schedules.VOCAB), k=rng.randint(0, n - 1))
        prompt = shared + Random(i + 10).choices(range(schedules.VOCAB), k=n - len(shared))
        engine.add(prompt, rng.choice((20, 70, 200)))
    for _ in range(rng.randint(2, 60)):
        engine.step()
    engine.inject(kind)
    engine.run()
    engine.step()
    victims = engine.victims | engine.worker.victims
    assert not engine.leaked(), f"{engine.leaked()} pages leaked"
    if kind in ("stale", "swapped", "late write"):  # the worker has asserted the rest
        others = engine.caught - concerned(engine, victims)
        assert not others, f"{others} were ended with {victims}"
        return "caught" if victims else "no step came"
    if not engine.caught:
        return "the page was not read again" if victims else "nobody had a page of its own"
    return "caught"


def concerned(engine: FaultyEngine, victims: set[str]) -> set[str]:
    """The victims, and requests with a prefix in common with one."""
    first = {rid: tuple(tokens[:64]) for rid, tokens in engine.done.items()}
    return victims | {r for r in first if any(first[r] == first.get(v) for v in victims)}


def clean(steps: int, seed: int) -> tuple[int, int]:
    """Steps taken of random schedules, and alarms: there must be none."""
    taken = alarms = 0
    with patch.object(schedules, "Engine", CheckedEngine):
        while taken < steps:
            engine: Any = schedules.play(schedules.random_schedule(Random(seed)))
            taken, alarms, seed = taken + engine.steps, alarms + engine.faults.count, seed + 1
    return taken, alarms


def many(kind: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Outcomes until so many were caught, and what was missed."""
    outcomes: Counter[str] = Counter()
    missed: list[str] = []
    while outcomes["caught"] + len(missed) < count:
        try:
            outcomes[fault(kind, seed)] += 1
        except Exception as error:
            missed.append(f"{kind}, seed {seed}: {error!r}")
        seed += 1
    return outcomes, missed


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from bench.harness import RESULTS, write

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--clean-steps", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--out", type=Path, default=RESULTS / "page_faults.json")
    args = parser.parse_args()
    each = -(-args.faults // len(KINDS))
    result: dict[str, Any] = {"caught": {}, "missed": []}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = {kind: pool.submit(many, kind, each, args.seed) for kind in KINDS}
        quiet = pool.submit(clean, args.clean_steps, args.seed)
        for kind, run in runs.items():
            outcomes, missed = run.result()
            result["caught"][kind] = outcomes["caught"]
            result["missed"] += missed
            print(f"{kind}: {dict(outcomes)}", *missed, sep="\n  ", flush=True)
        result["clean_steps"], result["alarms"] = quiet.result()
    print(f"{sum(result['caught'].values())} faults caught, {len(result['missed'])} missed")
    print(f"{result['clean_steps']} steps without a fault, {result['alarms']} alarms")
    write(args.out, {"what": __doc__, "seed": args.seed, **result})
    return bool(result["alarms"] or result["missed"])


if __name__ == "__main__":
    sys.exit(main())
