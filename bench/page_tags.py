#!/usr/bin/env python3
"""What page tags cost: decode steps with the comparison and without, by turns, in one engine.

Beside the two medians stands the time that the host spends on tags, as a share of a step. On a CPU
that is all of it, and steps vary by more; on a GPU most of it overlaps with the step before, and
what counts is the difference of the medians. Every run of a cell has the same prompts, which those
after the first find in the prefix cache.

  bench/page_tags.py --model DIR                                    # on the CPU default
  bench/page_tags.py --model DIR --dummy --dtype bfloat16 --cells 32x8192 128x8192
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from harness import batch_and_context, in_process, parser, serve_child, write
from one_engine import Engine, Run

DROPPED = 4  # first steps of a run that do not count


@contextlib.contextmanager
def without() -> Iterator[None]:
    """No tags travel and nothing is compared. What begins without them must end without them."""
    from s4kv_ext.page_check import PageCheck
    from s4kv_ext.page_faults import PageFaults, StepTags

    with (
        patch.object(PageFaults, "step_tags", lambda *_: StepTags({}, {}, {})),
        patch.object(PageCheck, "run", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    """Add up the seconds in what tags need."""
    from s4kv_ext.page_check import PageCheck
    from s4kv_ext.page_faults import PageFaults

    def clock(method: Any) -> Any:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    parts = [(PageFaults, "step_tags"), *((PageCheck, n) for n in ("begin", "run", "deliver"))]
    with contextlib.ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(patch.object(owner, name, clock(getattr(owner, name))))
        yield


def same_run(engine: Engine, batch: int, context: int, tokens: int) -> Run:
    """Of the prompts that any run of these sizes has."""
    engine.random = np.random.default_rng(0)
    return engine.run(batch, context, tokens)


def measure(
    model: str, dtype: str, cells: list[str], steps: int, rounds: int, dummy: bool
) -> dict[str, Any]:
    shapes = {name: batch_and_context(name) for name in cells}
    longest = max(context for _, context in shapes.values()) + steps + 600
    engine = Engine(model, "int4_kivi", dtype, dummy, longest, prefix_caching=True)
    result: dict[str, Any] = {}
    for name, (batch, context) in shapes.items():
        tokens = engine.prefill_steps(batch, context) + DROPPED + steps
        engine.warm(batch, context)
        same_run(engine, batch, context, tokens)
        on, off, share = [], [], []
        for _ in range(rounds):
            spent = [0.0]
            with timed(spent):
                start = time.perf_counter()
                run = same_run(engine, batch, context, tokens)
                share.append(spent[0] / (time.perf_counter() - start))
            on.append(statistics.median(run.steps[DROPPED:]) * 1e3)
            with without():
                run = same_run(engine, batch, context, tokens)
            off.append(statistics.median(run.steps[DROPPED:]) * 1e3)
        result[name] = {"with_ms": on, "without_ms": off, "host_share": share}
    return result


def main() -> None:
    ap = parser(__doc__, "page_tags.json")
    ap.add_argument("--model", required=False)
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--dummy", action="store_true", help="random weights")
    ap.add_argument("--cells", nargs="+", default=["1x2048", "8x2048"], help="batch x context")
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--rounds", type=int, default=5)
    args = ap.parse_args()
    serve_child(args.child, measure)
    options = {name: getattr(args, name) for name in ("dtype", "cells", "steps", "rounds", "dummy")}
    cells = in_process(options | {"model": args.model})
    for name, c in cells.items():
        on, off = (statistics.median(c[k]) for k in ("with_ms", "without_ms"))
        share = statistics.median(c["host_share"])
        ratios = sorted(a / b for a, b in zip(c["with_ms"], c["without_ms"], strict=True))
        print(
            f"{name:10s} {on:8.3f} ms with, {off:8.3f} without: {on / off - 1:+.2%} "
            f"({ratios[0] - 1:+.2%} to {ratios[-1] - 1:+.2%}); host {share:.2%}"
        )
    write(args.out, {"what": __doc__, "model": Path(args.model).name, **options, "cells": cells})


if __name__ == "__main__":
    main()
