#!/usr/bin/env python3
"""Lock what tests and builds install: requirements/NAME.in says what, NAME.txt which files.

Each file is named by its sha256, for every Python from 3.11 on, and --require-hashes checks it.
What the product needs is in the wheel's metadata and not locked; what the tests need is chosen so
that both fit into one environment. Without an argument locked versions stay where they can.

examples:
  build/lock.py                 after a line of requirements/*.in was changed
  build/lock.py --upgrade       to the newest versions
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import env
import metadata
from apply import apply
from archive import Base
from common import main, pins, say
from fetch import fetch

HEAD = "# By build/lock.py from {name}.in; make lock.\n"
ALONE = ("nvcc",)  # installed without what its packages depend on


def compiled(source: Path, out: Path, *flags: str | Path) -> None:
    env.uv(
        *("pip", "compile", "-q", "--universal", "--python-version", "3.11", "--generate-hashes"),
        *("--no-header", "--no-annotate", "--no-build", "-o", out, source, *flags),
        python=Path(sys.executable),
    )


def product(folder: Path, *flags: str) -> Path:
    """What the wheel and the tests need, resolved together: the lock of the tests is a part."""
    upstream = Base(fetch(pins().files["cpu"])).text("METADATA")
    needs = folder / "product.in"
    needs.write_text("\n".join(metadata.requirements(upstream, "cpu")) + "\n")
    out = folder / "product.txt"
    compiled(env.lock("tests").with_suffix(".in"), out, needs, *flags)
    return out


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--upgrade", action="store_true", help="take the newest versions")
    flags = ("--upgrade",) if ap.parse_args().upgrade else ()
    apply(keep=True)  # the torch that goes with the wheel is named there
    with tempfile.TemporaryDirectory() as tmp:
        both = ("--constraint", product(Path(tmp), *flags))
        for source in sorted(env.REQUIREMENTS.glob("*.in")):
            name, out = source.stem, source.with_suffix(".txt")
            special = both if name == "tests" else ("--no-deps",) if name in ALONE else ()
            before = out.read_bytes() if out.exists() else b""
            compiled(source, out, *special, *flags)
            out.write_text(HEAD.format(name=name) + out.read_text())
            if out.read_bytes() != before:
                say(f"{out.relative_to(env.ROOT)} is new")


if __name__ == "__main__":
    main(run)
