#!/usr/bin/env python3
"""What deploy/ needs made: the bundle for machines, and the boot script in the template.

examples:
  build/deploy.py bundle --variant cuda    dist/s4kv-cuda.tar: the wheels and deploy/, for an
                                           instance or an image to install
  build/deploy.py template                 copy deploy/aws/boot.sh into deploy/cfn-gpu-serving.yaml
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path

from common import DIST, ROOT, Stop, digest, main, say

TEMPLATE = ROOT / "deploy" / "cfn-gpu-serving.yaml"
BOOT = ROOT / "deploy" / "aws" / "boot.sh"
IN_BUNDLE = ("deploy/aws", "deploy/machine")
BEFORE = "\n              - |\n"  # of the script in UserData
AFTER = "\n  Group:\n"


def bundle(variant: str) -> Path:
    """The same inputs give the same bytes: no times, no users, no compression (wheels are)."""
    import wheel

    files = wheel.build(variant)
    files += [p for folder in IN_BUNDLE for p in sorted((ROOT / folder).iterdir()) if p.is_file()]
    path = DIST / f"s4kv-{variant}.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            info = tarfile.TarInfo(str(file.relative_to(ROOT)))
            info.size = file.stat().st_size
            info.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            with file.open("rb") as f:
                tar.addfile(info, f)
    say(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB, sha256 {digest(path)}")
    return path


def with_boot_script(template: str) -> str:
    """The template with the boot script as it is now."""
    head, found, rest = template.partition(BEFORE)
    _, also, tail = rest.partition(AFTER)
    if not found or not also:
        raise Stop(f"{TEMPLATE.relative_to(ROOT)}: the place of the boot script is not found")
    lines = (f"{' ' * 16}{x}".rstrip() for x in BOOT.read_text().splitlines())
    return head + found + "\n".join(lines) + "\n" + also + tail


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = ap.add_subparsers(dest="command", required=True)
    p = sub.add_parser("bundle", help="the wheels and deploy/ in one file")
    p.add_argument("--variant", choices=("cpu", "cuda"), default="cuda")
    sub.add_parser("template", help="copy the boot script into the template")
    args = ap.parse_args()
    if args.command == "bundle":
        bundle(args.variant)
    else:
        TEMPLATE.write_text(with_boot_script(TEMPLATE.read_text()))


if __name__ == "__main__":
    main(run)
