"""Compile s4kv_ext/csrc for a variant, against the torch that the wheel pins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import env
from common import ROOT, TREE, Stop, digest, locked, say

CSRC = ROOT / "s4kv_ext" / "csrc"
CUDA = "/usr/local/cuda/bin"  # where the toolkit's own installer puts nvcc
SOURCES = {"cpu": CSRC, "cuda": CSRC / "cuda"}


def compiler() -> str:
    found = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if found is None:
        raise Stop("no C++ compiler: install g++ (Debian, Ubuntu: apt-get install g++)")
    return found


def nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which("nvcc", path=f"{os.environ['PATH']}:{CUDA}")


def torch_python(torch: str) -> Path:
    """An environment with torch's headers; uv links it to .venv's copy, so it costs little."""
    path = TREE / "torch"
    python = path / "bin" / "python"
    done = path / "done"
    if not done.exists() or done.read_text() != torch:
        env.need_disk(2e9)
        say(f"getting the headers of {torch}")
        env.make_venv(path)
        env.uv("pip", "install", "-q", "--no-deps", torch, "typing_extensions", python=python)
        done.write_text(torch)
    return python


def sources_digest(variant: str) -> str:
    """Of the sources of the variant's library; GPU kernels lie in a folder of their own."""
    h = sha256(variant.encode())
    both = CSRC / "compat.cpp"
    for path in sorted({both, *(p for p in SOURCES[variant].rglob("*") if p.is_file())}):
        if variant == "cpu" and "cuda" in path.relative_to(CSRC).parts:
            continue
        h.update(str(path.relative_to(CSRC)).encode() + b"\0" + path.read_bytes())
    return h.hexdigest()


def compilers(variant: str) -> list[str]:
    """CMake's choice of compilers; a missing one is one clear line."""
    options = [f"-DCMAKE_CXX_COMPILER={compiler()}"]
    if variant == "cuda":
        if (found := nvcc()) is None:
            raise Stop("no CUDA compiler: install nvcc 13.0 and put it on PATH, or set CUDACXX")
        options.append(f"-DCMAKE_CUDA_COMPILER={found}")
    return options


def build(variant: str, torch: str) -> Path:
    """The library, compiled where its sources changed."""
    name = f"libs4kv_{variant}.so"
    out = ROOT / "s4kv_ext" / name  # in the tree, so that the tree can be imported as it is
    stamp = TREE / f"{variant}.native"
    wanted = f"{sources_digest(variant)} {digest(Path(__file__))} {torch}"
    if out.exists() and stamp.exists() and stamp.read_text() == wanted:
        return out
    options = compilers(variant)
    say(f"compiling the {variant} kernels" + (" (a minute)" if variant == "cuda" else ""))
    with fixed_folder(sources_digest(variant)) as folder:
        made = compile_in(folder, variant, options, torch)
        part = out.with_suffix(".part")
        shutil.copyfile(made, part)
    part.replace(out)
    stamp.write_text(wanted)
    return out


@contextmanager
def fixed_folder(name: str) -> Iterator[Path]:
    """Of one name on every machine, for nvcc puts a hash of a source's path into symbols."""
    place = Path("/tmp") / f"s4kv-{name[:16]}"
    with locked(Path("/tmp") / f"s4kv-{os.getuid()}.lock"):  # whatever cache a run uses
        if place.is_dir() and not place.is_symlink() and place.stat().st_uid == os.getuid():
            shutil.rmtree(place)  # of a build that was ended
        try:
            place.mkdir(mode=0o700)
        except FileExistsError:
            raise Stop(f"{place} is somebody else's: wait for their build, or remove it") from None
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def compile_in(folder: Path, variant: str, options: list[str], torch: str) -> Path:
    """The library, from a copy of the sources in `folder`."""
    shutil.copytree(CSRC, folder / "csrc")
    source, build = folder / SOURCES[variant].relative_to(CSRC.parent), folder / "build"
    tools = env.tools()
    python = torch_python(torch)
    torch_dir = next(path for path in (python.parent.parent / "lib").glob("*/site-packages/torch"))
    torch_dir = torch_dir.resolve()  # as the compiler names it, so that it can leave the path out
    # Nothing of this machine in the library: same inputs, same bytes.
    pairs = ((folder, "."), (torch_dir, "torch"))
    maps = [f"-ffile-prefix-map={path}={short}" for path, short in pairs]
    flags = {"CXX": " ".join(maps)}
    if variant == "cuda":
        flags["CUDA"] = " ".join(f"-Xcompiler={m}" for m in maps)
        # nvcc names its temporary files in the symbols.
        options = [*options, "-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--strip-all"]
    env.call(
        [
            *(tools / "cmake", "-S", source, "-B", build, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
            *options,
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DTORCH_DIR={torch_dir}",
            *(f"-DCMAKE_{language}_FLAGS={value}" for language, value in flags.items()),
            "--log-level=WARNING",
        ]
    )
    env.call([tools / "cmake", "--build", build])
    made = next(iter(build.rglob(f"libs4kv_{variant}.so")), None)
    if made is None:
        raise Stop(
            f"the build of {SOURCES[variant].relative_to(ROOT)} made no libs4kv_{variant}.so"
        )
    return made
