#!/usr/bin/env python3
"""The environments: the tools that build, and .venv, which holds the installed product.

examples:
  build/env.py install --variant cpu     build if need be and install into .venv
  build/env.py install --tests           with what the tests need
  build/env.py uv pip list               uv, told pip's indexes, on .venv
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from common import ROOT, TREE, Stop, digest, locked, main, say
from fetch import pip_python
from indexes import pip_settings, uv_settings

VENV = ROOT / ".venv"
TOOLS = TREE / "tools"
DISK = 9e9  # torch brings its CUDA libraries along, also for the CPU variant
REQUIREMENTS = ROOT / "requirements"


def call(command: list[str | Path], **kwargs) -> None:
    done = subprocess.run([str(c) for c in command], check=False, **kwargs)
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    if done.returncode:
        raise Stop(f"failed: {' '.join(str(c) for c in command)[:300]}")


def lock(name: str) -> Path:
    """What is installed for `tools`, `tests` and so on: files by their sha256 (build/lock.py)."""
    return REQUIREMENTS / f"{name}.txt"


@cache
def tools() -> Path:
    """The folder of uv, cmake and ninja, which pip installs into an environment of their own."""
    done = TOOLS / "done"
    wanted = digest(lock("tools"))
    TREE.mkdir(exist_ok=True)
    with locked(TREE / ".tools.lock"):
        if not done.exists() or done.read_text() != wanted:
            say("getting the build tools (uv, cmake, ninja)")
            shutil.rmtree(TOOLS, ignore_errors=True)
            call([sys.executable, "-m", "venv", "--without-pip", TOOLS])
            pip = [pip_python(), "-m", "pip", "--python", str(TOOLS), "install", "-q"]
            done_by = subprocess.run(
                [*pip, "--require-hashes", "-r", lock("tools")],
                capture_output=True,
                text=True,
                check=False,
            )
            if done_by.returncode:
                told = [x for x in done_by.stderr.splitlines() if x.startswith("ERROR")]
                why = told[0] if told else done_by.stderr.strip()[-300:]
                raise Stop(f"pip could not get the build tools: {why}")
            done.write_text(wanted)
    return TOOLS / "bin"


def uv(*args: str | Path, python: Path | None = None) -> None:
    """One uv command; `pip install` and the like act on `python` and on pip's indexes."""
    settings = pip_settings(pip_python())
    if "--require-hashes" in args:  # uv takes no constraints then, and nothing is left to choose
        settings.pop("constraint", None)
    flags, env = uv_settings(settings)
    command: list[str | Path] = [tools() / "uv", *args]
    if args[0] == "pip":
        command += ["--python", python or VENV / "bin" / "python"]
        command += flags if args[1] in ("install", "compile") else []
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    call(command, env=clean | env)


def make_venv(path: Path) -> Path:
    """An environment of this interpreter, with pip; its python."""
    python = path / "bin" / "python"
    if not python.exists():
        uv("venv", "-q", "--seed", "--clear", "--python", sys.executable, path)
    return python


def programs(name: str) -> Path:
    """The folder of the programs that requirements/NAME.txt locks, an environment of their own."""
    path = TREE / "programs" / name
    stamp = path / "done"
    TREE.mkdir(exist_ok=True)
    with locked(TREE / f".{name}.lock"):
        if not stamp.exists() or stamp.read_text() != digest(lock(name)):
            stamp.unlink(missing_ok=True)
            install_locked(name, make_venv(path))
            stamp.write_text(digest(lock(name)))
    return path / "bin"


def install_locked(name: str, python: Path) -> None:
    uv("pip", "install", "-q", "--require-hashes", "-r", lock(name), python=python)


def need_disk(n: float) -> None:
    free = shutil.disk_usage(ROOT).free
    if free < n:
        raise Stop(f"{ROOT} has {free / 1e9:.1f} GB free, the installation needs {n / 1e9:.0f}")


def default_variant() -> str:
    """cuda where there is a CUDA GPU, else cpu."""
    smi = shutil.which("nvidia-smi")
    seen = smi and subprocess.run([smi, "-L"], capture_output=True, check=False)
    return "cuda" if seen and seen.returncode == 0 and b"GPU" in seen.stdout else "cpu"


def install(variant: str, *, tests: bool = False) -> None:
    """The wheel of the tree as it is, into .venv; nothing is done where nothing changed."""
    import wheel

    vllm, alias = wheel.build(variant)
    with locked(TREE / ".venv.lock"):
        stamp = VENV / ".s4kv-installed"
        product, tools = digest(vllm) + digest(alias), digest(lock("tests")) if tests else ""
        have = stamp.read_text().split() if stamp.exists() else []
        if have[:1] == [product] and tools in ("", *have):
            return
        if not have:
            need_disk(DISK)
        make_venv(VENV)
        stamp.unlink(missing_ok=True)
        say("installing into .venv")
        # A rebuilt wheel has the version of the old one: name what must be laid down again.
        again = ["--reinstall-package", "vllm", "--reinstall-package", "s4kv-vllm"]
        fits = ["--constraint", str(lock("tests"))] if tests else []
        uv("pip", "install", *again, vllm, f"{alias}[model]", *fits)
        if tests:
            install_locked("tests", VENV / "bin" / "python")
        # What the tests need stays installed when the product alone is installed anew.
        stamp.write_text(" ".join([product, tools or " ".join(have[1:])]))


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = ap.add_subparsers(dest="command", required=True)
    p = sub.add_parser("install", help="build if need be and install into .venv")
    p.add_argument("--variant", choices=("cpu", "cuda"), default=None)
    p.add_argument("--tests", action="store_true", help="with what the tests need")
    p = sub.add_parser("uv", help="run uv with pip's indexes")
    p.add_argument("args", nargs=argparse.REMAINDER)
    args = ap.parse_args()
    if args.command == "uv":
        return uv(*args.args)
    return install(args.variant or default_variant(), tests=args.tests)


if __name__ == "__main__":
    main(run)
