#!/usr/bin/env python3
"""Decode and prefill speed of the engine on this CPU, int4_kivi beside auto, fp32.

Rounds alternate between the two, one engine a process; each figure is the median over rounds and
the spread their range. Decode time is the difference of two runs that share their prompts through
the prefix cache, so prefill does not enter it.

  bench/engine_cpu.py --model DIR
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from harness import in_process, parser, serve_child, write


def measure(model: str, kv: str, cells: list[list[int]], steps: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    longest = max(context for context, _ in cells) + steps + 8
    llm = LLM(
        model,
        dtype="float32",
        kv_cache_dtype=kv,
        max_model_len=longest,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        kv_cache_memory_bytes=6 << 30,
    )
    rng = random.Random(0)

    def timed(prompts: list[Any], tokens: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    result = {}
    for context, batch in cells:
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(100, 40_000) for _ in range(context)])
            for _ in range(batch)
        ]
        prefill = timed(prompts, 1)
        short, long = timed(prompts, 2), timed(prompts, 2 + steps)
        result[f"{context}x{batch}"] = {
            "prefill_tok_s": batch * context / prefill,
            "decode_ms": (long - short) / steps * 1e3,
        }
    return result


def main() -> None:
    ap = parser(__doc__, "engine_cpu.json")
    ap.add_argument("--model")
    ap.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8064])
    ap.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    ap.add_argument("--steps", type=int, default=64)
    ap.add_argument("--rounds", type=int, default=3)
    args = ap.parse_args()
    serve_child(args.child, measure)
    cells = [[c, b] for c in args.contexts for b in args.batches]
    runs: dict[str, list[dict[str, Any]]] = {"auto": [], "int4_kivi": []}
    for _ in range(args.rounds):
        for kv, done in runs.items():
            done.append(
                in_process({"model": args.model, "kv": kv, "cells": cells, "steps": args.steps})
            )
    table: dict[str, Any] = {}
    print(
        f"{'context x batch':16s} {'prefill tok/s':>24s} {'ratio':>6s} "
        f"{'decode ms':>20s} {'ratio':>6s}"
    )
    for cell in runs["auto"][0]:
        row: dict[str, Any] = {}
        for what in ("prefill_tok_s", "decode_ms"):
            for kv, done in runs.items():
                values = [r[cell][what] for r in done]
                row[f"{what} {kv}"] = statistics.median(values)
                row[f"{what} {kv} range"] = [min(values), max(values)]
        row["prefill_ratio"] = row["prefill_tok_s int4_kivi"] / row["prefill_tok_s auto"]
        row["decode_speedup"] = row["decode_ms auto"] / row["decode_ms int4_kivi"]
        table[cell] = row
        print(
            f"{cell:16s} {row['prefill_tok_s auto']:11.0f} {row['prefill_tok_s int4_kivi']:12.0f} "
            f"{row['prefill_ratio']:6.2f} {row['decode_ms auto']:9.1f} "
            f"{row['decode_ms int4_kivi']:10.1f} {row['decode_speedup']:6.2f}"
        )
    write(args.out, {"what": __doc__, "model": args.model, "rounds": args.rounds, "cells": table})


if __name__ == "__main__":
    main()
