#!/usr/bin/env python3
"""Make a release of the commit that is checked out: release/VERSION/, ready to be served.

Both wheels and both aliases, each built twice in different folders and compared byte for byte, the
sha256 of every file, an SBOM (CycloneDX) of each wheel, what changed, and simple/, an index that
`pip install --index-url` takes from any web server or by file://. Nothing is published.

examples:
  build/release.py 0.25.1+s4kv.1
  build/release.py 0.25.1+s4kv.1 --against DIR    compare with the wheels that another machine built
  build/release.py 0.25.1+s4kv.1 --variant cpu    where there is no CUDA compiler; to try it out
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import env
import index
from common import ROOT, TREE, Pins, Stop, digest, git, main, pins, say

OUT = ROOT / "release"
CHANGELOG = ROOT / "CHANGELOG.md"
VARIANTS = ("cpu", "cuda")


def released(p: Pins) -> str:
    return f"{p.version}+s4kv.{p.revision}"


def need_version(version: str, p: Pins) -> None:
    if version != released(p):
        raise Stop(
            f"vllm/pin.toml says version {p.version}, revision {p.revision}, and so "
            f"{released(p)}, not {version}: release that one, or change revision and commit"
        )


def need_clean() -> None:
    if left := git("status", "--porcelain", cwd=ROOT).splitlines():
        names = ", ".join(line[3:] for line in left[:5]) + (", …" if len(left) > 5 else "")
        raise Stop(f"there are changes that are not committed ({names}): commit or stash them")


def changes(version: str, text: str) -> str:
    """The section of CHANGELOG.md, without its heading."""
    found = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    if not found or not found[1].strip():
        raise Stop(
            f"CHANGELOG.md has no section {version}: head what is Unreleased with "
            f"'## {version} (date)' and commit"
        )
    return found[1].strip() + "\n"


def build_in(folder: Path, variants: tuple[str, ...]) -> list[Path]:
    """The wheels of HEAD, from a clone of its own."""
    git("clone", "-q", "--no-hardlinks", str(ROOT), str(folder), cwd=ROOT)
    git("checkout", "-q", "--detach", git("rev-parse", "HEAD", cwd=ROOT).strip(), cwd=folder)
    (folder / "build-tree").mkdir()
    (folder / "build-tree" / "tools").symlink_to(env.TOOLS)
    for variant in variants:
        env.call([sys.executable, folder / "build" / "wheel.py", variant])
    return sorted((folder / "dist").glob("*.whl"))


def different(a: Path, b: Path) -> list[str]:
    """Members in which two wheels differ."""
    one, two = zipfile.ZipFile(a), zipfile.ZipFile(b)
    names = sorted({*one.namelist(), *two.namelist()})
    both = set(one.namelist()) & set(two.namelist())
    return [n for n in names if n not in both or one.getinfo(n).CRC != two.getinfo(n).CRC]


def compare(first: list[Path], second: list[Path]) -> None:
    if [p.name for p in first] != [p.name for p in second]:
        raise Stop("the two builds have files of different names: " + str([*first, *second]))
    for a, b in zip(first, second):
        if digest(a) != digest(b):
            names = ", ".join(different(a, b)[:5]) or "in their zip headers"
            raise Stop(f"{a.name} is not reproducible: two builds of it differ: {names}")


def sbom(wheel: Path, out: Path) -> Path:
    """By a library in an environment of its own, so that the other scripts need none."""
    python = env.programs("release") / "python"
    path = out / f"{wheel.stem}.cdx.json"
    stamp = git("show", "-s", "--format=%cI", "HEAD", cwd=ROOT).strip()
    env.call([python, ROOT / "build" / "sbom.py", wheel, path, "--time", stamp])
    return path


def theirs(folder: Path, ours: list[Path]) -> list[Path]:
    """The wheels of the same names that another machine made."""
    found = [folder / path.name for path in ours]
    if gone := [p.name for p in found if not p.is_file()]:
        raise Stop(f"{folder} has no {', '.join(gone)}: give the folder that make wheel filled")
    return found


def release(version: str, variants: tuple[str, ...] = VARIANTS, against: str = "") -> Path:
    p = pins()
    need_version(version, p)
    need_clean()
    notes = changes(version, CHANGELOG.read_text())
    env.tools()
    with tempfile.TemporaryDirectory(dir=TREE, prefix="release-") as tmp:
        first = build_in(Path(tmp) / "1", variants)
        other = Path(tmp) / "another-folder"
        second = theirs(Path(against), first) if against else build_in(other, variants)
        compare(first, second)
        say(f"{len(first)} wheels, the same in two builds")
        part = Path(tmp) / version
        part.mkdir()
        wheels = [Path(shutil.copy(path, part)) for path in first]
        for wheel in wheels:
            if wheel.name.startswith("vllm-"):
                sbom(wheel, part)
        (part / "CHANGES.md").write_text(f"# s4kv-vllm {version}\n\n{notes}")
        index.write(part / "simple", wheels)
        files = sorted(p for p in part.iterdir() if p.is_file())
        (part / "SHA256SUMS").write_text("".join(f"{digest(p)}  {p.name}\n" for p in files))
        OUT.mkdir(exist_ok=True)
        out = OUT / version
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    for line in (out / "SHA256SUMS").read_text().splitlines():
        say(line)
    say(f"release/{version} is whole; docs/maintain.md says how to publish it")
    return out


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("version", metavar="VERSION", help="what vllm/pin.toml says, such as V+s4kv.N")
    ap.add_argument("--variant", choices=VARIANTS, help="only this one; default: both")
    ap.add_argument("--against", default="", metavar="DIR", help="instead of a second build here")
    args = ap.parse_args()
    release(args.version, (args.variant,) if args.variant else VARIANTS, args.against)


if __name__ == "__main__":
    main(run)
