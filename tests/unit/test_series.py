"""Apply, refresh and verify, on a small upstream of our own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from project import LINES, MESSAGE, Project


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
