"""Ctrl-C, as a terminal sends it, in every target of make and every command of s4kv: it ends at
once, without a stack trace, and what it leaves is of use."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import own_model
import pytest

ROOT = Path(__file__).parents[2]
S4KV = str(Path(sys.executable).with_name("s4kv"))
ENDED = (130, 2, -signal.SIGINT, 0)  # make ends with 2, or as the signal does; 0 was quicker
TRACE = re.compile(r'File ".*/(build|s4kv_ext|tests)/.*", line \d+, in (?!<module>)')
"""Through a function of ours. While Python itself still starts, its trace is not ours to hide."""
NO_PROGRAM = ("help", "clean")
NEEDS = {"rebase": ("TO=0.26.0",), "release": ("VERSION=0.25.1+s4kv.1",)}


def interrupted(seconds: float, *command: str, cwd: Path, **environment: str) -> tuple[int, str]:
    """Exit status and output of a command that gets SIGINT, it and all that it started."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    time.sleep(seconds)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    try:
        told, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        told, _ = process.communicate()
        pytest.fail(f"it went on after Ctrl-C:\n{told[-2000:]}")
    return process.returncode, told


def git(tree: Path, *args: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    return subprocess.check_output(["git", *who, *args], cwd=tree, text=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A clone of the project as it is, which the targets share, each going on from the last."""
    path = tmp_path_factory.mktemp("interrupt") / "tree"
    names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, path / name)
    git(path, "init", "-q")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "as it is")
    return path


def targets() -> list[str]:
    found = re.findall(r"^([a-z-]+): *## ", (ROOT / "Makefile").read_text(), re.M)
    return [name for name in found if name not in NO_PROGRAM]


@pytest.mark.parametrize("target", targets())
def test_make(tree, target):
    seconds = 0.4 + 0.3 * (targets().index(target) % 6)
    status, told = interrupted(
        seconds,
        "make",
        target,
        *NEEDS.get(target, ()),
        cwd=tree,
        PORT="18299",
        PYTHON=sys.executable,
    )
    assert not TRACE.search(told), told
    assert status in ENDED, (status, told)
    assert git(tree, "status", "--porcelain") == ""
    assert not list((tree / "dist").glob("*")), "half a wheel"


def test_make_goes_on_after_all_that(tree):
    done = subprocess.run(["make", "apply", "verify"], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = [p.name for p in (tree / "build-tree").iterdir() if p.name.startswith("src-")]
    assert not left


@pytest.mark.parametrize("seconds", [0.3, 4])
@pytest.mark.parametrize(
    "command", ["doctor", "plan", "calibrate", "compare", "ready", "make-model"]
)
def test_s4kv(tmp_path, command, seconds):
    text = tmp_path / "text"
    text.write_text("Once upon a time. " * 1000)
    model, out = own_model.folder(), str(tmp_path / "out")
    arguments = {
        "plan": (model, "--gpu", "g6e.xlarge"),
        "calibrate": (model, "--text", str(text), "-o", out),
        "compare": (model, "--kv", "auto", "--kv", "int4_kivi", "--out", out),
        "ready": ("--url", "http://127.0.0.1:9"),
        "make-model": ("--from", str(own_model.source()), "--out", out),
    }.get(command, ())
    status, told = interrupted(seconds, S4KV, command, *arguments, cwd=tmp_path)
    assert not TRACE.search(told), told
    assert status == 130 or seconds < 1 or command in ("doctor", "plan", "ready"), (status, told)
    left = [p for p in tmp_path.rglob("*") if p.name.startswith(".") or p.suffix == ".half"]
    assert not left
