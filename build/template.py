#!/usr/bin/env python3
"""Copy deploy/aws/boot.sh into the user data of deploy/cfn-gpu-serving.yaml."""

from __future__ import annotations

import argparse

from common import ROOT, Stop, main

TEMPLATE = ROOT / "deploy" / "cfn-gpu-serving.yaml"
BOOT = ROOT / "deploy" / "aws" / "boot.sh"
BEFORE = "\n              - |\n"  # the script
AFTER = "\n  Group:\n"


def filled(template: str) -> str:
    """The template with the script as it is now."""
    head, found, rest = template.partition(BEFORE)
    _, also, tail = rest.partition(AFTER)
    if not found or not also:
        raise Stop(f"{TEMPLATE.relative_to(ROOT)}: the place of the boot script is not found")
    lines = (f"{' ' * 16}{x}".rstrip() for x in BOOT.read_text().splitlines())
    return head + found + "\n".join(lines) + "\n" + also + tail


def run() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    TEMPLATE.write_text(filled(TEMPLATE.read_text()))


if __name__ == "__main__":
    main(run)
