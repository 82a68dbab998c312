#!/usr/bin/env python3
"""What storing and sealing cost of a decode step, one layer of the Qwen2.5-7B shape.

A request seals a block in one step of 64. store: a step in which none does; seal: one in which all
do; mean: (63 store + seal) / 64. plan is once a step, the rest once a layer. of_attention: the
share of plan, store and seal of a step's attention. With --engine, the JSON of bench/engine.py,
of_step: their share of the step measured there.

  bench/seal.py --engine bench/results/engine_qwen2.5-7b.json
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_timing import graph_times, sets_for, spread
from harness import machine, parser, write
from peers import DIM, GROUP, HEADS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from s4kv_ext import cuda_ops
from s4kv_ext.format import BLOCK, sealed_tokens
from tests.gpu.cases import Case, Request

LAYERS = 28


class Step:
    """One decode step of ``batch`` requests that brings each to ``total`` tokens."""

    def __init__(self, batch: int, total: int) -> None:
        self.case = case = Case([Request(total - 1, 1)] * batch, HEADS, GROUP, DIM, pad=0, offset=0)
        self.out = case.query.new_empty(case.query.shape)
        count, stride = case.pages.sealed.shape[0], case.pages.sealed.stride(0)
        clones = sets_for(case.decode_bytes()) - 1
        self.pages = [
            cuda_ops.Pages(*case.views(m, count, stride, 0), case.pages.slot_channel)
            for m in [case.memory, *(case.memory.clone() for _ in range(clones))]
        ]
        case.update()

    def plan(self, pages: cuda_ops.Pages) -> None:
        self.case.update()

    def store(self, pages: cuda_ops.Pages) -> None:
        cuda_ops.store_and_seal(self.case.plan, self.case.key, self.case.value, pages)

    def decode(self, pages: cuda_ops.Pages) -> None:
        case = self.case
        cuda_ops.decode(case.plan, case.query, self.out, pages, case.scale)

    def both(self, pages: cuda_ops.Pages) -> None:
        self.store(pages)
        self.decode(pages)

    def times(self, *runs: Callable[[cuda_ops.Pages], None]) -> list[dict[str, float]]:
        """Of each, in three rounds by turns: a GPU's clocks are not the same for long."""
        found: list[list[float]] = [[] for _ in runs]
        for _ in range(3):
            for times, run in zip(found, runs, strict=True):
                times += graph_times([functools.partial(run, p) for p in self.pages])
        return [spread(times) for times in found]


def mean(store: dict[str, float], seal: dict[str, float]) -> dict[str, float]:
    return {k: round(((BLOCK - 1) * store[k] + seal[k]) / BLOCK, 2) for k in store}


def measure(batch: int, context: int) -> dict[str, Any]:
    sealing = context // BLOCK * BLOCK
    assert sealed_tokens(sealing) > sealed_tokens(sealing - 1)
    step = Step(batch, sealing)
    names = ("seal", "seal_and_decode")
    row = dict(zip(names, step.times(step.store, step.both), strict=True))
    step = Step(batch, sealing - BLOCK // 2)
    names = ("plan", "store", "decode", "store_and_decode")
    times = step.times(step.plan, step.store, step.decode, step.both)
    row |= zip(names, times, strict=True)
    row["mean"] = mean(row["store"], row["seal"])
    row["mean_and_decode"] = mean(row["store_and_decode"], row["seal_and_decode"])
    return row


def shares(row: dict[str, Any], step_ms: float | None) -> dict[str, float]:
    """Of the attention of a step, and of all of it."""
    plan, decode, both = (row[k]["us"] for k in ("plan", "decode", "mean_and_decode"))
    more = plan + LAYERS * (both - decode)
    share = {"of_attention": round(more / (plan + LAYERS * both), 4)}
    if step_ms:
        share |= {"step_ms": step_ms, "of_step": round(more / 1e3 / step_ms, 4)}
    return share


def main() -> None:
    ap = parser(__doc__, "seal.json")
    ap.add_argument("--context", type=int, default=8192)
    ap.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    ap.add_argument("--engine", type=Path, help="JSON of bench/engine.py, same context")
    args = ap.parse_args()
    cells = json.loads(args.engine.read_text())["cells"] if args.engine else {}
    print(f"{machine().get('gpu')}; microseconds a layer, plan a step")
    table = {}
    for batch in args.batches:
        name = f"{batch}x{args.context}"
        row = measure(batch, args.context)
        row |= shares(row, cells.get(name, {}).get("int4_kivi", {}).get("decode_ms"))
        table[name] = row
        told = {k: v["us"] if isinstance(v, dict) else v for k, v in row.items()}
        print(name, ", ".join(f"{k} {v}" for k, v in told.items()), flush=True)
    write(args.out, {"what": __doc__, "model": "Qwen2.5-7B", "layers": LAYERS, "cells": table})


if __name__ == "__main__":
    main()
