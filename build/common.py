"""What the build scripts share: where things lie, the pins, and how errors are told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(
        f"s4kv: Python 3.11 or later is needed, this is {sys.version.split()[0]}: "
        "make PYTHON=python3.12 ..."
    )

import tomllib

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "vllm" / "src"
PATCHES = ROOT / "patches"
DIST = ROOT / "dist"
TREE = ROOT / "build-tree"  # compiled parts, stamps, the tool environment; git-ignored
PIN = ROOT / "vllm" / "pin.toml"
NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"


class Stop(Exception):
    """An error the user can act on: printed as one line, without a stack trace."""


@dataclass(frozen=True)
class Pinned:
    project: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Pins:
    version: str
    revision: int
    files: dict[str, Pinned]  # by the name that `make fetch` and the scripts use


def pins() -> Pins:
    try:
        d = tomllib.loads(PIN.read_text(encoding="utf-8"))
        tables = {"source": d["source"], "model": d["model"], **d["wheel"]}
        p = Pins(d["version"], d["revision"], {k: Pinned(**v) for k, v in tables.items()})
        for key, pin in p.files.items():  # a name is a file's, not a way to one
            for field, form in (("project", NAME), ("file", NAME), ("sha256", "[0-9a-f]{64}")):
                if not re.fullmatch(form, value := getattr(pin, field)):
                    raise ValueError(f"{field} of {key} is {value[:100]!r}")
        if not re.fullmatch(NAME, p.version) or type(p.revision) is not int:
            raise ValueError("version or revision is none")
    except KeyError as e:
        raise Stop(f"{PIN} has no {e}; git checkout vllm/pin.toml brings it back") from None
    except (AttributeError, TypeError, ValueError) as e:  # TOML that is none, with its line
        raise Stop(f"{PIN}: {e}; git checkout vllm/pin.toml brings it back") from None
    return p


def cache_dir() -> Path:
    """Outside the tree, so that clones share it and `git clean` spares it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(os.environ.get("S4KV_CACHE") or Path(base) / "s4kv").expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise Stop(f"cannot make the cache folder {path}: {e.strerror}; set S4KV_CACHE") from e
    if not os.access(path, os.W_OK):
        raise Stop(f"cannot write into the cache folder {path}; set S4KV_CACHE to another")
    return path


def digest(path: Path) -> str:
    h = sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def say(text: str) -> None:
    print(f"s4kv: {text}", file=sys.stderr, flush=True)


@contextmanager
def locked(path: Path):
    """One process at a time; others wait, and say so."""
    import fcntl

    try:
        handle = path.open("a")
    except OSError as e:
        raise Stop(f"cannot write {path}: {e.strerror}") from e
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def git(*args: str, cwd: Path, **env: str) -> str:
    """git, deaf to the user's own configuration, so that the results depend on the inputs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    clean |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"} | env
    try:
        done = subprocess.run(("git", *args), cwd=cwd, env=clean, capture_output=True, check=False)
    except FileNotFoundError as e:
        raise Stop("git is not installed") from e
    if done.returncode:
        detail = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise Stop(f"git {args[0]} failed: {detail}")
    return done.stdout.decode()


def main(run: Callable[[], int | None]) -> None:
    """Run a script's main: errors are one line, Ctrl-C is quiet."""
    try:
        sys.exit(run() or 0)
    except Stop as e:
        sys.exit(f"s4kv: error: {e}")
    except OSError as e:
        sys.exit(f"s4kv: error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
