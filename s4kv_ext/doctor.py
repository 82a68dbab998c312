"""`s4kv doctor`: what is installed, what it runs on, and what int4_kivi would do here.

For an issue that others read: no values of environment variables, no host name, and the home
folder and the user's name are replaced. Only the command that repairs has them, on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from s4kv_ext import install_check

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("vllm", "s4kv-vllm", "torch", "triton", "transformers")
OURS = ("VLLM_", "S4KV_", "CUDA_VISIBLE_DEVICES")
"""How the names of environment variables begin that change what a server does."""


def add(sub: argparse._SubParsersAction) -> None:
    p = sub.add_parser(
        "doctor",
        help="is the installation intact, what does it run on, what would int4_kivi use",
        description="Print versions, CPU, driver and GPUs, check every installed file, and say "
        "which kernels int4_kivi would use here, or why none. stdout has no secrets and is meant "
        "to be pasted into an issue. The exit status is 1 if something is wrong; the command that "
        "repairs it is printed on stderr.",
        epilog="examples:\n  s4kv doctor\n  s4kv doctor --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--json", action="store_true", help="for machines")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = collect()
    shown = scrubbed(found)
    print(json.dumps(shown, indent=1) if args.json else text(shown))
    if install_check.state() or found["changed_files"]:
        print(f"to repair {install_check.repair()}", file=sys.stderr)
    return 0 if found["intact"] else 1


def collect() -> dict[str, Any]:
    """Everything, of JSON's types."""
    info = install_check.build_info()
    variant = info["variant"] if info else "unknown"
    changed = install_check.changed_members()
    problems = list(install_check.state())
    if changed:
        problems.append(
            f"{len(changed)} files differ from what was installed, the first is {changed[0]}"
        )
    problems += library_problems(variant)
    driver, gpus = nvidia()
    backend, why_not = backend_here(variant, problems)
    note = install_check.misplaced()
    return {
        "versions": {name: installed(name) for name in PACKAGES},
        "variant": variant,
        "python": platform.python_version(),
        "system": system(),
        "cpu": cpu(),
        "memory_gib": memory_gib(),
        "driver": driver,
        "gpus": gpus,
        "variables": sorted(k for k in os.environ if k.startswith(OURS)),
        "int4_kivi": {"backend": backend, "why_not": why_not},
        "notes": [note] if note else [],
        "problems": problems,
        "changed_files": len(changed),
        "intact": not problems,
    }


def text(found: dict[str, Any]) -> str:
    """For people, and fenced for an issue."""
    c, use = found["cpu"], found["int4_kivi"]
    rows = [*found["versions"].items(), ("variant", found["variant"]), ("Python", found["python"])]
    rows += [("system", found["system"]), ("memory", f"{found['memory_gib']} GiB")]
    rows += [("CPU", f"{c['count']} × {c['name']}; {', '.join(c['flags']) or 'no AVX2'}")]
    rows += [("driver", found["driver"] or "none")]
    rows += [
        (
            "GPU",
            f"{g['name']}, compute capability {g['capability']}, {g['memory']}, ECC {g['ecc']}",
        )
        for g in found["gpus"]
    ] or [("GPU", "none")]
    rows += [("variables", ", ".join(found["variables"]) or "none")]
    rows += [("int4_kivi", use["backend"] or f"none: {use['why_not']}")]
    rows += [("NOTE", note) for note in found["notes"]]
    rows += [("WRONG", problem) for problem in found["problems"]]
    rows += [("installation", "intact" if found["intact"] else "not intact")]
    return "\n".join(["```", *(f"{name:13} {value}" for name, value in rows), "```"])


def scrubbed(value: Any) -> Any:
    """The same without the home folder and the user's name in paths."""
    if isinstance(value, dict):
        return {k: scrubbed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [scrubbed(v) for v in value]
    if not isinstance(value, str):
        return value
    if (home := os.path.expanduser("~")) not in ("~", "/"):
        value = re.sub(rf"{re.escape(home)}(?=[/\s:;,]|$)", "~", value)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without a name
        return value
    return re.sub(rf"(?<=/){re.escape(user)}(?=[/\s:;,]|$)", "USER", value)


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        name = platform.system()
    libc = " ".join(filter(None, platform.libc_ver()))
    return f"{name}, kernel {platform.release()}, {libc or 'unknown libc'}, {platform.machine()}"


def cpu() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "count": len(os.sched_getaffinity(0)),
        "flags": [f for f in FLAGS if f in fields.get("flags", "").split()],
    }


def memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1)


def nvidia() -> tuple[str | None, list[dict[str, str]]]:
    """The driver's version and the GPUs, as nvidia-smi has them."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None, []
    query = "--query-gpu=driver_version,name,compute_cap,memory.total,ecc.mode.current"
    try:
        done = subprocess.run(
            [smi, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer", []
    if done.returncode:
        said = (done.stdout or done.stderr).strip().splitlines()
        return said[0] if said else f"nvidia-smi ends with status {done.returncode}", []
    rows = [[x.strip() for x in line.split(",")] for line in done.stdout.strip().splitlines()]
    names = ("name", "capability", "memory", "ecc")
    gpus = [dict(zip(names, row[1:])) for row in rows]
    return (rows[0][0] if rows else None), gpus


def library_problems(variant: str) -> Iterator[str]:
    """System libraries that upstream's binaries load and that no wheel brings."""
    if variant != "cpu":
        return
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        yield "the system library libnuma.so.1 is missing: apt-get install libnuma1"


def backend_here(variant: str, problems: list[str]) -> tuple[str | None, str | None]:
    """The kernels that int4_kivi would use, or why none; it tries to load them."""
    if problems:
        return None, "the installation is broken, see below"
    try:
        return (_cuda() if variant == "cuda" else _cpu()), None
    except Exception as e:  # whatever keeps them from loading is the answer
        return None, str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__


def _cpu() -> str:
    from s4kv_ext import cpu_ops

    cpu_ops.load()
    return f"CPU kernels, {cpu_ops.isa()}"


def _cuda() -> str:
    import torch

    from s4kv_ext import checks, cuda_ops

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong is raised by the next line as well
        torch.cuda.init()
    count = torch.cuda.device_count()
    for i in range(count):
        checks.require_capability(
            torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
        )
    cuda_ops.load()
    major, minor = torch.cuda.get_device_capability(0)
    return (
        f"CUDA kernels for compute capability {major}.{minor}; torch sees "
        f"{count} GPU{'s' if count > 1 else ''} with CUDA {torch.version.cuda}"
    )
