"""The dist-info of our wheels, made from upstream's."""

from __future__ import annotations

import re
from email.parser import HeaderParser
from functools import cache

from common import ROOT, SRC, Pins

PYTHON_TAG = "cp38-abi3"
OURS = "s4kv.{revision}"
SUMMARY = "vLLM {version} with --kv-cache-dtype int4_kivi: three times the tokens in the KV cache"
ENTRY_POINTS = {
    "[console_scripts]": "s4kv = s4kv_ext.cli:main",
    "[vllm.general_plugins]": "s4kv_install_check = s4kv_ext.install_check:plugin",
}
# The alias stays where stock vLLM has replaced the wheel, and says so.
ALIAS_ENTRY_POINTS = """[console_scripts]
s4kv-doctor = s4kv_guard:doctor

[vllm.general_plugins]
s4kv_guard = s4kv_guard:guard_plugin
"""
DROPPED = ("Author", "Author-email", "Maintainer", "Maintainer-email", "Project-URL", "Summary")


def local_version(pins: Pins, variant: str) -> str:
    """`cpu` is what vLLM's CPU platform looks for; and the CUDA variant sorts above it."""
    return ("cpu." if variant == "cpu" else "") + OURS.format(revision=pins.revision)


def version(pins: Pins, variant: str) -> str:
    return f"{pins.version}+{local_version(pins, variant)}"


def requirement_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


@cache
def torch_pins() -> dict[str, str]:
    """torch and its companions as upstream pins them for CUDA, by name.

    The CPU wheel leaves the companions open; the newest do not load with the torch it needs.
    """
    lines = (SRC / "requirements" / "cuda.txt").read_text().splitlines()
    found = (re.match(r"((torch|torchaudio|torchvision)==[\w.]+)", line) for line in lines)
    return {m[2]: m[1] for m in found if m}


def pin_cpu(requirement: str) -> str:
    return torch_pins().get(requirement_name(requirement), requirement)


def requirements(upstream: str, variant: str) -> list[str]:
    """Upstream's Requires-Dist, the CPU ones pinned to what loads together."""
    found = HeaderParser().parsestr(upstream).get_all("Requires-Dist") or []
    return list(dict.fromkeys(pin_cpu(r) if variant == "cpu" else r for r in found))


def torch(upstream: str, variant: str) -> str:
    return next(r for r in requirements(upstream, variant) if requirement_name(r) == "torch")


def vllm_metadata(upstream: str, pins: Pins, variant: str) -> str:
    """Upstream's METADATA under our version, with our text; licences and extras are kept."""
    headers = HeaderParser().parsestr(upstream)
    lines = [
        "Metadata-Version: 2.4",
        "Name: vllm",
        f"Version: {version(pins, variant)}",
        f"Summary: {SUMMARY.format(version=pins.version)}",
        "Author: the s4kv-vllm maintainers, on the work of the vLLM Team",
    ]
    required = iter(requirements(upstream, variant))
    seen: set[str] = set()
    for key, value in headers.items():
        if key in (*DROPPED, "Metadata-Version", "Name", "Version", "Dynamic"):
            continue
        if key == "Requires-Dist":
            if "requires" not in seen:
                lines += [f"Requires-Dist: {r}" for r in required]
                seen.add("requires")
        elif key == "License-File":
            lines += [f"License-File: {n}" for n in ("LICENSE", "s4kv/LICENSE", "s4kv/NOTICE")]
        else:
            lines.append(f"{key}: {value}")
    return "\n".join(lines) + "\n\n" + description()


def alias_metadata(pins: Pins, variant: str) -> str:
    ours = version(pins, variant)
    lines = [
        "Metadata-Version: 2.4",
        "Name: s4kv-vllm",
        f"Version: {ours}",
        f"Summary: {SUMMARY.format(version=pins.version)}",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "License-File: NOTICE",
        "Requires-Python: <3.15,>=3.10",
        f"Requires-Dist: vllm=={ours}",
        "Provides-Extra: model",
        "Requires-Dist: gguf>=0.17; extra == 'model'",
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + description()


def description() -> str:
    return (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""


def wheel_file(tag: str, *, pure: bool) -> str:
    root = "true" if pure else "false"
    return f"Wheel-Version: 1.0\nGenerator: s4kv-vllm\nRoot-Is-Purelib: {root}\nTag: {tag}\n"


def entry_points(upstream: str) -> str:
    """Upstream's, and ours in their groups."""
    for head, line in ENTRY_POINTS.items():
        if f"{head}\n" not in upstream:
            raise ValueError(f"upstream's entry_points.txt has no {head}")
        upstream = upstream.replace(f"{head}\n", f"{head}\n{line}\n", 1)
    return upstream


def version_module(pristine: str, pins: Pins, variant: str) -> str:
    """vllm/_version.py with our version, so that it says what the metadata says."""
    numbers = ", ".join(pins.version.split("."))
    ours = f"({numbers}, '{local_version(pins, variant)}')"
    for old, new in (
        (f"version = '{pins.version}'", f"version = '{version(pins, variant)}'"),
        (f"version_tuple = ({numbers})", f"version_tuple = {ours}"),
    ):
        if old not in pristine:
            raise ValueError(f"vllm/_version.py has no {old!r}")
        pristine = pristine.replace(old, new)
    return pristine
