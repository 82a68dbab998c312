#!/usr/bin/env python3
"""Fetch the pinned files, verify them and keep them in the cache.

They come through whatever index, mirror, find-links folder, proxy, certificate and login pip is
set up with. What the cache holds is not fetched again, so a full cache needs no network. A
download that was cut short goes on where it stopped.

examples:
  build/fetch.py                 all pinned files
  build/fetch.py source cpu      only what the CPU wheel needs
  S4KV_CACHE=/data/s4kv build/fetch.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from common import ROOT, TREE, Pinned, Stop, cache_dir, digest, locked, main, pins, say


def has_pip(python: str) -> bool:
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def pip_python() -> str:
    """An interpreter with pip: this one, so that its configuration counts, else one of our own."""
    if has_pip(sys.executable):
        return sys.executable
    own = TREE / "pip"
    python = str(own / "bin" / "python")
    if not (own.exists() and has_pip(python)):
        done = subprocess.run([sys.executable, "-m", "venv", own], capture_output=True, text=True)
        if done.returncode:
            raise Stop(f"{sys.executable} has neither pip nor venv: install python3-venv")
    return python


def fetch(pin: Pinned) -> Path:
    """The path of the verified file in the cache."""
    target = cache_dir() / pin.file
    with locked(target.with_name(f".{pin.file}.lock")):
        if target.exists():
            if (found := digest(target)) != pin.sha256:
                raise Stop(
                    f"{target} has the wrong sha256\n  expected {pin.sha256}\n  found    {found}\n"
                    f"to fetch it again: rm {target}"
                )
            return target
        part = target.with_name(f"{pin.file}.part")
        script = ROOT / "build" / "pip_download.py"
        command = [pip_python(), str(script), pin.project, pin.file, str(part)]
        if code := subprocess.run(command).returncode:
            if code in (130, -2):
                raise KeyboardInterrupt
            sys.exit(1)  # it has said why
        if (found := digest(part)) != pin.sha256:
            part.unlink()  # it would only be resumed to the same end
            raise Stop(
                f"{pin.file}, as the index gave it, has the wrong sha256 and was not kept\n"
                f"  expected {pin.sha256}\n  found    {found}"
            )
        part.replace(target)
    return target


def run() -> None:
    known = pins().files
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    for name in (names := ap.parse_args().names or list(known)):
        if name not in known:
            raise Stop(f"no pinned file {name!r}: choose from {', '.join(known)}")
    for name in names:
        say(f"{name}: {fetch(known[name])}")


if __name__ == "__main__":
    main(run)
