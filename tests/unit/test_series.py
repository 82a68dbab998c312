"""Apply, refresh and verify, on a small upstream of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = "".join(f"line {i}\n" for i in range(40))
MESSAGE = "Change a line\n\nWhy: the test needs it.\nUntil: the test ends.\n"


class Project:
    """A copy of the scripts with a pin to a source archive of two files."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, root / "cache"
        shutil.copytree(ROOT / "build", root / "build")
        (root / "vllm").mkdir()
        self.cache.mkdir()
        archive = self.cache / "vllm-9.9.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name, text in (
                ("vllm/a.py", LINES),
                ("tests/t.py", "x = 1\n"),
                ("csrc/no.cu", "not kept"),
            ):
                info = tarfile.TarInfo(f"vllm-9.9/{name}")
                info.size = len(text)
                tar.addfile(info, BytesIO(text.encode()))
        digest = sha256(archive.read_bytes()).hexdigest()
        pin = f'project = "vllm"\nfile = "{archive.name}"\nsha256 = "{digest}"\n'
        (root / "vllm" / "pin.toml").write_text(
            'version = "9.9"\nrevision = 1\n'
            + "".join(f"[{t}]\n{pin}" for t in ("source", "wheel.cpu", "wheel.cuda", "model"))
        )
        self.src, self.patches = root / "vllm" / "src", root / "patches"

    def run(self, script: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.root / "build" / f"{script}.py"), *args],
            env=os.environ | {"S4KV_CACHE": str(self.cache)},
            capture_output=True,
            text=True,
            check=False,
        )

    def good(self, script: str, *args: str) -> str:
        done = self.run(script, *args)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def bad(self, script: str, *args: str) -> str:
        done = self.run(script, *args)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    def git(self, *args: str) -> str:
        return subprocess.check_output(["git", *args], cwd=self.src, text=True).strip()

    def change(self, line: int, message: str = MESSAGE) -> None:
        path = self.src / "vllm" / "a.py"
        path.write_text(path.read_text().replace(f"line {line}\n", f"changed {line}\n"))
        self.git("commit", "-qam", message)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.good("apply")
    return made


def test_round_trip(project: Project) -> None:
    assert sorted(p.name for p in project.src.iterdir()) == [".git", "tests", "vllm"]
    project.change(5)
    project.change(30, MESSAGE.replace("a line", "another line"))
    project.good("refresh")
    names = (project.patches / "series").read_text().split()
    assert names == ["0001-Change-a-line.patch", "0002-Change-another-line.patch"]
    before = {n: (project.patches / n).read_bytes() for n in names}
    project.good("apply", "--force")
    assert project.git("log", "--format=%s").split("\n") == [
        "Change another line",
        "Change a line",
        "vllm 9.9",
    ]
    assert "up to date" in project.good("refresh")
    assert before == {n: (project.patches / n).read_bytes() for n in names}
    assert "2 patches are sound: 2 lines added in 1 upstream files" in project.good("verify")


def test_same_series_same_commits(project: Project) -> None:
    project.change(5)
    project.good("refresh")
    project.good("apply", "--force")
    first = project.git("rev-parse", "HEAD")
    project.good("apply", "--force")
    assert project.git("rev-parse", "HEAD") == first


def test_edits_are_not_lost(project: Project) -> None:
    (project.src / "vllm" / "a.py").write_text("an edit\n")
    (project.root / "vllm" / "pin.toml").write_text(
        (project.root / "vllm" / "pin.toml").read_text() + "# changed\n"
    )
    assert "changes that are not committed" in project.bad("apply")
    assert "used as it is" in project.good("apply", "--keep")
    assert "not committed" in project.bad("refresh")
    project.git("commit", "-qam", "an edit")
    assert "make refresh" in project.bad("apply")
    project.good("apply", "--force")
    assert (project.src / "vllm" / "a.py").read_text() == LINES


def test_removed_commits_leave_the_folder(project: Project) -> None:
    project.change(5)
    project.good("refresh")
    project.git("reset", "-q", "--hard", "pristine")
    project.good("refresh")
    assert [p.name for p in project.patches.iterdir()] == ["series"]


def test_a_series_that_changed_is_applied(project: Project) -> None:
    project.change(5)
    project.good("refresh")
    (project.patches / "series").write_text("")
    project.good("apply")
    assert project.git("log", "--format=%s") == "vllm 9.9"


@pytest.mark.parametrize("word", ["Why:", "Until:"])
def test_a_message_must_say_why_and_until(project: Project, word: str) -> None:
    project.change(5, MESSAGE.replace(word, "Whatever:"))
    project.good("refresh")
    assert repr(word) in project.bad("verify")


def test_no_fuzz(project: Project) -> None:
    project.change(5)
    project.good("refresh")
    patch = next(project.patches.glob("*.patch"))
    patch.write_text(patch.read_text().replace(" line 3\n", " line three\n"))
    assert "does not apply" in project.bad("verify")
    assert "does not apply" in project.bad("apply", "--force")
    assert (project.src / "vllm" / "a.py").exists()  # the old checkout is still there


def test_folder_and_series_must_agree(project: Project) -> None:
    project.change(5)
    project.good("refresh")
    patch = next(project.patches.glob("*.patch"))
    shutil.copy(patch, project.patches / "0009-stray.patch")
    assert "0009-stray.patch is not in the series" in project.bad("verify")
    (project.patches / "0009-stray.patch").unlink()
    (project.patches / "series").write_text(f"{patch.name}\nmissing.patch\n")
    assert "missing.patch" in project.bad("verify")


def test_a_patch_edited_by_hand_is_noticed(project: Project) -> None:
    project.change(5)
    project.good("refresh")
    patch = next(project.patches.glob("*.patch"))
    patch.write_text(patch.read_text() + "-- \n2.39.5\n")
    assert "a refresh would change" in project.bad("verify")


def test_thin(project: Project) -> None:
    path = project.src / "vllm" / "a.py"
    path.write_text(LINES + "more\n" * 200)
    project.git("commit", "-qam", MESSAGE)
    project.good("refresh")
    assert "the patches add 200 lines, 150 are allowed" in project.bad("verify")


FIX = MESSAGE + "Upstream: none yet.\n"


def test_a_fix_of_upstream_lies_apart_and_does_not_count(project: Project) -> None:
    project.change(5, FIX)
    project.change(30)
    project.change(35, FIX)
    project.good("refresh")
    names = (project.patches / "series").read_text().split()
    assert names == [
        "fixes/0001-Change-a-line.patch",
        "0001-Change-a-line.patch",
        "fixes/0002-Change-a-line.patch",
    ]
    said = project.good("verify")
    assert "1 patches are sound: 1 lines added in 1 upstream files" in said
    assert "2 fixes of vLLM's own: 2 lines added in 1 upstream files" in said
    project.good("apply", "--force")
    assert "up to date" in project.good("refresh")
    project.git("reset", "-q", "--hard", "HEAD~")
    project.good("refresh")
    assert not (project.patches / names[2]).exists()


def test_a_thick_fix(project: Project) -> None:
    (project.src / "vllm" / "a.py").write_text(LINES + "more\n" * 41)
    project.git("commit", "-qam", FIX)
    project.good("refresh")
    assert "adds 41 lines, a fix may add 40" in project.bad("verify")
    shutil.copy(next(project.patches.glob("fixes/*")), project.patches / "fixes" / "0009-x.patch")
    assert "fixes/0009-x.patch is not in the series" in project.bad("verify")
