"""make rebase, from a small package index with releases of a small upstream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import LINES, MESSAGE, ROOT, Project

OURS = "from vllm.n import stays, changes, goes\n"
OLD = "stays = 1\ndef changes(x): return x\ndef goes(): pass\n"
NEW = "stays = 1\ndef changes(x, y): return x\n"


class Rebased(Project):
    """A git project with two patches, and an index with the releases 9.9 and whatever is added."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        self.index = root.parent / "index" / "vllm"
        self.index.mkdir(parents=True)
        self.links = ""
        for name in list(os.environ):
            if name.startswith("PIP_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("S4KV_CACHE", str(self.cache))
        monkeypatch.setenv("PIP_INDEX_URL", self.index.parent.as_uri())
        for who in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{who}_NAME", "tester")
            monkeypatch.setenv(f"GIT_{who}_EMAIL", "tester@localhost")
        # The three pinned files are one and the same here: the source archive.
        self.publish("9.9", {"vllm/a.py": LINES, "vllm/n.py": OLD})
        (root / "s4kv_ext").mkdir()
        (root / "s4kv_ext" / "x.py").write_text(OURS)
        ignored = ("/rebase/", "/vllm/src/", "/build-tree/", "/cache/", "__pycache__/")
        (root / ".gitignore").write_text("\n".join(ignored))
        self.good("apply")
        self.change(5)
        self.change(30, MESSAGE.replace("a line", "another line"))
        self.good("refresh")
        self.top("init", "-q")
        self.commit("All")

    def publish(self, version: str, files: dict[str, str]) -> None:
        archive, digest = self.archive(version, files)
        if version == "9.9":
            pin = self.root / "vllm" / "pin.toml"
            lines = pin.read_text().splitlines(keepends=True)
            new = f'sha256 = "{digest}"\n'
            pin.write_text("".join(new if x.startswith("sha256") else x for x in lines))
        else:
            archive = archive.rename(self.index / archive.name)
        self.links += f'<a href="{archive.name}#sha256={digest}">{archive.name}</a>\n'
        (self.index / "index.html").write_text(self.links)

    def top(self, *args: str, cwd: Path | None = None) -> str:
        return subprocess.check_output(["git", *args], cwd=cwd or self.root, text=True).strip()

    def commit(self, message: str) -> None:
        self.top("add", "-A")
        self.top("commit", "-qm", message)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rebased:
    return Rebased(tmp_path / "project", monkeypatch)


def test_clean_and_fuzzy(project: Rebased) -> None:
    near = LINES.replace("line 27\n", "line 27 is new\n")  # within the second patch's context
    project.publish("9.10", {"vllm/a.py": "# moved\n" + near, "vllm/n.py": NEW})
    done = project.run("rebase", "9.10", "--no-tests")
    assert done.returncode == 0, done.stderr
    report = (project.root / "build-tree" / "rebase-9.10.md").read_text()
    assert report in done.stdout
    assert "9.9 → 9.10: 1 clean, 1 fuzzy, 0 conflict" in report
    assert "| 0001-Change-a-line.patch | clean |" in report
    assert "| 0002-Change-another-line.patch | fuzzy |" in report
    assert "+changed 30\n" in report
    assert "- gone: `vllm.n.goes`\n- changed: `vllm.n.changes`" in report
    # The checkout is as it was, and the branch holds pin and series.
    assert project.top("status", "--porcelain") == ""
    tree = project.root / "rebase" / "9.10"
    assert project.top("log", "--format=%s", "-2", "rebase-9.10").split("\n") == [
        "Rebase the series onto vLLM 9.10",
        "Pin vLLM 9.10",
    ]
    assert 'version = "9.10"' in (tree / "vllm" / "pin.toml").read_text()
    assert " line 27 is new\n" in (tree / "patches" / "0002-Change-another-line.patch").read_text()
    text = (tree / "vllm" / "src" / "vllm" / "a.py").read_text()
    assert "changed 5\n" in text and "changed 30\n" in text and "line 27 is new\n" in text
    again = project.bad("rebase", "9.10", "--no-tests")
    assert "there is a rebase to 9.10 already" in again and "FORCE=1" in again
    project.good("rebase", "9.10", "--no-tests", "--force")


def test_conflict_is_left_where_git_am_stopped(project: Rebased) -> None:
    project.publish("9.10", {"vllm/a.py": LINES.replace("line 5\n", "line five\n")})
    done = project.run("rebase", "9.10")
    assert done.returncode == 1
    assert "9.9 → 9.10: 1 clean, 0 fuzzy, 1 conflict" in done.stdout
    assert "line five\n" in done.stdout and "changed 5\n" in done.stdout  # the hunk, both sides
    assert "git am --continue" in done.stderr
    tree = project.root / "rebase" / "9.10"
    src = tree / "vllm" / "src"
    # What the message says, done.
    path = src / "vllm" / "a.py"
    before, _, rest = path.read_text().partition("<<<<<<<")
    path.write_text(before + "changed five\n" + rest.partition(">>>>>>>")[2].partition("\n")[2])
    project.top("add", "-A", cwd=src)
    project.top("am", "--continue", cwd=src)
    for script in ("refresh", "verify"):
        subprocess.run([sys.executable, tree / "build" / f"{script}.py"], check=True)
    assert "+changed five\n" in (tree / "patches" / "0001-Change-a-line.patch").read_text()


def test_a_patch_upon_one_in_conflict(project: Rebased) -> None:
    """It is no conflict of its own."""
    message = MESSAGE.replace("a line", "it again") + "\nUpstream: none yet.\n"
    project.change(12, message)
    project.change(12, message, "again")
    project.good("refresh")
    project.commit("A patch upon a patch")
    project.publish("9.10", {"vllm/a.py": LINES.replace("line 12\n", "line twelve\n")})
    told = project.run("rebase", "9.10", "--report").stdout
    assert "9.9 → 9.10: 3 clean, 0 fuzzy, 1 conflict" in told
    assert "| fixes/0002-Change-it-again.patch | clean |" in told
    assert "### conflict: fixes/0001, vllm/a.py" in told


def test_report_alone_changes_nothing(project: Rebased) -> None:
    assert "the newest" in project.good("rebase", "newest", "--report")
    project.publish("9.10", {"vllm/b.py": "x = 1\n"})
    done = project.run("rebase", "newest", "--report")
    assert done.returncode == 0, done.stderr
    assert "0 clean, 0 fuzzy, 2 conflict" in done.stdout
    assert "upstream has no such file any more" in done.stdout and "+changed 5\n" in done.stdout
    assert not (project.root / "rebase").exists()
    assert project.top("branch", "--list", "rebase-*") == ""


def test_a_damaged_release_is_refused(project: Rebased) -> None:
    project.publish("9.10", {"vllm/a.py": LINES})
    path = project.index / "vllm-9.10.tar.gz"
    path.write_bytes(path.read_bytes() + b"more")
    assert "has the wrong sha256 and was not kept" in project.bad("rebase", "9.10", "--report")


def test_refusals(project: Rebased) -> None:
    assert "the pin is vLLM 9.9 already" in project.bad("rebase", "9.9")
    assert "has 0 source files of vllm 1.0; there is one of 9.9" in project.bad("rebase", "1.0")
    (project.src / "vllm" / "a.py").write_text("an edit\n")
    assert "vllm/src has changes that are not committed" in project.bad("rebase", "9.10")
    (project.root / "new").touch()
    assert "a rebase starts from a commit" in project.bad("rebase", "9.10")


def test_every_import_of_s4kv_ext_is_found_in_the_pinned_release() -> None:
    """Else the report could not tell what is gone."""
    sys.path.insert(0, str(ROOT / "build"))
    from names import definition, imports

    names = imports(ROOT / "s4kv_ext")
    assert len(names) > 20
    src = ROOT / "vllm" / "src"
    assert [n for n in names if definition(src, *n) is None] == []
