#!/usr/bin/env python3
"""Measure what the README says, and write bench/results/*.json.

examples:
  build/bench.py cpu      fidelity, tasks, greedy text, and speed beside auto, on this CPU; hours
  build/bench.py gpu      decode attention, the engine on five shapes, sealing, and starting, on a
                          CUDA GPU; under an hour
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import env
from common import ROOT, TREE, Stop, main, pins
from fetch import fetch
from serve import OWN, own_model

BENCH = ROOT / "bench"


def run_script(name: str, *arguments: str | Path) -> None:
    env.call([env.VENV / "bin" / "python", BENCH / name, *arguments])


def outlier_model(alpha: int) -> Path:
    """smollm2-outlier with key channels so many times as large."""
    folder = TREE / "bench-models" / f"x{alpha}"
    source = fetch(pins().files["model"])
    command = env.VENV / "bin" / "s4kv"
    which = ("--alpha", str(alpha), "smollm2-outlier")
    env.call([command, "make-model", "--from", source, "--out", folder, *which])
    return folder / "smollm2-outlier"


def cpu() -> None:
    smollm2 = own_model("smollm2")
    own = {name: own_model(name) for name in OWN}
    run_script("fidelity.py", *chain(*(("--model", f"{n}={path}") for n, path in own.items())))
    more = (("--model", f"smollm2-outlier-x{a}={outlier_model(a)}") for a in (8, 100))
    run_script("fidelity.py", "--keep", "--only", "int4_kivi", *chain(*more))
    long = ("--tokens", "8191", "--only", "bf16 auto", "int4_kivi", "int4_kivi, calibrated")
    out = BENCH / "results" / "fidelity_8k.json"
    run_script("fidelity.py", "--model", f"smollm2={smollm2}", *long, "--out", out)
    run_script("tasks.py", "--model", smollm2)
    run_script("greedy.py", "--model", smollm2)
    run_script("engine.py", "--model", smollm2)
    run_script("page_tags.py", "--model", smollm2)
    run_script("startup.py", "--model", smollm2, "--out", BENCH / "results" / "startup_cpu.json")


def gpu() -> None:
    run_script("attention.py")
    run_script("layer.py")
    what: tuple[str | Path, ...] = (
        "--dummy", "--dtype", "bfloat16", "--rounds", "1", "--repeats", "3",
        "--kv", "auto", "fp8", "int4_per_token_head", "int4_kivi",
        "--cells", "1x1024", "1x8192", "1x32768", "8x8192", "32x8192", "128x8192",
        "--long-prompt", "32768", "--fill", "4096",
        "--skip", "int4_per_token_head:128x8192", "int4_per_token_head:fill",
    )  # fmt: skip
    for config in sorted((BENCH / "models").glob("*/config.json")):
        run_script("engine.py", "--model", config.parent, *what, "--out", engine_json(config))
    qwen = BENCH / "models" / "qwen2.5-7b"
    run_script("seal.py", "--engine", engine_json(qwen / "config.json"))
    run_script(
        "step_profile.py", "--model", qwen, "--dummy", "--dtype", "bfloat16",
        "--cells", "1x1024", "1x32768", "128x8192",
    )  # fmt: skip
    run_script("startup.py", "--model", qwen, "--dtype", "bfloat16")
    cells = ("--cells", "1x1024", "32x8192", "128x8192")
    out = BENCH / "results" / "page_tags_gpu.json"
    run_script(
        "page_tags.py", "--model", qwen, "--dummy", "--dtype", "bfloat16", *cells, "--out", out
    )


def engine_json(config: Path) -> Path:
    return BENCH / "results" / f"engine_{config.parent.name}.json"


def run() -> None:
    if sys.argv[1:] not in (["cpu"], ["gpu"]):
        raise Stop(f"say cpu or gpu\n{__doc__}")
    env.install("cuda" if sys.argv[1] == "gpu" else "cpu")
    {"cpu": cpu, "gpu": gpu}[sys.argv[1]]()
    run_script("gates.py")


if __name__ == "__main__":
    main(run)
