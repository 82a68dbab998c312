"""The workflows: sound, safe, and pinned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
BIN = Path(sys.executable).parent


def run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(c) for c in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint() -> None:
    run(BIN / "actionlint", "-shellcheck", BIN / "shellcheck", "-pyflakes", "", *WORKFLOWS)


def test_zizmor() -> None:
    run(BIN / "zizmor", "--offline", "--no-progress", "--quiet", GITHUB)


def test_shellcheck() -> None:
    run(BIN / "shellcheck", *GITHUB.glob("*.sh"))


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, *GITHUB.glob("actions/*/*.yml")], ids=lambda p: p.stem
)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text())
    for line in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+){2}|\./\.github/actions/\w+", line)
    # One version of an action in all files.
    everywhere = "".join(p.read_text() for p in GITHUB.rglob("*.yml"))
    for name in {line.partition("@")[0] for line in used if "@" in line}:
        assert len(set(re.findall(rf"{re.escape(name)}@(\w+)", everywhere))) == 1, name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_least_rights(path: Path) -> None:
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"] == {"contents": "read"}
    for name, job in flow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        # What may write is in an environment, runs no code of the tree, and not for pull requests.
        if "write" in job.get("permissions", {}).values():
            assert job["environment"] in ("release", "github-pages"), name
            assert not [s for s in job["steps"] if "checkout" in s.get("uses", "")], name
            assert "pull_request" not in flow[True] or "refs/heads/main" in job["if"], name


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path in WORKFLOWS:
        for target in re.findall(r"\bmake ([a-z-]+)", re.sub(r"#.*", "", path.read_text())):
            assert f"\n{target}:" in makefile, f"{path.name}: make {target}"
