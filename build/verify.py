#!/usr/bin/env python3
"""Prove that the patch series is sound.

It applies to the pristine source without fuzz, matches the folder, is what a refresh would write,
each message says why the patch exists and until when, and together the patches stay thin.

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

MAX_ADDED, MAX_FILES = 150, 10
SAYS = {"Why:": "why it exists", "Until:": "when it can go"}


def message(patch: Path) -> str:
    """The commit message: all before the diff."""
    return re.split(r"^diff --git ", patch.read_text(), maxsplit=1, flags=re.M)[0]


def verify() -> None:
    names = checkout.series()
    wrong = [
        f"patches/{p.name} is not in the series"
        for p in sorted(PATCHES.glob("*.patch"))
        if p.name not in names
    ]
    if len(set(names)) != len(names):
        wrong.append("the series names a patch twice")
    for name in names:
        text = message(PATCHES / name)
        wrong += [
            f"{name} does not say {what} (a line that starts with {word!r})"
            for word, what in SAYS.items()
            if not re.search(rf"^{word} \S", text, flags=re.M)
        ]
    with tempfile.TemporaryDirectory() as tmp:
        tree, fresh = Path(tmp) / "src", Path(tmp) / "patches"
        tree.mkdir()
        checkout.make(tree)
        rows = git("diff", "--numstat", "--no-renames", "pristine..HEAD", cwd=tree).splitlines()
        written = checkout.export(tree, fresh)
        if changed := differences(fresh, written):
            wrong.append(f"a refresh would change {', '.join(changed)}")
        if again := git("status", "--porcelain", cwd=tree).strip():
            wrong.append(f"the checkout is not clean after the series: {again}")
    # Of each patch, not of the sum: a line that two patches write is two to maintain.
    added = sum(
        1
        for name in names
        for line in (PATCHES / name).read_text().splitlines()
        if line.startswith("+") and not line.startswith("+++ ")
    )
    if added > MAX_ADDED:
        wrong.append(f"the patches add {added} lines, {MAX_ADDED} are allowed")
    if len(rows) > MAX_FILES:
        wrong.append(f"the patches touch {len(rows)} files, {MAX_FILES} are allowed")
    if wrong:
        raise Stop("\n  ".join(["the patch series is not sound:", *wrong]))
    say(f"{len(names)} patches are sound: {added} lines added in {len(rows)} upstream files")


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.parse_args()
    verify()


if __name__ == "__main__":
    main(run)
