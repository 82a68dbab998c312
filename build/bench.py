#!/usr/bin/env python3
"""Measure what the README says, and write bench/results/*.json.

examples:
  build/bench.py cpu      fidelity, greedy text, and speed beside auto, on this CPU; about an hour
  build/bench.py gpu      decode attention beside FlashAttention 3, and the engine, on a CUDA GPU
"""

from __future__ import annotations

import sys
from pathlib import Path

import env
from common import ROOT, Stop, main
from serve import own_model

BENCH = ROOT / "bench"


def run_script(name: str, *arguments: str | Path) -> None:
    env.call([env.VENV / "bin" / "python", BENCH / name, *arguments])


def cpu() -> None:
    smollm2, outlier = own_model("smollm2"), own_model("smollm2-outlier")
    models = ("--model", f"smollm2={smollm2}", "--model", f"smollm2-outlier={outlier}")
    run_script("fidelity.py", *models)
    run_script("greedy.py", "--model", smollm2)
    run_script("engine.py", "--model", smollm2)


def gpu() -> None:
    run_script("attention.py", "--out", BENCH / "results" / "attention.json")
    cells = ("--contexts", "8192", "--batches", "32", "128", "--chunk", "8192")
    for config in sorted((BENCH / "models").glob("*/config.json")):
        out = BENCH / "results" / f"engine_{config.parent.name}.json"
        what = ("--dummy", "--dtype", "bfloat16", "--kv", "auto", "fp8", "int4_kivi")
        run_script("engine.py", "--model", config.parent, *what, *cells, "--out", out)


def run() -> None:
    if sys.argv[1:] not in (["cpu"], ["gpu"]):
        raise Stop(f"say cpu or gpu\n{__doc__}")
    env.install("cuda" if sys.argv[1] == "gpu" else "cpu")
    {"cpu": cpu, "gpu": gpu}[sys.argv[1]]()


if __name__ == "__main__":
    main(run)
