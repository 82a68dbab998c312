#!/usr/bin/env python3
"""Prove that the patch series is sound.

It applies to the pristine source without fuzz, matches the folder, is what a refresh would write,
each message says why the patch exists and until when, and the patches stay thin: those of int4_kivi
together, and each of those that mend a fault of vLLM's own (patches/fixes).

examples:
  build/verify.py
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import checkout
from common import PATCHES, Stop, git, main, say
from refresh import differences

MAX_ADDED, MAX_FILES = 150, 10  # of the int4_kivi patches
MAX_FIX = 40  # lines that a patch in patches/fixes may add
SAYS = {"Why:": "why it exists", "Until:": "when it can go"}


def added_lines(name: str) -> int:
    lines = (PATCHES / name).read_text().splitlines()
    return sum(x.startswith("+") and not x.startswith("+++ ") for x in lines)


def touched_files(names: list[str]) -> set[str]:
    text = "".join((PATCHES / n).read_text() for n in names)
    return set(re.findall(r"^diff --git a/(\S+) ", text, flags=re.M))


def verify() -> None:
    names = checkout.series()
    wrong = [
        f"patches/{name} is not in the series"
        for name in checkout.patch_files()
        if name not in names
    ]
    if len(set(names)) != len(names):
        wrong.append("the series names a patch twice")
    for name in names:
        text = checkout.message(PATCHES / name)
        wrong += [
            f"{name} does not say {what} (a line that starts with {word!r})"
            for word, what in SAYS.items()
            if not re.search(rf"^{word} \S", text, flags=re.M)
        ]
    with tempfile.TemporaryDirectory() as tmp:
        tree, fresh = Path(tmp) / "src", Path(tmp) / "patches"
        tree.mkdir()
        checkout.make(tree)
        written = checkout.export(tree, fresh)
        if changed := differences(fresh, written):
            wrong.append(f"a refresh would change {', '.join(changed)}")
        if again := git("status", "--porcelain", cwd=tree).strip():
            wrong.append(f"the checkout is not clean after the series: {again}")
    # Of each patch, not of the sum: a line that two patches write is two to maintain.
    fixes = [n for n in names if n.startswith(f"{checkout.FIXES}/")]
    own = [n for n in names if n not in fixes]
    added, files = sum(map(added_lines, own)), len(touched_files(own))
    if added > MAX_ADDED:
        wrong.append(f"the patches add {added} lines, {MAX_ADDED} are allowed")
    if files > MAX_FILES:
        wrong.append(f"the patches touch {files} files, {MAX_FILES} are allowed")
    wrong += [
        f"{n} adds {added_lines(n)} lines, a fix may add {MAX_FIX}"
        for n in fixes
        if added_lines(n) > MAX_FIX
    ]
    if wrong:
        raise Stop("\n  ".join(["the patch series is not sound:", *wrong]))
    say(f"{len(own)} patches are sound: {added} lines added in {files} upstream files")
    if fixes:
        added, files = sum(map(added_lines, fixes)), len(touched_files(fixes))
        say(f"{len(fixes)} fixes of vLLM's own: {added} lines added in {files} upstream files")


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.parse_args()
    verify()


if __name__ == "__main__":
    main(run)
