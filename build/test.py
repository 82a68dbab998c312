#!/usr/bin/env python3
"""Build, install and run everything that must hold: the series, lint, types, the test suite.

All stages run, whatever the first ones say; the last lines name what failed. Tests that start
engines take all cores and run one by one, the others in two processes at once. Arguments are for
pytest, which is one process then; those of the environment variable ARGS too.

examples:
  build/test.py
  build/test.py tests/unit -k series
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib

import env
import metadata
import native
import verify
from archive import Base
from common import ROOT, Stop, main, pins, say
from fetch import fetch

ENGINES = "tests/e2e"
# A file is one worker's, for its tests share fixtures. The cache then tells of this run alone.
APART = ["--cache-clear", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


def stage(name: str, *command: str, **environment: str) -> bool:
    say(f"{name}: {' '.join(command)}")
    path = f"{env.VENV / 'bin'}:{os.environ['PATH']}"
    # With compiled modules kept, an import of vLLM takes half the time, and each server does two.
    unset = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    clean = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run(
        [str(env.VENV / "bin" / command[0]), *command[1:]],
        cwd=ROOT,
        env=clean | environment | {"PATH": path},
        check=False,
    )
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    return done.returncode == 0


def series() -> bool:
    try:
        verify.verify()
    except Stop as e:
        say(f"error: {e}")
        return False
    return True


def cuda_kernels() -> None:
    """Where nvcc is, also compile the CUDA kernels: tests say whether they fit every GPU."""
    if native.nvcc() is None:
        say("no nvcc: the tests of the compiled CUDA kernels are skipped")
    else:
        base = Base(fetch(pins().files["cpu"]))  # both variants pin the same torch
        native.build("cuda", metadata.torch(base.text("METADATA"), "cpu"))


def without_engines() -> list[str]:
    """The folders of all tests (pyproject.toml) but those that start engines."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    paths: list[str] = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    return [path for path in paths if path != ENGINES]


def tests(arguments: list[str]) -> dict[str, bool]:
    if arguments:
        return {"tests": stage("tests", "pytest", *arguments)}
    apart, together = "tests without engines", "tests with engines"
    return {
        apart: stage(apart, "pytest", *APART, *without_engines(), OMP_NUM_THREADS="1"),
        together: stage(together, "pytest", ENGINES),
    }


def failures() -> list[str]:
    """The tests that failed since the cache was cleared: what `build/test.py --lf` would repeat."""
    path = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


def run() -> int:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    arguments = sys.argv[1:] + shlex.split(os.environ.get("ARGS", ""))
    env.install("cpu", tests=True)
    cuda_kernels()
    sound = {
        "series": series(),
        "lint": stage("lint", "ruff", "check", "."),
        "format": stage("format", "ruff", "format", "--check", "."),
        "types": stage("types", "mypy"),
    }
    sound |= tests(arguments)
    failed = [name for name, well in sound.items() if not well]
    if failed and not arguments:
        for test in failures():
            say(f"error: {test}")
    if failed:
        say(f"error: failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    main(run)
