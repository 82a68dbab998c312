"""The files of an upstream release and their sha256, as pip's index has them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from functools import cache

from common import ROOT, Pinned, Pins, Stop
from fetch import pip_python

BY_VERSION = ("source", "cuda", "cpu")  # the pinned files that a release of vLLM consists of


@cache
def published(project: str) -> dict[str, str]:
    """File name: sha256 ("" where the index gives none)."""
    command = [pip_python(), str(ROOT / "build" / "pip_download.py"), project]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    if done.returncode:
        raise SystemExit(1)  # it has said why
    rows = (line.partition(" ") for line in done.stdout.splitlines())
    return {name: digest for name, _, digest in rows}


def same_kind(pinned: Pinned, version: str) -> re.Pattern[str]:
    """Names of the file as another release has it: of this machine, of any C library and Python."""
    stem = pinned.file.partition("-")[0]
    if pinned.file.endswith(".tar.gz"):
        return re.compile(rf"{stem}-{version}\.tar\.gz")
    machine = re.search(r"_(x86_64|aarch64)\.whl$", pinned.file)
    return re.compile(rf"{stem}-{version}-[^-]+-[^-]+-\w+{machine[0] if machine else '.whl'}")


def versions(kind: str, old: Pins) -> list[str]:
    """Of the releases that have such a file, the oldest first, without candidates."""
    pattern = same_kind(old.files[kind], r"([\d.]+)")
    found = {m[1] for name in published(old.files[kind].project) if (m := pattern.fullmatch(name))}
    return sorted(found, key=lambda v: [int(x) for x in v.split(".") if x])


def newest(old: Pins) -> str:
    """The newest release that has every file."""
    have = [set(versions(kind, old)) for kind in BY_VERSION]
    return [v for v in versions("source", old) if all(v in h for h in have)][-1]


def pins_of(version: str, old: Pins) -> Pins:
    """`old` with the files of `version` instead."""
    files = dict(old.files)
    for kind in BY_VERSION:
        names = published(old.files[kind].project)
        pattern = same_kind(old.files[kind], re.escape(version))
        found = [n for n in names if pattern.fullmatch(n)]
        if len(found) != 1:
            raise Stop(
                f"pip's index has {len(found)} {kind} files of {old.files[kind].project} "
                f"{version}; there is one of {', '.join(versions(kind, old)[-6:])}"
            )
        if not names[found[0]]:
            raise Stop(f"pip's index gives no sha256 for {found[0]}: use one that does")
        files[kind] = replace(old.files[kind], file=found[0], sha256=names[found[0]])
    return replace(old, version=version, revision=1, files=files)


def repin(text: str, old: Pins, new: Pins) -> str:
    """pin.toml with the new version, file names and hashes; comments stay."""
    pairs = [(f'version = "{old.version}"', f'version = "{new.version}"')]
    for kind in BY_VERSION:
        a, b = old.files[kind], new.files[kind]
        pairs += [(a.file, b.file), (a.sha256, b.sha256)]
    text = re.sub(r"^revision = \d+", "revision = 1", text, count=1, flags=re.M)
    for before, after in [*pairs, (f"{old.version}+s4kv", f"{new.version}+s4kv")]:
        text = text.replace(before, after)
    return text
