"""What the benchmarks share: an engine in a process of its own, texts, the machine, the JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MARK = "RESULT "


def vllm_version() -> str | None:
    """Of the installed distribution, under either of its names; None without one."""
    for name in ("vllm", "s4kv-vllm"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


def gpu() -> dict[str, str]:
    """Name and driver of the first NVIDIA GPU; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        name, driver = told.splitlines()[0].rsplit(", ", 1)
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return {}
    return {"gpu": name, "driver": driver}


@functools.cache
def machine() -> dict[str, Any]:
    """The machine and versions a figure was measured with; GPU and driver if torch has CUDA."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        **(gpu() if torch.version.cuda else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm_version(),
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """``write`` without a word, for a bench that saves after every row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine()} | result, indent=1) + "\n")


def write(path: Path, result: dict[str, Any]) -> None:
    save(path, result)
    print(f"wrote {path}")


def parser(doc: str | None, result: str) -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument(
        "--out", type=Path, default=RESULTS / result, help="JSON (default: %(default)s)"
    )
    ap.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return ap


def batch_and_context(cell: str) -> tuple[int, int]:
    """32 and 8192 of the cell 32x8192."""
    batch, context = map(int, cell.split("x"))
    return batch, context


def child(options: dict[str, Any], environment: dict[str, str] | None = None) -> str:
    """Run this very script again with ``--child OPTIONS``; what it printed, its log included.

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
    env = env | os.environ | (environment or {})
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if run.returncode or f"\n{MARK}" not in f"\n{run.stdout}":
        raise SystemExit(f"the engine ended with status {run.returncode}:\n{run.stdout[-3000:]}")
    return run.stdout


def reported(stdout: str) -> Any:
    """What a child reported."""
    lines = [x for x in stdout.splitlines() if x.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK))


def in_process(options: dict[str, Any], environment: dict[str, str] | None = None) -> Any:
    """What a ``child`` reported."""
    return reported(child(options, environment))


def serve_child(options: dict[str, Any] | None, run: Callable[..., Any]) -> None:
    """In the child: run, report, end."""
    if options is not None:
        print(MARK + json.dumps(run(**options)), flush=True)
        sys.exit()


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return Path(spec.origin).read_text()


def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def texts() -> dict[str, str]:
    """Four held-out texts that every Python brings: two of its reference, two modules."""
    prose = _reference()
    return {
        "reference-1": prose[:40_000],
        "reference-2": prose[len(prose) // 2 :][:40_000],
        "argparse.py": _source("argparse")[:40_000],
        "statistics.py": _source("statistics")[:40_000],
    }


def long_texts() -> dict[str, str]:
    """Five texts of more than 20,000 tokens that every Python brings."""
    modules = ("argparse", "_pydecimal", "doctest", "tarfile")
    return {"reference": _reference()} | {f"{m}.py": _source(m) for m in modules}


def other_texts() -> dict[str, str]:
    """Two more of the same kinds, of which nothing is in ``texts``: to calibrate on."""
    return {"reference-end": _reference()[-20_000:], "heapq.py": _source("heapq")[:20_000]}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
