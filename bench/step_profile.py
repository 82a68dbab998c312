#!/usr/bin/env python3
"""Where the time of a decode step goes: kernels of one KV cache dtype beside another's.

One engine a process. torch's profiler watches steps that bring one token to each request and
nothing else; kernels in CUDA graphs are seen too. For each kernel: how often a step runs it and
its microseconds a step. `idle` is the part of a step in which no kernel ran. On a CPU the rows are
torch's operators, with what they call left out.

  bench/step_profile.py --model DIR                                  # on the CPU default
  bench/step_profile.py --model DIR --dummy --dtype bfloat16 --cells 1x1024 1x32768 128x8192
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import batch_and_context, in_process, parser, serve_child, write
from one_engine import Engine

STEPS = 20
SHOWN = 24
Row = dict[str, float]


def short(kernel: str) -> str:
    """A kernel's name without its arguments and most of its template's."""
    name = re.sub(r"^void ", "", kernel.split("(")[0] or kernel)
    return re.sub(r"\s+", " ", name)[:76]


def table(events: list[Any], steps: int, on_gpu: bool) -> dict[str, Row]:
    """Microseconds and calls a step, by name; the largest first."""
    from torch.autograd import DeviceType

    rows: dict[str, Row] = defaultdict(lambda: {"us": 0.0, "calls": 0.0})
    for e in events:
        if on_gpu != (e.device_type == DeviceType.CUDA):
            continue
        us = e.time_range.elapsed_us() if on_gpu else e.self_cpu_time_total
        row = rows[short(e.name)]
        row["us"] += us / steps
        row["calls"] += 1 / steps
    return dict(sorted(rows.items(), key=lambda kv: -kv[1]["us"]))


def busy(events: list[Any]) -> float:
    """Microseconds in which a kernel ran, those that overlap counted once."""
    from torch.autograd import DeviceType

    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA
    )
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def profile(
    model: str, kv: str, dtype: str, cells: list[str], dummy: bool, chunk: int
) -> dict[str, Any]:
    """By cell: ``step_us`` with the profiler on, ``idle_us`` on a GPU, and ``kernels``."""
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    shapes = {name: batch_and_context(name) for name in cells}
    longest = max(context for _, context in shapes.values()) + 400
    engine = Engine(model, kv, dtype, dummy, longest, chunk)
    result: dict[str, Any] = {}
    for name, (batch, context) in shapes.items():
        engine.warm(batch, context)
        settle = engine.prefill_steps(batch, context) + 8
        names = engine.add([context] * batch, settle + STEPS + 16)
        for _ in range(settle):  # the last of them are decode alone
            engine.engine.step()
        activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as prof:
            start = time.perf_counter()
            for _ in range(STEPS):
                engine.engine.step()
            if on_gpu:
                torch.cuda.synchronize()
            step_us = (time.perf_counter() - start) * 1e6 / STEPS
        engine.engine.abort_request(names)
        events = list(prof.events())
        result[name] = {"step_us": step_us, "kernels": table(events, STEPS, on_gpu)}
        if on_gpu:
            result[name]["idle_us"] = step_us - busy(events) / STEPS
    return result


def show(result: dict[str, Any]) -> None:
    for name, sides in result["cells"].items():
        for kv, side in sides.items():
            idle = f", idle {side['idle_us']:.0f}" if "idle_us" in side else ""
            print(f"\n{name} {kv}: {side['step_us']:.0f} us a step{idle}")
            for kernel, row in list(side["kernels"].items())[:SHOWN]:
                print(f"  {row['us']:9.1f} us {row['calls']:7.1f} x  {kernel}")


def main() -> None:
    ap = parser(__doc__, "step_profile.json")
    ap.add_argument("--model")
    ap.add_argument("--kv", nargs="+", default=["auto", "int4_kivi"], metavar="DTYPE")
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--cells", nargs="+", default=["1x2048"], metavar="BATCHxCONTEXT")
    ap.add_argument("--dummy", action="store_true", help="random weights")
    ap.add_argument("--chunk", type=int, default=0, help="max_num_batched_tokens")
    args = ap.parse_args()
    serve_child(args.child, profile)
    if not args.model:
        ap.error("--model DIR is needed")
    shared = {"dtype": args.dtype, "cells": args.cells, "dummy": args.dummy, "chunk": args.chunk}
    sides = {kv: in_process({"model": args.model, "kv": kv, **shared}) for kv in args.kv}
    cells = {name: {kv: side[name] for kv, side in sides.items()} for name in args.cells}
    result = {"what": __doc__, "model": Path(args.model).name, "steps": STEPS, "cells": cells}
    show(result)
    write(args.out, result)


if __name__ == "__main__":
    main()
