"""What the benchmarks share: an engine in a process of its own, texts, the machine, the JSON."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MARK = "RESULT "


def machine() -> dict[str, Any]:
    """The machine and versions a figure was measured with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm"),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine()} | result, indent=1) + "\n")
    print(f"wrote {path}")


def parser(doc: str | None, result: str) -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument(
        "--out", type=Path, default=RESULTS / result, help="JSON (default: %(default)s)"
    )
    ap.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return ap


def in_process(options: dict[str, Any]) -> Any:
    """Run this very script again with ``--child OPTIONS``, show its log, return what it reported.

    One engine a process: memory, threads and compiled code of one do not touch the next.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # AMX bf16 gives wrong results on some hosts
    }
    print("…", " ".join(f"{k}={v}" for k, v in options.items()), flush=True)
    command = [sys.executable, sys.argv[0], "--child", json.dumps(options)]
    run = subprocess.run(command, env=env | os.environ, stdout=subprocess.PIPE, text=True)
    lines = [x for x in run.stdout.splitlines() if x.startswith(MARK)]
    if run.returncode or not lines:
        raise SystemExit(f"the engine ended with status {run.returncode}:\n{run.stdout[-3000:]}")
    return json.loads(lines[-1].removeprefix(MARK))


def serve_child(options: dict[str, Any] | None, run: Callable[..., Any]) -> None:
    """In the child: run, report, end."""
    if options is not None:
        print(MARK + json.dumps(run(**options)), flush=True)
        sys.exit()


def texts() -> dict[str, str]:
    """Four held-out texts that every Python brings: two of its reference, two modules."""

    def source(module: str) -> str:
        spec = importlib.util.find_spec(module)
        assert spec and spec.origin
        return Path(spec.origin).read_text()

    from pydoc_data.topics import topics

    prose = "\n\n".join(topics[key] for key in sorted(topics))
    return {
        "reference-1": prose[:40_000],
        "reference-2": prose[len(prose) // 2 :][:40_000],
        "argparse.py": source("argparse")[:40_000],
        "statistics.py": source("statistics")[:40_000],
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
