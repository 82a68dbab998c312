"""requirements/: all that tests and builds install is named by version and sha256."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = sorted((ROOT / "requirements").glob("*.in"))


def names(text: str) -> set[str]:
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)", re.sub(r"#.*", "", text), re.M)
    return {re.sub(r"[-_.]+", "-", n).lower() for n in found}


@pytest.mark.parametrize("source", INPUTS, ids=lambda p: p.stem)
def test_what_is_wanted_is_locked(source: Path) -> None:
    text = source.with_suffix(".txt").read_text()
    assert names(source.read_text()) <= names(text), "make lock"
    assert "://" not in text and "index" not in text.split("\n", 2)[1]
    for requirement in re.sub(r"#.*\n", "", text).replace("\\\n", " ").splitlines():
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==[\w.+!-]+ ", requirement), requirement
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", requirement), requirement


def test_no_lock_without_an_input() -> None:
    assert [p.with_suffix(".txt") for p in INPUTS] == sorted(ROOT.glob("requirements/*.txt"))


def test_the_environment_of_the_tests_is_the_locked_one() -> None:
    from importlib.metadata import version

    text = (ROOT / "requirements" / "tests.txt").read_text()
    for name, wanted in re.findall(r"^([\w.-]+)==([\w.+!-]+) \\", text, re.M):
        assert version(name) == wanted, f"{sys.executable}: {name}"
