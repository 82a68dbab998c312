#!/usr/bin/env python3
"""Move the series to another vLLM release: on a branch, in a worktree, with a report.

The release is fetched by the sha256 that pip's index gives. Each patch is then clean (applies as
it is), fuzzy (its surroundings changed, a 3-way merge fits it in) or in conflict, and the next are
tried as if that had been resolved in its favour. The report shows what to look at, and which names
that s4kv_ext imports are gone or changed. Without a conflict the unit and end-to-end tests run on
the result. Nothing of this checkout changes.

examples:
  build/rebase.py 0.26.0               rebase/0.26.0 on the branch rebase-0.26.0, tests included
  build/rebase.py 0.26.0 --no-tests    stop before the tests
  build/rebase.py newest --report      only the report; leaves no branch and no worktree
  build/rebase.py 0.26.0 --force       throw an earlier rebase/0.26.0 and its branch away
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import checkout
from common import PATCHES, PIN, ROOT, SRC, TREE, Pins, Stop, git, main, pins, say
from names import compared
from releases import newest, pins_of, repin

WORK = ROOT / "rebase"
TESTS = ("tests/unit", "tests/e2e")
AM = ("-c", "merge.conflictStyle=merge", "am", "-q", "-3", "--keep-non-patch",
      "--committer-date-is-author-date")  # fmt: skip
BOTH_SIDES = re.compile(r"^<<<<<<< .*?^=======\n(.*?)^>>>>>>> [^\n]*\n", flags=re.M | re.S)


@dataclass
class Verdict:
    """How a patch met the new release."""

    patch: str
    word: str  # clean, fuzzy or conflict
    hunks: dict[str, str] = field(default_factory=dict)  # by file: what to look at


def base(into: Path, new: Pins, old: Path) -> None:
    """The pristine new release, with every file that a patch starts from, for 3-way merges."""
    checkout.make(into, names=[], p=new)
    git("fetch", "-q", str(old), "HEAD:refs/s4kv/old", cwd=into)


def conflict(src: Path, name: str, file: str) -> str:
    """Both sides of an unmerged file; what the patch wants where upstream has no such file."""
    hunk = git("diff", "--", file, cwd=src)
    if "\n@@@" in hunk:
        return hunk
    parts = re.split(r"^(?=diff --git )", (PATCHES / name).read_text(), flags=re.M)
    wanted = next((x for x in parts if x.startswith(f"diff --git a/{file} ")), "")
    return f"upstream has no such file any more; the patch has\n{wanted}"


def take_side(src: Path, files: list[str]) -> None:
    """The patch's side of a conflict, so that a patch upon it does not conflict for that alone; a
    file that upstream has no more stays gone."""
    for file in files:
        path = src / file
        if git("ls-files", "--stage", "--", file, cwd=src).count(" 2\t"):
            path.write_text(BOTH_SIDES.sub(r"\1", path.read_text()))
        else:
            path.unlink(missing_ok=True)
    git("add", "-A", cwd=src)
    git("am", "-q", "--continue", cwd=src)


def try_patch(src: Path, name: str) -> Verdict:
    """Apply it as a commit, one in conflict as far as it can be."""
    path = str(PATCHES / name)
    strict = []
    for file in re.findall(r"^diff --git a/(\S+)", (PATCHES / name).read_text(), flags=re.M):
        try:
            git("apply", "--check", f"--include={file}", path, cwd=src)
        except Stop:
            strict.append(file)
    try:
        git(*AM, path, cwd=src)
    except Stop as e:
        # Where even the old file is unknown there is nothing to merge, and git says why.
        unmerged = git("diff", "--name-only", "--diff-filter=U", cwd=src).splitlines()
        hunks = {f: conflict(src, name, f) for f in unmerged} or {"": str(e)}
        try:
            take_side(src, unmerged)
        except Stop:  # nothing is left of it
            git("am", "--abort", cwd=src)
        return Verdict(name, "conflict", hunks)
    if strict:
        whole = git("diff", "HEAD~", cwd=src)  # where upstream has renamed the file
        hunks = {f: git("diff", "HEAD~", "--", f, cwd=src) or whole for f in strict}
        return Verdict(name, "fuzzy", hunks)
    return Verdict(name, "clean")


def report(old: Pins, new: Pins, verdicts: list[Verdict], names: tuple[list[str], ...]) -> str:
    """In Markdown."""
    counts = [f"{sum(v.word == w for v in verdicts)} {w}" for w in ("clean", "fuzzy", "conflict")]
    lines = [
        f"## vLLM {old.version} → {new.version}: {', '.join(counts)}",
        "",
        "| patch | |",
        "|---|---|",
        *(f"| {v.patch} | {v.word} |" for v in verdicts),
    ]
    for v in verdicts:
        for file, hunk in v.hunks.items():
            lines += ["", f"### {v.word}: {v.patch.partition('-')[0]}{file and f', {file}'}", ""]
            lines += ["```diff", hunk.rstrip(), "```"]
    lines += ["", "### Names that s4kv_ext imports", ""]
    for word, which in zip(("gone", "changed"), names):
        lines.append(f"- {word}: {', '.join(f'`{n}`' for n in which) or 'none'}")
    return "\n".join(lines) + "\n"


def new_worktree(version: str, *, force: bool) -> Path:
    path, branch = WORK / version, f"rebase-{version}"
    if force:
        if path.exists():
            git("worktree", "remove", "--force", str(path), cwd=ROOT)
        git("worktree", "prune", cwd=ROOT)
        if git("branch", "--list", branch, cwd=ROOT):
            git("branch", "-D", branch, cwd=ROOT)
    elif path.exists() or git("branch", "--list", branch, cwd=ROOT):
        raise Stop(
            f"there is a rebase to {version} already, in {path} on the branch {branch}: go on "
            "there, or start anew with FORCE=1 (build/rebase.py --force)"
        )
    git("worktree", "add", "-q", "-b", branch, str(path), "HEAD", cwd=ROOT)
    return path


def commit(path: Path, message: str) -> None:
    """By whoever runs this: the user's own name counts, unlike in vllm/src."""
    for command in (["add", "-A"], ["commit", "-q", "-m", message]):
        if subprocess.run(["git", *command], cwd=path, check=False).returncode:
            raise Stop(f"git could not commit in {path}; set user.name and user.email")


def script(path: Path, name: str, *arguments: str) -> int:
    """One of the worktree's own scripts."""
    env = {k: v for k, v in os.environ.items() if k != "ARGS"}
    return subprocess.run(
        [sys.executable, str(path / "build" / f"{name}.py"), *arguments], env=env, check=False
    ).returncode


def lay_down(path: Path, fresh: Path, old: Pins, new: Pins) -> bool:
    """Pin and series in the worktree; whether it is whole. Else git am stands at the conflict."""
    pin = path / PIN.relative_to(ROOT)
    pin.write_text(repin(pin.read_text(), old, new))
    commit(path, f"Pin vLLM {new.version}")
    src = path / SRC.relative_to(ROOT)
    git("checkout", "-q", "-B", "s4kv", "pristine", cwd=fresh)
    shutil.move(fresh, src)
    src.chmod(0o755)
    try:
        git(*AM, *(str(PATCHES / name) for name in checkout.series()), cwd=src)
    except Stop:
        return False
    if script(path, "refresh") or script(path, "verify"):
        raise Stop(f"the series in {path} is not sound: see above")
    if git("status", "--porcelain", cwd=path):
        commit(path, f"Rebase the series onto vLLM {new.version}")
    return True


def need_clean() -> None:
    if git("status", "--porcelain", cwd=ROOT):
        raise Stop("there are changes that are not committed: a rebase starts from a commit")
    if edits := checkout.local_edits():
        raise Stop(f"vllm/src has {edits}: a rebase starts from patches/")


def examine(src: Path, pristine: Path) -> tuple[list[Verdict], tuple[list[str], ...]]:
    names = compared(ROOT / "s4kv_ext", pristine, src)
    return [try_patch(src, name) for name in checkout.series()], names


def write(version: str, text: str) -> Path:
    TREE.mkdir(exist_ok=True)
    path = TREE / f"rebase-{version}.md"
    path.write_text(text)
    return path


def run() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("version", metavar="VERSION", help="of vLLM, such as 0.26.0, or newest")
    ap.add_argument("--no-tests", action="store_true", help="stop before the tests")
    ap.add_argument("--report", action="store_true", help="report only, change nothing")
    ap.add_argument("--force", action="store_true", help="throw an earlier rebase away")
    args = ap.parse_args()
    old = pins()
    version = newest(old) if args.version == "newest" else args.version
    if version == old.version:
        text = f"the pin is vLLM {old.version} already"
        if args.version == "newest":
            say(f"{text}, the newest: {write(version, text)}")
            return 0
        raise Stop(text)
    if not args.report:
        need_clean()
    new = pins_of(version, old)
    path = None if args.report else new_worktree(new.version, force=args.force)
    TREE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TREE) as tmp:
        pristine, fresh = Path(tmp) / "old", Path(tmp) / "new"
        pristine.mkdir()
        fresh.mkdir()
        checkout.make(pristine)
        base(fresh, new, pristine)
        git("checkout", "-q", "pristine", cwd=pristine)
        text = report(old, new, *examine(fresh, pristine))
        print(text)
        whole = path is not None and lay_down(path, fresh, old, new)
    if path is None:
        say(f"the report: {write(new.version, text)}")
        return 0
    if not whole:
        say(f"the report: {write(new.version, text)}")
        say(
            f"git am stands at the first conflict in {path / SRC.relative_to(ROOT)}: resolve it "
            f"there, git add, git am --continue; then, in {path}, make refresh verify test, and "
            "commit"
        )
        return 1
    failed = 0
    if not args.no_tests:
        failed = script(path, "test", *TESTS)
        word = "failed, see the output" if failed else "passed"
        text += f"\n### Tests\n\n`build/test.py {' '.join(TESTS)}` {word}.\n"
    say(f"the report: {write(new.version, text)}")
    say(f"the result: {path}, branch rebase-{new.version}" + (", tests failed" * bool(failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    main(run)
