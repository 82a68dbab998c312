#!/usr/bin/env python3
"""Compare what was measured with what must hold and what is aimed at; status 1 if one fails.

Reads bench/results/*.json. `keep` is what no change may make worse, noise allowed for; `aim` is
what this project wants to reach. Ratios, since other machines have other times.

  bench/gates.py
  bench/gates.py --results DIR    results of a run that is not to be kept
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class Gate:
    file: str
    what: str
    value: Callable[[Result], float]
    keep: float
    aim: float
    more: bool = False  # is better

    def fails(self, value: float, limit: float) -> bool:
        """NaN fails too."""
        return not (value >= limit if self.more else value <= limit)


def decode(cell: str, peer: str = "auto") -> Callable[[Result], float]:
    """ms a token of int4_kivi by the peer's."""
    return lambda r: (
        r["cells"][cell]["int4_kivi"]["decode_ms"] / r["cells"][cell][peer]["decode_ms"]
    )


def prefill(cells: str) -> Callable[[Result], float]:
    """Tokens a second of int4_kivi by those of auto."""

    def value(r: Result) -> float:
        sides = r["long"] if cells == "long" else r["cells"][cells]
        return sides["int4_kivi"]["prefill_tok_s"] / sides["auto"]["prefill_tok_s"]

    return value


def attention(batch: int, context: int, what: str = "faster_than_fa3_bf16") -> Callable[..., float]:
    def value(r: Result) -> float:
        rows = (x for x in r["rows"] if (x["batch"], x["context"]) == (batch, context))
        return next(rows)["int4_kivi"][what]

    return value


def kl(model: str, side: str = "int4_kivi", over: tuple[str, str] = ("", "bf16 auto")):
    """KL of a side by that of another side, of the same model unless one is named."""

    def value(r: Result) -> float:
        other = r["kl"][over[0] or model][over[1]]
        return r["kl"][model][side]["kl"] / other["kl"]

    return value


def growth(r: Result) -> float:
    """Error at 4k to 8k tokens by that below 1k."""
    by = list(r["kl"]["smollm2"]["int4_kivi"]["by_context"].values())
    return by[-1] / by[0]


def in_layer(cell: str) -> Callable[[Result], float]:
    """What int4_kivi adds to a layer by what FlashAttention 3 on bf16 adds."""
    return lambda r: r["cells"][cell]["int4_kivi"]["us"] / r["cells"][cell]["fa3_bf16"]["us"]


def tags(cell: str) -> Callable[[Result], float]:
    """A step with page tags by one without, medians of the rounds."""

    def value(r: Result) -> float:
        c = r["cells"][cell]
        return statistics.median(c["with_ms"]) / statistics.median(c["without_ms"])

    return value


ENGINE = "engine_qwen2.5-7b"
PEERS = "engine_qwen2.5-7b_peers"
GATES = [
    Gate(ENGINE, "ms a token by bf16's, 1 x 1024", decode("1x1024"), 1.03, 1.0),
    Gate(ENGINE, "ms a token by bf16's, 1 x 8192", decode("1x8192"), 1.02, 1.0),
    Gate(ENGINE, "ms a token by bf16's, 1 x 32768", decode("1x32768"), 0.97, 0.95),
    Gate(ENGINE, "ms a token by bf16's, 32 x 8192", decode("32x8192"), 0.8, 6.5 / 8.27),
    Gate(ENGINE, "ms a token by fp8's, 32 x 8192", decode("32x8192", "fp8"), 1.0, 0.91),
    Gate(ENGINE, "ms a token by bf16's, 128 x 8192", decode("128x8192"), 0.55, 9.5 / 18.06),
    Gate(ENGINE, "prefill by bf16's, 32 x 8192", prefill("32x8192"), 0.95, 1.0, more=True),
    Gate(PEERS, "prefill by bf16's, 32k in chunks", prefill("long"), 0.85, 1.0, more=True),
    Gate(ENGINE, "KV tokens by bf16's",
         lambda r: r["kv_tokens"]["int4_kivi"] / r["kv_tokens"]["auto"], 3.0, 3.3, more=True),
    Gate(PEERS, "4k requests at once by bf16's",
         lambda r: r["fill"]["int4_kivi"]["requests"] / r["fill"]["auto"]["requests"], 3.0, 3.1,
         more=True),
    Gate("attention", "decode by FA3 bf16, 8 x 8192", attention(8, 8192), 2.0, 2.0, more=True),
    Gate("attention", "decode by FA3 bf16, 32 x 8192", attention(32, 8192), 2.5, 3.0, more=True),
    Gate("attention", "decode by FA3 bf16, 128 x 8192", attention(128, 8192), 2.95, 3.0, more=True),
    Gate("attention", "decode by FA3 bf16, 32 x 32768", attention(32, 32768), 2.9, 3.0, more=True),
    Gate("attention", "decode by FA3 bf16, 1 x 131072", attention(1, 131072), 2.5, 2.5, more=True),
    Gate("attention", "share of copy bandwidth, 128 x 8192",
         attention(128, 8192, "of_copy"), 0.9, 0.95, more=True),
    Gate("layer", "attention in a layer by FA3's, 1 x 1024", in_layer("1x1024"), 0.9, 0.8),
    Gate("layer", "attention in a layer by FA3's, 32 x 8192", in_layer("32x8192"), 0.45, 0.4),
    Gate("seal", "store and seal by the step, 32 x 8192",
         lambda r: r["cells"]["32x8192"]["of_step"], 0.03, 0.03),
    Gate("page_tags_gpu", "step with page tags by without, 1 x 1024", tags("1x1024"), 1.01, 1.01),
    Gate("page_tags_gpu", "step with page tags by without, 32 x 8192", tags("32x8192"), 1.01, 1.01),
    Gate("page_tags_gpu", "step with page tags by without, 128 x 8192", tags("128x8192"),
         1.01, 1.01),
    Gate("fidelity", "KL by bf16 arithmetic's, smollm2", kl("smollm2"), 0.52, 0.5),
    Gate("fidelity", "KL by bf16 arithmetic's, head_dim 128", kl("smollm2-d128"), 0.31, 0.3),
    Gate("fidelity", "KL by bf16 arithmetic's, outlier keys", kl("smollm2-outlier"), 0.52, 0.5),
    Gate("fidelity", "KL, outlier keys x 100, by without",
         kl("smollm2-outlier-x100", over=("smollm2", "int4_kivi")), 1.05, 1.05),
    Gate("fidelity", "KL, calibrated by default",
         kl("smollm2", "int4_kivi, calibrated", ("", "int4_kivi")), 0.97, 0.9),
    Gate("fidelity_8k", "KL at 4k to 8k by below 1k", growth, 1.3, 1.0),
    Gate("engine_cpu", "ms a token by fp32's on a CPU, 8 x 4096", decode("4096x8"), 0.8, 0.5),
    Gate("engine_cpu", "prefill by fp32's on a CPU, 1 x 4096", prefill("4096x1"), 0.95, 1.0,
         more=True),
    Gate("soak", "random schedules gone wrong", lambda r: r["wrong"] + r["leaked"], 0, 0),
]  # fmt: skip


def rows(results: Path) -> Iterator[tuple[Gate, float | None]]:
    """Each gate with its figure, None where nothing was measured."""
    for gate in GATES:
        path = results / f"{gate.file}.json"
        yield gate, gate.value(json.loads(path.read_text())) if path.exists() else None


def run() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent / "results"
    ap.add_argument("--results", type=Path, default=here, metavar="DIR")
    args = ap.parse_args()
    if not args.results.is_dir():
        ap.error(f"--results {args.results}: no such folder")
    broken = 0
    print(f"{'measured':>9} {'keep':>6} {'aim':>6}")
    for gate, value in rows(args.results):
        if value is None:
            print(f"{'-':>9} {gate.keep:6.2f} {gate.aim:6.2f}  {gate.what}: no {gate.file}.json")
            continue
        verdict = ""
        if gate.fails(value, gate.keep):
            broken, verdict = broken + 1, " FAILS"
        elif gate.fails(value, gate.aim):
            verdict = " short of the aim"
        print(f"{value:9.3f} {gate.keep:6.2f} {gate.aim:6.2f}  {gate.what}{verdict}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(run())
