#!/usr/bin/env python3
"""Prefill and decode speed and KV capacity of the engine, one KV cache dtype beside another.

Rounds alternate between the dtypes, one engine a process; a figure is the median over rounds and
its range stands beside it. Prefill is the time until every request has its first token. Decode is
the median time of the steps after it, which bring one token to each request and nothing else; their
10th and 90th percentiles stand beside it.

  bench/engine.py --model DIR                    # on the CPU, fp32, auto and int4_kivi
  bench/engine.py --model DIR --dummy --dtype bfloat16 --rounds 1 --repeats 3 \\
      --kv auto fp8 int4_per_token_head int4_kivi --skip int4_per_token_head:128x8192 \\
      --cells 1x1024 32x8192 128x8192 --long-prompt 32768 --long-chunk 2048 --fill 4096
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from harness import batch_and_context, in_process, parser, save, serve_child
from one_engine import FILL_STEPS, Engine

DROPPED = 4  # first steps of a run that do not count
LONG_S = 3.0  # a prefill that takes longer is not repeated


def measure(
    model: str, kv: str, dtype: str, cells: list[str], steps: int, dummy: bool, chunk: int,
    repeats: int, long_prompt: int, long_chunk: int, fill: int, kv_bytes: int, ranks: int,
) -> dict[str, Any]:  # fmt: skip
    """One engine's cells by name, and its ``long`` and ``fill`` if asked for."""
    shapes = {name: batch_and_context(name) for name in cells}
    # Requests that began early decode until the last one has begun.
    slack = max((-(-b * n // ((chunk or 2048) - b)) + 3 for b, n in shapes.values()), default=0)
    lengths = [n + steps + DROPPED + slack for _, n in shapes.values()]
    longest = max([*lengths, long_prompt + 8, fill + FILL_STEPS if fill else 0])
    engine = Engine(model, kv, dtype, dummy, longest, chunk, ranks)
    result: dict[str, Any] = {"kv_tokens": engine.kv_tokens, "ready_s": engine.ready_s}
    result |= {"chunk": engine.chunk, "max_model_len": longest}
    for name, (batch, context) in shapes.items():
        mixed = engine.prefill_steps(batch, context)  # what began early decodes meanwhile
        tokens = mixed + DROPPED + steps
        if batch * (context + tokens) > engine.kv_tokens:
            print(f"{kv} {name} does not fit into {engine.kv_tokens} tokens", file=sys.stderr)
            continue
        engine.warm(batch, context)
        run = engine.run(batch, context, tokens)
        prefill = [run.prefill_s]
        while len(prefill) < repeats and prefill[0] < LONG_S:
            prefill.append(engine.run(batch, context, mixed).prefill_s)
        pure = run.steps[DROPPED:]
        if len(pure) < steps // 2:
            print(f"{kv} {name}: only {len(pure)} steps were decode alone", file=sys.stderr)
            continue
        tenths = statistics.quantiles(pure, n=10)
        result[name] = {
            "prefill_tok_s": [batch * context / s for s in prefill],
            "decode_ms": statistics.median(pure) * 1e3,
            "decode_ms_p10": tenths[0] * 1e3,
            "decode_ms_p90": tenths[-1] * 1e3,
        }
        print(kv, name, result[name], file=sys.stderr)  # if what follows fails, this is not lost
    if long_prompt:
        times = engine.long_prompt(long_prompt, long_chunk, repeats, LONG_S)
        result["long"] = {"prefill_tok_s": [long_prompt / s for s in times]}
    if fill:
        result["fill"] = engine.fill(fill, kv_bytes)
    return result


def merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several rounds: medians and ranges."""
    prefill = [x for r in rows for x in r["prefill_tok_s"]]
    row = {
        "prefill_tok_s": statistics.median(prefill),
        "prefill_tok_s_range": [min(prefill), max(prefill)],
    }
    if "decode_ms" in rows[0]:
        decode = [r["decode_ms"] for r in rows]
        row |= {k: statistics.median(r[k] for r in rows) for k in rows[0] if k.startswith("decode")}
        row["decode_ms_range"] = [min(decode), max(decode)]
    return row


def summary(runs: dict[str, list[dict[str, Any]]], names: list[str]) -> dict[str, Any]:
    """What all engines so far told, by what was measured, then by KV cache dtype."""
    done = {kv: rounds for kv, rounds in runs.items() if rounds}
    table = {
        name: {
            kv: merged([r[name] for r in rs if name in r])
            for kv, rs in done.items()
            if any(name in r for r in rs)
        }
        for name in names
    }
    first = next(iter(done.values()))[0]
    result: dict[str, Any] = {
        "chunk": first["chunk"],
        "max_model_len": first["max_model_len"],
        "kv_tokens": {kv: rs[0]["kv_tokens"] for kv, rs in done.items()},
        "ready_s": {kv: [r["ready_s"] for r in rs] for kv, rs in done.items()},
        "cells": {name: row for name, row in table.items() if row and name != "long"},
    }
    if table.get("long"):
        result["long"] = table["long"]
    if any("fill" in rs[0] for rs in done.values()):
        result["fill"] = {kv: rs[0]["fill"] for kv, rs in done.items() if "fill" in rs[0]}
    return result


def show(result: dict[str, Any], base: str) -> None:
    for name, rows in (result["cells"] | {"long": result.get("long", {})}).items():
        of = rows.get(base)
        for kv, row in rows.items():
            line = f"{name:10s} {kv:20s} prefill {row['prefill_tok_s']:8.0f} tok/s"
            if of:
                line += f" ({row['prefill_tok_s'] / of['prefill_tok_s']:.2f} x)"
            if "decode_ms" in row:
                line += f"   decode {row['decode_ms']:8.2f} ms"
                if of:
                    line += f" ({of['decode_ms'] / row['decode_ms']:.2f} x faster)"
            print(line)
    print("KV tokens that fit:", result["kv_tokens"])
    print("seconds to ready:", {k: [round(s, 1) for s in v] for k, v in result["ready_s"].items()})
    for kv, row in result.get("fill", {}).items():
        print(f"fill {kv:20s} {row}")


def main() -> None:
    ap = parser(__doc__, "engine_cpu.json")
    ap.add_argument("--model")
    ap.add_argument("--dummy", action="store_true", help="random weights: speed and capacity only")
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--kv", nargs="+", default=["auto", "int4_kivi"], help="the first is the base")
    ap.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8064])
    ap.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    ap.add_argument("--cells", nargs="+", metavar="BATCHxCONTEXT", help="instead of all pairs")
    ap.add_argument("--skip", nargs="+", default=[], metavar="KV:CELL", help="or KV:long, KV:fill")
    ap.add_argument("--chunk", type=int, default=0, help="max_num_batched_tokens (2048, GPU 8192)")
    ap.add_argument("--steps", type=int, default=64)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--repeats", type=int, default=1, help="of a prefill, in one round")
    ap.add_argument("--long-prompt", type=int, default=0, help="prefill one prompt of that length")
    ap.add_argument("--long-chunk", type=int, default=2048, help="in chunks of so many tokens")
    ap.add_argument("--fill", type=int, default=0, help="fill the cache with requests this long")
    ap.add_argument("--kv-bytes", type=int, default=8 << 30, help="of the cache, for --fill")
    ap.add_argument("--ranks", type=int, default=1, help="tensor parallelism, a GPU each")
    args = ap.parse_args()
    serve_child(args.child, measure)
    names = args.cells or [f"{b}x{c}" for c in args.contexts for b in args.batches]
    common = {"model": args.model, "dtype": args.dtype, "steps": args.steps, "dummy": args.dummy}
    common |= {"repeats": args.repeats, "long_chunk": args.long_chunk, "kv_bytes": args.kv_bytes}
    common |= {"ranks": args.ranks}
    what = {"what": __doc__, **common, "model": Path(args.model).name, "rounds": args.rounds}
    runs: dict[str, list[dict[str, Any]]] = {kv: [] for kv in args.kv}
    failed: list[str] = []
    for _ in range(args.rounds):
        for kv, done in runs.items():
            options = {
                "kv": kv,
                "chunk": args.chunk,
                "cells": [n for n in names if f"{kv}:{n}" not in args.skip],
                "long_prompt": 0 if f"{kv}:long" in args.skip else args.long_prompt,
                "fill": 0 if f"{kv}:fill" in args.skip else args.fill,
            }
            try:
                done.append(in_process(common | options))
            except SystemExit as e:  # a dtype that fails does not cost the others their time
                failed.append(f"{kv}: {e}")
                continue
            result = summary(runs, [*names, "long"] if args.long_prompt else names)
            save(args.out, what | result)  # each time: what a later engine loses is its own
    if any(runs.values()):
        show(result, args.kv[0])
        print(f"wrote {args.out}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
