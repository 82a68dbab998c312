"""Which variables make takes from the command and which from the environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("PYTHON", "VARIANT", "MODEL", "PORT", "KV", "ARGS", "FORCE", "MAKEFLAGS", "MAKELEVEL")


def make(*words: str, **environment: str) -> str:
    """What make would run."""
    clean = {k: v for k, v in os.environ.items() if k not in NAMES}
    command = ["make", "-n", *words]
    return subprocess.check_output(command, cwd=ROOT, env=clean | environment, text=True)


def test_serve_by_default() -> None:
    told = make("serve")
    assert "--port '8000' --kv 'int4_kivi'" in told
    assert "--model" not in told and "--variant" not in told and "environment" not in told


def test_both_places_count_and_the_command_wins() -> None:
    told = make("serve", PORT="9001", MODEL="/m", VARIANT="cpu")
    assert "--port '9001' --kv 'int4_kivi' --model '/m' --variant cpu" in told
    assert told.startswith("s4kv: from the environment: MODEL=/m PORT=9001 VARIANT=cpu\n")
    told = make("serve", "PORT=9002", "MODEL=/n", PORT="9001")
    assert "--port '9002'" in told and "--model '/n'" in told and "environment" not in told


@pytest.mark.parametrize("words", [("apply",), ("rebase", "TO=1.0")])
def test_work_is_thrown_away_by_the_command_only(words: tuple[str, ...]) -> None:
    assert "--force" not in make(*words, FORCE="1")
    assert "--force" in make(*words, "FORCE=1")


@pytest.mark.parametrize("target", ["release", "rebase"])
def test_what_is_missing_is_said(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"make {target} " in done.stderr
