#!/usr/bin/env python3
"""Write the commits of vllm/src back to patches/ and patches/series.

The output depends on the commits alone: two runs, and two machines, give the same bytes.

examples:
  git -C vllm/src commit --amend ... && build/refresh.py
  build/refresh.py --check     only say whether patches/ is what the commits give
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import checkout
from common import PATCHES, SRC, Stop, git, main, say


def differences(fresh: Path, names: list[str]) -> list[str]:
    """Names in which patches/ differs from a fresh export."""
    old = checkout.patch_files()
    changed = [
        n for n in names if n not in old or (PATCHES / n).read_bytes() != (fresh / n).read_bytes()
    ]
    changed += [n for n in old if n not in names]
    return changed + (["series"] if checkout.series() != names else [])


def refresh(*, check: bool = False) -> int:
    if not (SRC / ".git").exists():
        raise Stop("there is no vllm/src: make apply")
    if git("status", "--porcelain", cwd=SRC).strip():
        raise Stop("vllm/src has changes that are not committed: commit them there first")
    with tempfile.TemporaryDirectory() as tmp:
        fresh = Path(tmp)
        names = checkout.export(SRC, fresh)
        changed = differences(fresh, names)
        if check:
            say(f"differ: {', '.join(changed)}" if changed else "patches/ is up to date")
            return 1 if changed else 0
        PATCHES.mkdir(exist_ok=True)
        for old in checkout.patch_files():
            if old not in names:
                (PATCHES / old).unlink()
        for name in names:
            if name in changed:
                (PATCHES / name).parent.mkdir(exist_ok=True)
                (PATCHES / name).write_bytes((fresh / name).read_bytes())
        (PATCHES / "series").write_text("".join(f"{n}\n" for n in names))
    checkout.note_applied()
    say(f"wrote {', '.join(changed)}" if changed else "patches/ was up to date")
    return 0


def run() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--check", action="store_true", help="write nothing; exit 1 where it differs")
    return refresh(check=ap.parse_args().check)


if __name__ == "__main__":
    main(run)
