"""vLLM's own suites, on the installed patched vLLM: everything but int4_kivi is as stock.

`excluded.toml` names the tests that cannot run here, with a reason each. The counts below are what
the pristine vLLM of the pin gives with the same exclusions; to measure them anew, for example after
a move to another release, see docs/maintain.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hub
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "vllm" / "src"
SUITES = {  # where upstream keeps them: how many pass
    "tests/v1/core": 348,
    "tests/test_config.py tests/config": 88,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suites away from the source tree, whose vllm/ has no binaries, and a stand-in hub."""
    path = tmp_path_factory.mktemp("upstream")
    shutil.copytree(SOURCE / "tests", path / "tests")
    shutil.copy(SOURCE / "pyproject.toml", path)
    hub.write(path / "hf")
    return path


@pytest.mark.parametrize("suite", SUITES)
def test_suite(folder: Path, suite: str) -> None:
    env = os.environ | {
        "EXCLUDED": str(HERE / "excluded.toml"),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE),
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "suite_plugin", "--tb=short"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-W", "ignore", "-rf", *suite.split()],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1]
    print(done.stdout[-8000:])
    assert done.returncode == 0, last
    passed = re.search(r"(\d+) passed", last)
    assert passed and int(passed[1]) == SUITES[suite], last
