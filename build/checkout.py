"""The patched checkout and the series: the one place that knows how they become each other."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from hashlib import sha256
from pathlib import Path

from common import PATCHES, PIN, SRC, TREE, Pins, Stop, git, pins
from fetch import fetch

KEPT = ("vllm", "tests", "requirements", "pyproject.toml", "LICENSE")  # of the source archive
EPOCH = "2026-01-01T00:00:00+00:00"  # any fixed time: commits must not depend on the clock
WHO = {
    "GIT_AUTHOR_NAME": "s4kv-vllm",
    "GIT_AUTHOR_EMAIL": "s4kv-vllm@localhost",
    "GIT_AUTHOR_DATE": EPOCH,
    "GIT_COMMITTER_NAME": "s4kv-vllm",
    "GIT_COMMITTER_EMAIL": "s4kv-vllm@localhost",
    "GIT_COMMITTER_DATE": EPOCH,
}
FIXES = "fixes"  # the folder in patches/ of what mends a fault of vLLM's own
MENDS = re.compile(r"^Upstream: \S", re.M)  # the line of its message that says so
APPLIED = "s4kv-applied"  # in .git: the series and the commit that the last apply or refresh saw


def series() -> list[str]:
    path = PATCHES / "series"
    lines = path.read_text().splitlines() if path.exists() else []
    names = [n for line in lines if (n := line.split("#")[0].strip())]
    for name in names:
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise Stop(f"patches/series names {name}, which is outside of patches/")
        if not (PATCHES / name).is_file():
            raise Stop(f"patches/series names {name}, which is not in patches/")
    return names


def series_digest() -> str:
    """Of all that the checkout is made from."""
    h = sha256(repr(KEPT).encode() + PIN.read_bytes())
    for name in series():
        h.update(name.encode() + b"\0" + (PATCHES / name).read_bytes())
    return h.hexdigest()


def unpack(archive: Path, into: Path, version: str) -> None:
    """The pristine source: what we patch and the suites that come with it."""
    top = f"vllm-{version}/"
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(top)
            if name != member.name and name.split("/")[0] in KEPT:
                member.name = name
                try:
                    tar.extract(member, into, filter="data")
                except tarfile.FilterError as e:  # a path or a link to outside of `into`
                    raise Stop(f"{archive} is not to be unpacked: {e}") from None


def make(into: Path, *, names: list[str] | None = None, p: Pins | None = None) -> None:
    """A fresh checkout in the empty folder `into`: one commit for vLLM, one for each patch."""
    p = p or pins()
    unpack(fetch(p.files["source"]), into, p.version)
    git("init", "-q", "-b", "s4kv", cwd=into)
    for key, value in (
        ("core.autocrlf", "false"),
        ("user.name", WHO["GIT_AUTHOR_NAME"]),
        ("user.email", WHO["GIT_AUTHOR_EMAIL"]),
        ("gc.auto", "0"),
    ):
        git("config", key, value, cwd=into)
    (into / ".git" / "info" / "exclude").write_text("__pycache__/\n*.pyc\n.pytest_cache/\n")
    git("add", "-A", "-f", cwd=into)
    git("commit", "-q", "-m", f"vllm {p.version}", cwd=into, **WHO)
    git("tag", "pristine", cwd=into)
    for name in series() if names is None else names:
        try:
            git(
                *("am", "-q", "--no-3way", "--keep-non-patch", "--committer-date-is-author-date"),
                str(PATCHES / name),
                cwd=into,
                **{
                    k: v
                    for k, v in WHO.items()
                    if k.startswith("GIT_COMMITTER_") and "DATE" not in k
                },
            )
        except Stop as e:
            raise Stop(f"{name} does not apply to the pristine vllm {p.version}: {e}") from e


def message(patch: Path) -> str:
    """The commit message: all before the diff."""
    return re.split(r"^diff --git ", patch.read_text(), maxsplit=1, flags=re.M)[0]


def patch_files() -> list[str]:
    """What lies in patches/, as the series names it."""
    return sorted(p.relative_to(PATCHES).as_posix() for p in PATCHES.rglob("*.patch"))


def export(src: Path, into: Path) -> list[str]:
    """Write the commits above `pristine` as patches into `into`; their names in order."""
    git(
        *("format-patch", "-q", "--zero-commit", "--no-signature", "--no-numbered", "--no-stat"),
        *("--no-renames", "--full-index", "--diff-algorithm=myers", "--no-base", "--unified=3"),
        *("--filename-max-length=64", "-o", str(into), "pristine..HEAD"),
        cwd=src,
    )
    names: list[str] = []
    for path in sorted(into.glob("*.patch")):
        folder = f"{FIXES}/" if MENDS.search(message(path)) else ""
        # Numbered in its folder, so that a patch more in the one renames none in the other.
        number = 1 + sum(n.startswith(f"{FIXES}/") == bool(folder) for n in names)
        name = f"{folder}{number:04}{path.name[4:]}"
        (into / name).parent.mkdir(exist_ok=True)
        path.rename(into / name)
        names.append(name)
    return names


def head(src: Path = SRC) -> str:
    return git("rev-parse", "HEAD", cwd=src).strip()


def note_applied(src: Path = SRC) -> None:
    (src / ".git" / APPLIED).write_text(f"{series_digest()} {head(src)}\n")


def local_edits(src: Path = SRC) -> str:
    """What a new apply would lose, in words; empty where it would lose nothing."""
    if not (src / ".git").exists():
        return ""
    if git("status", "--porcelain", cwd=src).strip():
        return "changes that are not committed"
    note = src / ".git" / APPLIED
    if note.exists() and note.read_text().split()[1] == head(src):
        return ""
    with tempfile.TemporaryDirectory() as tmp:
        names = export(src, Path(tmp))
        if names == series() and all(
            (Path(tmp) / n).read_bytes() == (PATCHES / n).read_bytes() for n in names
        ):
            return ""
    return "commits that are not in patches/ (make refresh writes them there)"


def current(src: Path = SRC) -> bool:
    """Whether the checkout stems from the series and the pin as they are now."""
    note = src / ".git" / APPLIED
    return note.exists() and note.read_text().split()[0] == series_digest()


def renew() -> None:
    """Replace vllm/src by a fresh checkout; the old one stays until the new one is whole."""
    TREE.mkdir(exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="src-", dir=TREE))
    old = fresh.with_name(f"{fresh.name}-old")
    try:
        make(fresh)
        note_applied(fresh)
        fresh.chmod(0o755)
        if SRC.exists():  # in one step: half of a tree would be taken for somebody's edits
            SRC.rename(old)
        fresh.rename(SRC)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
