"""A disk that is full, a folder that is read-only, two at the same work: an error in a line that
names the place, and no half of a file."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import own_model
import pytest
from project import Project

ROOT = Path(__file__).parents[2]
S4KV = [str(Path(sys.executable).with_name("s4kv"))]
BUILD = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'build')!r}); from common import main, locked\n"
)

WHEEL = """
from pathlib import Path
from archive import Wheel
def make():
    with Wheel(Path("w.whl"), "w-1.dist-info") as wheel:
        for i in range(9):
            wheel.add(f"part{i}", bytes(300_000))
        wheel.close()
main(make)
"""
WRITE = """
import torch
from pathlib import Path
from s4kv_ext import map_file
from s4kv_ext.compare import store
file = map_file.MapFile(
    torch.zeros(900, 9, 96, dtype=torch.int16), 64, map_file.Identity("", "", ""), 1
)
main(lambda: %s)
"""
MAP = WRITE % 'map_file.write(Path("m.map"), file)'
REPORT = WRITE % 'store.write(Path("report.html"), bytes(3_000_000))'


def run(
    *command: str, cwd: Path, limit: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``limit``: bytes that a file may have."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        preexec_fn=full if limit else None,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("script", [WHEEL, MAP, REPORT], ids=["wheel", "map", "report"])
def test_no_room(tmp_path, script):
    done = run(sys.executable, "-c", BUILD + script, cwd=tmp_path, limit=1_000_000)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("s4kv: error: ") and "File too large" in last
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("limit", [50_000_000, 200_000_000], ids=["unpacking", "writing"])
def test_no_room_for_a_model(tmp_path, limit):
    out = tmp_path / "models"
    command = (*S4KV, "make-model", "--from", str(own_model.source()), "--out", str(out))
    done = run(*command, cwd=tmp_path, limit=limit, TMPDIR=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "s4kv: error: " in done.stderr and "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.rglob("*")] == ["models"]


@pytest.fixture
def read_only(tmp_path) -> Iterator[Path]:
    path = tmp_path / "read-only"
    path.mkdir()
    if os.geteuid():
        path.chmod(0o500)
        yield path
        path.chmod(0o700)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("root writes everywhere, and no file system can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("folder", [".", "below/it"])
def test_a_read_only_home(tmp_path, read_only, folder):
    there = str(read_only / folder)
    fetching = run("make", "fetch", cwd=ROOT, S4KV_CACHE=there)
    making = run(
        *(*S4KV, "make-model", "--from", str(own_model.source())), cwd=tmp_path, S4KV_CACHE=there
    )
    for done in (fetching, making):
        assert done.returncode
        assert "s4kv: error: cannot " in done.stderr and "set S4KV_CACHE" in done.stderr
        assert str(read_only) in done.stderr and "Traceback" not in done.stderr


def test_two_builds_at_once(tmp_path):
    """Both wait for a third and say so; then one does the work, and the other finds it done."""
    project = Project(tmp_path)
    command = [sys.executable, str(tmp_path / "build" / "apply.py")]
    environment = os.environ | {"S4KV_CACHE": str(project.cache)}
    lock = tmp_path / "build-tree" / ".src.lock"
    lock.parent.mkdir()
    with lock.open("a") as third:
        fcntl.flock(third, fcntl.LOCK_EX)
        both = [
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in both:
            assert process.stderr and "waiting for another run" in process.stderr.readline()
    told = sorted((p.communicate(timeout=180)[1] for p in both), key=lambda t: "up to date" in t)
    assert [p.returncode for p in both] == [0, 0], told
    assert "0 patches applied" in told[0] and "is up to date" in told[1], told


def test_two_clones_compile_one_after_the_other(tmp_path):
    """The folder in which kernels are compiled has the same name for both, whatever their cache."""
    code = BUILD + "import time, native\nname = 'of a test ' + sys.argv[1]\n"
    code += "with native.fixed_folder(name):\n    time.sleep(1)\n    print(time.monotonic())\n"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid())],
            env=os.environ | {"S4KV_CACHE": str(tmp_path / cache)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for cache in ("a", "b")
    ]
    ends = sorted(float(p.communicate(timeout=180)[0]) for p in both)
    assert [p.returncode for p in both] == [0, 0]
    assert ends[1] - ends[0] >= 1


def test_a_wait_for_another_can_be_ended(tmp_path):
    code = BUILD + "from pathlib import Path; import time\n"
    code += "def work():\n    with locked(Path('lock')):\n        print('in', flush=True)\n"
    code += "        time.sleep(60)\nmain(work)"
    pipe = subprocess.PIPE

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True
        )

    begun = [begin()]
    try:
        assert begun[0].stdout and begun[0].stdout.readline() == "in\n"
        begun.append(second := begin())
        assert second.stderr and "waiting for another run (lock)" in second.stderr.readline()
        second.send_signal(2)
        assert second.wait(10) == 130
        assert "Traceback" not in second.stderr.read()
    finally:
        for process in begun:
            process.kill()
