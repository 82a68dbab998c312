#!/usr/bin/env python3
"""Build the complete vllm wheel and its alias s4kv-vllm into dist/.

The pinned upstream wheel of the variant gives the binaries, vllm/src the Python, s4kv_ext the
rest. Same inputs, same bytes. Nothing is built where dist/ already holds the wheel of the inputs.

examples:
  build/wheel.py cpu
  build/wheel.py cuda
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from hashlib import sha256
from pathlib import Path

import metadata
import native
from apply import apply
from archive import Base, Wheel
from common import DIST, ROOT, SRC, TREE, Pins, digest, git, locked, main, pins, say
from fetch import fetch

EXT = ROOT / "s4kv_ext"
LICENSES = ("LICENSE", "NOTICE")
RECIPE = ("archive.py", "metadata.py", "native.py", "wheel.py")


def tracked() -> dict[str, Path]:
    """The Python package of the checkout, by name in the wheel."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "vllm", cwd=SRC)
    return {n: SRC / n for n in names.split("\0") if n and (SRC / n).is_file()}


def patched() -> list[str]:
    """Files of vllm/ that differ from the pristine ones."""
    names = git("diff", "--name-only", "-z", "--no-renames", "pristine", "--", "vllm", cwd=SRC)
    return sorted(n for n in names.split("\0") if n)


def extension() -> dict[str, Path]:
    """Our package without what only builds it."""
    kept = (p for p in EXT.rglob("*") if p.suffix in (".py", ".json", ".typed", ".j2"))
    skip = {"csrc", "__pycache__"}
    return {str(p.relative_to(ROOT)): p for p in kept if not skip & set(p.relative_to(EXT).parts)}


def platform_tag(base: Path, library: bytes) -> str:
    """Upstream's, unless our library asks for a newer C library than that promises."""
    tag = base.stem.split("-")[-1]
    promised = int(re.search(r"manylinux_2_(\d+)", tag)[1])  # type: ignore[index]
    needed = max((int(n) for n in re.findall(rb"GLIBC_2\.(\d+)", library)), default=0)
    if needed > promised:
        say(f"warning: only systems with glibc 2.{needed} can install this: build on an older one")
    return tag.replace(f"_2_{promised}_", f"_2_{max(needed, promised)}_")


def inputs(variant: str) -> str:
    """One hash of everything that the wheel is made from and that may change."""
    h = sha256(f"{variant} {native.sources_digest(variant)}".encode())
    files = extension() | {n: SRC / n for n in patched()}
    files |= {n: ROOT / n for n in ("README.md", "vllm/pin.toml", *LICENSES)}
    files |= {n: ROOT / "build" / n for n in RECIPE}
    for name in sorted(files):
        data = files[name].read_bytes() if files[name].is_file() else b"absent"
        h.update(f"{name} {len(data)} ".encode() + data)
    return h.hexdigest()


def names(p: Pins, variant: str) -> tuple[str, str]:
    """The stems of the two file names, without tags."""
    v = metadata.version(p, variant)
    return f"vllm-{v}", f"s4kv_vllm-{v}"


def build_info(p: Pins, variant: str, torch: str, files: dict[str, bytes]) -> bytes:
    """s4kv_ext/_build.json: what the installed product checks itself against."""
    info = {
        "version": metadata.version(p, variant),
        "variant": variant,
        "torch": torch.partition("==")[2],
        "pins": {k: f.sha256 for k, f in p.files.items() if k in ("source", variant)},
        "files": {n: sha256(data).hexdigest() for n, data in sorted(files.items())},
    }
    return (json.dumps(info, indent=1) + "\n").encode()


def write_vllm(p: Pins, variant: str) -> Path:
    base_path = fetch(p.files[variant])
    base = Base(base_path)
    upstream = base.text("METADATA")
    torch = metadata.torch(upstream, variant)
    library = native.build(variant, torch)
    binary = library.read_bytes() if library else b""
    tag = f"{metadata.PYTHON_TAG}-{platform_tag(base_path, binary)}"
    stem, _ = names(p, variant)

    ours = {n: path.read_bytes() for n, path in extension().items()}
    if library:
        ours[f"s4kv_ext/{library.name}"] = binary
    source = tracked()
    gone = set(patched()) - set(source)
    changed = {n: source[n].read_bytes() for n in patched() if n in source}
    changed["vllm/_version.py"] = metadata.version_module(
        source["vllm/_version.py"].read_text(), p, variant
    ).encode()
    info = build_info(p, variant, torch, ours | changed)
    # Where the base's Python is not the source's (the CPU wheel's platform detection), the source's
    # counts. CRC and size tell: a member that is equal is copied as it lies in the base.
    for name, path in source.items():
        if name not in changed and not same(base, name, path):
            changed[name] = path.read_bytes()
    ours["s4kv_ext/_build.json"] = info

    DIST.mkdir(exist_ok=True)
    dist_info = f"{stem}.dist-info"
    with Wheel(DIST / f"{stem}-{tag}.whl", dist_info) as wheel:
        copied = {n for n in base.members if n.startswith("vllm/")} - set(changed) - gone
        data = changed | ours
        for name in sorted(copied | set(data)):
            if name in data:
                old = base.members.get(name)
                wheel.add(
                    name, data[name], executable=bool(old and old.external_attr >> 16 & 0o100)
                )
            else:
                wheel.copy(base, name)
        wheel.add(f"{dist_info}/METADATA", metadata.vllm_metadata(upstream, p, variant).encode())
        wheel.add(f"{dist_info}/WHEEL", metadata.wheel_file(tag, pure=False).encode())
        wheel.add(
            f"{dist_info}/entry_points.txt",
            metadata.entry_points(base.text("entry_points.txt")).encode(),
        )
        wheel.add(f"{dist_info}/licenses/LICENSE", base.text("licenses/LICENSE").encode())
        for name in LICENSES:
            wheel.add(f"{dist_info}/licenses/s4kv/{name}", (ROOT / name).read_bytes())
        wheel.add(f"{dist_info}/top_level.txt", b"s4kv_ext\nvllm\n")
        return wheel.close()


def same(base: Base, name: str, path: Path) -> bool:
    member = base.members.get(name)
    if member is None or member.file_size != path.stat().st_size:
        return False
    return zlib.crc32(path.read_bytes()) == member.CRC


def write_alias(p: Pins, variant: str) -> Path:
    _, stem = names(p, variant)
    dist_info = f"{stem}.dist-info"
    with Wheel(DIST / f"{stem}-py3-none-any.whl", dist_info) as wheel:
        wheel.add("s4kv_guard.py", (EXT / "install_check.py").read_bytes())
        wheel.add(f"{dist_info}/METADATA", metadata.alias_metadata(p, variant).encode())
        wheel.add(f"{dist_info}/WHEEL", metadata.wheel_file("py3-none-any", pure=True).encode())
        wheel.add(f"{dist_info}/entry_points.txt", metadata.ALIAS_ENTRY_POINTS.encode())
        for name in LICENSES:
            wheel.add(f"{dist_info}/licenses/{name}", (ROOT / name).read_bytes())
        return wheel.close()


def built(p: Pins, variant: str) -> list[Path]:
    """The two wheels in dist/, as far as they are there."""
    return [found for stem in names(p, variant) for found in sorted(DIST.glob(f"{stem}-*.whl"))]


def build(variant: str) -> list[Path]:
    """The paths of the complete wheel and the alias, built if an input changed."""
    apply(keep=True)
    p = pins()
    TREE.mkdir(exist_ok=True)
    with locked(TREE / f".{variant}.lock"):
        stamp = TREE / f"{variant}.wheel"
        wanted, have = inputs(variant), built(p, variant)
        if len(have) == 2 and stamp.exists() and stamp.read_text() == wanted:
            return have
        stamp.unlink(missing_ok=True)
        for old in have:
            old.unlink()
        say(f"building the {variant} wheel")
        made = [write_vllm(p, variant), write_alias(p, variant)]
        stamp.write_text(wanted)
    for path in made:
        tell(path)
    return made


def tell(path: Path) -> None:
    """Name, size and hash of a file that was made."""
    say(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB, sha256 {digest(path)}")


def variant_asked(doc: str | None) -> str:
    """The variant on the command line of a script that `doc` describes."""
    ap = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("variant", choices=("cpu", "cuda"))
    return ap.parse_args().variant


def run() -> None:
    build(variant_asked(__doc__))


if __name__ == "__main__":
    main(run)
