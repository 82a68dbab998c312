#!/usr/bin/env python3
"""Decode attention, one layer of the Qwen2.5-7B shape: int4_kivi beside four others.

    python bench/attention.py                          # all shapes, about a minute and a half
    python bench/attention.py --peers fa3_bf16 --cells 1x8192 32x8192

The others are FlashAttention 3 on bf16 and fp8, vLLM's own int4_per_token_head, and the int4
split-K kernel of xformers. One that is not installed is left out. Every kernel is timed inside a
CUDA graph that reads several caches in turn, more than the L2 holds. `error` is the first request's
output against plain float64 attention over what its cache dequantises to. FlashAttention 3 runs as
vLLM runs it in decode graphs and with its own choice of splits; the better of the two counts.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from cuda_timing import copy_bandwidth, graph_times, sets_for, spread
from harness import batch_and_context, machine, parser, save
from peers import DIM, GROUP, HEADS, PEERS, Launch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from s4kv_ext import cuda_ops
from tests.gpu.cases import Case, Request, relative_error

CELLS = [f"{b}x{n}" for n in (1024, 8192, 32768, 131072) for b in (1, 8, 32, 128) if b * n <= 2**22]


def rates(times: list[float], nbytes: int, copy: float) -> dict[str, Any]:
    row = spread(times)
    rate = nbytes / row["us"] / 1000
    return row | {"gb_per_s": round(rate), "of_copy": round(rate / copy, 3)}


def measured(launch: Launch, copy: float) -> dict[str, Any]:
    row = rates(graph_times(launch.runs), launch.nbytes, copy)
    error = relative_error(launch.runs[0]()[0], launch.expected)
    return row | {"error": error} | launch.setting


def ours(batch: int, context: int, copy: float, shapes: dict[str, dict]) -> dict[str, dict]:
    case = Case([Request(context - 2, 1)] * batch, HEADS, GROUP, DIM, pad=0, offset=0)
    out = torch.empty_like(case.query)
    count, stride = case.pages.sealed.shape[0], case.pages.sealed.stride(0)
    clones = sets_for(case.decode_bytes()) - 1
    memories = [case.memory] + [case.memory.clone() for _ in range(clones)]
    pages = [
        cuda_ops.Pages(*case.views(m, count, stride, 0), case.pages.slot_channel) for m in memories
    ]
    rows = {}
    for name, override in shapes.items():
        shape = cuda_ops.decode_shape_for("cuda", HEADS, GROUP, DIM, 1, **override)
        plan = cuda_ops.StepPlan(shape, batch, batch, "cuda")
        plan.update(case.query_start, case.seq_lens, case.sealed_table, case.recent_table, batch)

        def store(p, plan=plan):
            cuda_ops.store_and_seal(plan, case.key, case.value, p)

        def decode(p, plan=plan):
            cuda_ops.decode(plan, case.query, out, p, case.scale)

        def both(p, store=store, decode=decode):
            store(p)
            decode(p)

        def times(run):
            return graph_times([functools.partial(run, p) for p in pages])

        row = rates(times(decode), case.decode_bytes(), copy)
        store(pages[0])
        out.fill_(torch.nan)
        decode(pages[0])
        row["error"] = relative_error(out[:1], case.attend(0))
        row["store"], row["store_and_decode"] = spread(times(store)), spread(times(both))
        rows[name] = row
    return rows


def best_of(name: str, peers: dict, batch: int, context: int, copy: float) -> dict[str, Any] | None:
    """The peer's fastest setting; one that is not installed is dropped from ``peers``."""
    try:
        rows = [measured(launch, copy) for launch in peers[name](batch, context)]
        return min(rows, key=lambda row: row["us"])
    except ImportError as e:
        print(f"{name} is left out: {e}")
        del peers[name]
    except Exception as e:  # a peer that cannot do a shape does not end the table
        print(f"{batch} x {context} {name}: {type(e).__name__}: {str(e).splitlines()[:1]}")
    return None


def table_line(batch: int, context: int, name: str, row: dict[str, Any]) -> str:
    stored = f", with store {row['store_and_decode']['us']}" if "store" in row else ""
    return (
        f"{batch:4} x {context:<9} {name:20} {row['us']:8.2f} {row['us_min']:8.2f} "
        f"{row['us_max']:8.2f} {row['gb_per_s']:6} {row['of_copy']:8.1%}  "
        f"{row['faster_than_fa3_bf16']}  error {row['error']:.1e}{stored}"
    )


def main() -> None:
    ap = parser(__doc__, "attention.json")
    ap.add_argument("--cells", nargs="+", default=CELLS, metavar="BATCHxCONTEXT")
    ap.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    ap.add_argument("--fa3", help="path of _vllm_fa3_C.abi3.so, without an installed vLLM")
    ap.add_argument("--xformers-splits", type=int, nargs="+", default=[0], help="0: its own choice")
    ap.add_argument(
        "--shapes", type=json.loads, default={"int4_kivi": {}},
        help="further decode_shape arguments, by name, as JSON",
    )  # fmt: skip
    args = ap.parse_args()
    options: dict[str, dict[str, Any]] = {
        "fa3_bf16": {"library": args.fa3},
        "fa3_fp8": {"library": args.fa3},
        "xformers_int4": {"splits": tuple(args.xformers_splits)},
    }
    peers = {name: functools.partial(PEERS[name], **options.get(name, {})) for name in args.peers}
    torch.manual_seed(0)
    copy = copy_bandwidth()
    result: dict[str, Any] = {
        "what": __doc__, "copy_gb_per_s": round(copy), "model": "Qwen2.5-7B",
        "heads": HEADS, "group": GROUP, "head_dim": DIM, "rows": [],
    }  # fmt: skip
    print(f"{machine().get('gpu')}, torch {torch.__version__}; copy {copy:.0f} GB/s")
    print(
        f"{'batch x context':16} {'kernel':20} {'us':>8} {'min':>8} {'max':>8} {'GB/s':>6} "
        f"{'of copy':>8}  faster"
    )
    for cell in args.cells:
        batch, context = batch_and_context(cell)
        rows: dict[str, Any] = {}
        for name in list(peers):
            rows[name] = best_of(name, peers, batch, context, copy)
            torch.cuda.empty_cache()
        rows = {name: row for name, row in rows.items() if row}
        rows |= ours(batch, context, copy, args.shapes)
        torch.cuda.empty_cache()
        base = rows.get("fa3_bf16", {}).get("us")
        for name, row in rows.items():
            row["faster_than_fa3_bf16"] = round(base / row["us"], 2) if base else None
            print(table_line(batch, context, name, row), flush=True)
        result["rows"].append({"batch": batch, "context": context} | rows)
        save(args.out, result)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
