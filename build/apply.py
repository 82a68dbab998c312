#!/usr/bin/env python3
"""Lay the patched vLLM checkout in vllm/src: a git repository, one commit a patch.

Edit and commit there, then `make refresh` writes the series back. Does nothing where the checkout
is up to date, and stops rather than lose edits.

examples:
  build/apply.py           make or renew the checkout
  build/apply.py --keep    the same, but leave a checkout that holds edits as it is
  build/apply.py --force   throw edits in vllm/src away
"""

from __future__ import annotations

import argparse

import checkout
from common import SRC, TREE, Stop, locked, main, say


def apply(*, keep: bool = False, force: bool = False) -> None:
    TREE.mkdir(exist_ok=True)
    with locked(TREE / ".src.lock"):
        edits = "" if force else checkout.local_edits()
        if edits and keep:
            say(f"vllm/src has {edits}; it is used as it is")
            return
        if edits and not checkout.current():
            raise Stop(f"vllm/src has {edits}; --force throws them away")
        if edits or (checkout.current() and not force):
            say(f"vllm/src is up to date{f', with {edits}' if edits else ''}")
            return
        checkout.renew()
        say(f"{SRC.relative_to(SRC.parent.parent)}: {len(checkout.series())} patches applied")


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--force", action="store_true", help="throw edits in vllm/src away")
    ap.add_argument("--keep", action="store_true", help="leave a checkout with edits as it is")
    args = ap.parse_args()
    apply(keep=args.keep, force=args.force)


if __name__ == "__main__":
    main(run)
