#!/usr/bin/env python3
"""Prefill and decode speed and KV capacity of the engine, one KV cache dtype beside another.

Rounds alternate between the dtypes, one engine a process; a figure is the median over rounds and
its range stands beside it. Prefill is the time until every request has its first token. Decode is
the median time of the steps after it, which bring one token to each request and nothing else.

  bench/engine.py --model DIR                    # on the CPU, fp32, auto and int4_kivi
  bench/engine.py --model DIR --dummy --dtype bfloat16 --kv auto fp8 int4_kivi \\
      --contexts 8192 --batches 32 128 --out bench/results/engine_h200.json
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from harness import in_process, parser, serve_child, write

CPU_KV_BYTES = 6 << 30


def measure(
    model: str, kv: str, dtype: str, cells: list[list[int]], steps: int, dummy: bool, chunk: int
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv,
        load_format="dummy" if dummy else "auto",
        skip_tokenizer_init=True,
        max_model_len=max(context for context, _ in cells) + steps + 8,
        max_num_batched_tokens=chunk,
        max_num_seqs=16 if on_cpu else 256,
        **({"kv_cache_memory_bytes": CPU_KV_BYTES} if on_cpu else {"gpu_memory_utilization": 0.85}),
    )
    rng = random.Random(0)
    engine = llm.llm_engine

    def run(context: int, batch: int, tokens: int) -> dict[str, float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        for i in range(batch):
            ids = [rng.randrange(100, 40_000) for _ in range(context)]
            engine.add_request(f"{context}-{batch}-{i}", TokensPrompt(prompt_token_ids=ids), params)
        first: float | None = None
        steps: list[float] = []
        begun: set[str] = set()
        last = start
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            if first is not None and len(outputs) == batch:
                steps.append(now - last)
            begun |= {o.request_id for o in outputs}
            if first is None and len(begun) == batch:
                first = now - start
            last = now
        assert first is not None
        return {
            "prefill_tok_s": batch * context / first,
            "decode_ms": statistics.median(steps[2:]) * 1e3,
        }

    run(200, 1, 8)  # the first request may still compile
    cache = engine.vllm_config.cache_config
    result: dict[str, Any] = {"kv_tokens": cache.kv_cache_size_tokens}
    for context, batch in cells:
        result[f"{context}x{batch}"] = run(context, batch, steps)
    return result


def main() -> None:
    ap = parser(__doc__, "engine_cpu.json")
    ap.add_argument("--model")
    ap.add_argument("--dummy", action="store_true", help="random weights: speed and capacity only")
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--kv", nargs="+", default=["auto", "int4_kivi"], help="the first is the base")
    ap.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8064])
    ap.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    ap.add_argument("--chunk", type=int, default=2048, help="max_num_batched_tokens")
    ap.add_argument("--steps", type=int, default=64)
    ap.add_argument("--rounds", type=int, default=3)
    args = ap.parse_args()
    serve_child(args.child, measure)
    cells = [[c, b] for c in args.contexts for b in args.batches]
    common = {"model": args.model, "dtype": args.dtype, "cells": cells, "steps": args.steps}
    common |= {"dummy": args.dummy, "chunk": args.chunk}
    runs: dict[str, list[dict[str, Any]]] = {kv: [] for kv in args.kv}
    for _ in range(args.rounds):
        for kv, done in runs.items():
            done.append(in_process(common | {"kv": kv}))
    base = args.kv[0]
    table: dict[str, Any] = {}
    for cell in (f"{c}x{b}" for c, b in cells):
        for kv, done in runs.items():
            row: dict[str, Any] = {}
            for what in ("prefill_tok_s", "decode_ms"):
                values = [r[cell][what] for r in done]
                row[what] = statistics.median(values)
                row[what + "_range"] = [min(values), max(values)]
            table.setdefault(cell, {})[kv] = row
            of = table[cell][base]
            print(
                f"{cell:10s} {kv:20s} prefill {row['prefill_tok_s']:8.0f} tok/s "
                f"({row['prefill_tok_s'] / of['prefill_tok_s']:.2f} x)   "
                f"decode {row['decode_ms']:8.2f} ms "
                f"({of['decode_ms'] / row['decode_ms']:.2f} x faster)"
            )
    capacity = {kv: done[0]["kv_tokens"] for kv, done in runs.items()}
    print("KV tokens that fit:", capacity)
    common["model"] = Path(args.model).name
    write(args.out, {"what": __doc__, **common, "kv_tokens": capacity, "cells": table})


if __name__ == "__main__":
    main()
