#!/usr/bin/env python3
"""Time until an engine is ready: int4_kivi beside auto, with empty caches and with full ones.

Each start is a process of its own and counts from before the interpreter; weights are random. The
first of a dtype finds the caches of vLLM, Triton and torch empty (cold), those after it find what
it left (warm). The dtypes take turns. Of int4_kivi also the pass that chooses the channel maps, as
the log tells it; each start has it.

  bench/startup.py --model bench/models/qwen2.5-7b --dtype bfloat16
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import child, in_process, parser, reported, serve_child, write

MAPS = re.compile(r"channel maps of \d+ layers from \d+ tokens in ([\d.]+) s")
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def start(model: str, kv: str, dtype: str, max_model_len: int) -> dict[str, float]:
    """When it was ready, and how long the compiler took of that; an empty kv only imports."""
    from one_engine import Engine
    from vllm import LLM  # noqa: F401

    if not kv:
        return {"ready": time.time()}
    engine = Engine(model, kv, dtype, True, max_model_len)
    ready = time.time()
    engine.run(1, 64, 2)  # it does work
    config = engine.engine.vllm_config.compilation_config
    return {"ready": ready, "compile_s": config.compilation_time}


def main() -> None:
    ap = parser(__doc__, "startup.json")
    ap.add_argument("--model")
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--kv", nargs="+", default=["auto", "int4_kivi"])
    ap.add_argument("--max-model-len", type=int, default=8192)
    ap.add_argument("--warm", type=int, default=1, help="warm starts of each (default: 1)")
    args = ap.parse_args()
    serve_child(args.child, start)
    common = {"model": args.model, "dtype": args.dtype, "max_model_len": args.max_model_len}
    in_process(common | {"kv": ""})  # so that none of them is the first to read vLLM's files
    table: dict[str, dict[str, list[dict[str, float]]]] = {kv: {} for kv in args.kv}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ["cold", *["warm"] * args.warm]:
            for kv, row in table.items():
                caches = {name: f"{folder}/{kv}/{name}" for name in CACHES}
                begin = time.time()
                stdout = child(common | {"kv": kv}, caches | {"VLLM_LOGGING_LEVEL": "INFO"})
                told = reported(stdout)
                seconds = {"ready_s": told["ready"] - begin}
                if chosen := MAPS.search(stdout):
                    seconds["channel_maps_s"] = float(chosen[1])
                if told["compile_s"]:  # vLLM does not tell on a CPU
                    seconds["compile_s"] = told["compile_s"]
                row.setdefault(kind, []).append(seconds)
                print(f"{kind} {kv:12s} " + ", ".join(f"{k} {v:.1f}" for k, v in seconds.items()))
    base = args.kv[0]
    more: dict[str, Any] = {}
    for kind in table[base]:
        ready = {kv: statistics.median(r["ready_s"] for r in table[kv][kind]) for kv in table}
        more[kind] = {kv: s - ready[base] for kv, s in ready.items() if kv != base}
        print(f"{kind}: seconds more than {base}:", {k: round(s, 1) for k, s in more[kind].items()})
    common["model"] = Path(args.model).name
    write(args.out, {"what": __doc__, **common, "starts": table, f"more_than_{base}": more})


if __name__ == "__main__":
    main()
