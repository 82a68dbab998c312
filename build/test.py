#!/usr/bin/env python3
"""Build, install and run everything that must hold: the series, lint, types, the test suite.

All stages run, whatever the first ones say, and pytest's summary comes last. Arguments are for
pytest; those of the environment variable ARGS too.

examples:
  build/test.py
  build/test.py tests/unit -k series
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import env
import metadata
import native
import verify
from archive import Base
from common import ROOT, Stop, main, pins, say
from fetch import fetch


def stage(name: str, *command: str) -> bool:
    say(f"{name}: {' '.join(command)}")
    path = f"{env.VENV / 'bin'}:{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(env.VENV / "bin" / command[0]), *command[1:]],
        cwd=ROOT,
        env=clean | {"PATH": path},
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


def run() -> int:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    arguments = sys.argv[1:] + shlex.split(os.environ.get("ARGS", ""))
    env.install("cpu", tests=True)
    cuda_kernels()
    sound = [
        series(),
        stage("lint", "ruff", "check", "."),
        stage("format", "ruff", "format", "--check", "."),
        stage("types", "mypy"),
    ]
    if not all(sound):
        say("error: the checks above failed; the tests run nevertheless")
    return 0 if stage("tests", "pytest", *arguments) and all(sound) else 1


if __name__ == "__main__":
    main(run)
