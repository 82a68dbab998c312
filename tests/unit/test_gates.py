"""What is published in bench/results holds, and a loss would be told."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def gates(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "gates.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_published_holds():
    done = gates()
    assert done.returncode == 0, done.stdout
    assert "FAILS" not in done.stdout and ": no " not in done.stdout


def slower(r):
    r["cells"]["1x32768"]["int4_kivi"]["decode_ms"] *= 1.05


def no_number(r):
    r["kl"]["smollm2"]["int4_kivi"]["kl"] = math.nan


def one_wrong(r):
    r["wrong"] = 1


@pytest.mark.parametrize(
    "file, spoil, line",
    [
        ("engine_qwen2.5-7b", slower, "1 x 32768"),
        ("fidelity", no_number, "arithmetic's, smollm2"),
        ("soak", one_wrong, "gone wrong"),
    ],
)
def test_a_loss_is_told(tmp_path, file, spoil, line):
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{file}.json"
    result = json.loads(path.read_text())
    spoil(result)
    path.write_text(json.dumps(result))
    done = gates("--results", str(tmp_path))
    told = [x for x in done.stdout.splitlines() if x.endswith("FAILS")]
    assert done.returncode == 1 and any(line in x for x in told)


def test_what_was_not_measured_is_said(tmp_path):
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "soak.json").unlink()
    done = gates("--results", str(tmp_path))
    assert done.returncode == 0 and "no soak.json" in done.stdout
    assert gates("--results", str(tmp_path / "none")).returncode == 2
