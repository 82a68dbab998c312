"""build/test.py: every folder of tests runs once, and what fails in either part is told."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys
sys.path.insert(0, "build")
import test
test.env.install = lambda *_, **__: None
test.cuda_kernels = lambda: None
test.series = lambda: True
test.failures = lambda: ["a test that failed"]
called, failing = [], json.loads(sys.argv[1])
def stage(name, *command, **_):
    called.append(command)
    return name not in failing
test.stage = stage
sys.argv = ["test.py", *json.loads(sys.argv[2])]
status = test.run()
print(json.dumps([status, called]))
"""


def run(failing: list[str], arguments: list[str]) -> tuple[int, list[list[str]], str]:
    command = [sys.executable, "-c", RUN, json.dumps(failing), json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    status, called = json.loads(done.stdout)
    return status, [c[1:] for c in called if c[0] == "pytest"], done.stderr


def test_every_folder_runs_once() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    status, called, _ = run([], [])
    assert status == 0
    assert sorted(a for c in called for a in c if a.startswith("tests/")) == sorted(folders)


def test_arguments_go_to_one_process() -> None:
    status, called, _ = run([], ["tests/unit", "-k", "series"])
    assert (status, called) == (0, [["tests/unit", "-k", "series"]])


@pytest.mark.parametrize("part", ["types", "tests without engines", "tests with engines"])
def test_what_failed_is_told(part: str) -> None:
    status, called, told = run([part], [])
    assert status == 1 and len(called) == 2
    assert f"failed: {part}" in told and "a test that failed" in told
