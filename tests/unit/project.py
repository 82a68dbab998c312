"""A copy of the build scripts with a small upstream of its own, for tests of the scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = "".join(f"line {i}\n" for i in range(40))
MESSAGE = "Change a line\n\nWhy: the test needs it.\nUntil: the test ends.\n"


class Project:
    """A copy of the scripts with a pin to a source archive of two files."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, root / "cache"
        shutil.copytree(ROOT / "build", root / "build")
        (root / "vllm").mkdir()
        self.cache.mkdir()
        archive, digest = self.archive("9.9", {"vllm/a.py": LINES, "csrc/no.cu": "not kept"})
        pin = f'project = "vllm"\nfile = "{archive.name}"\nsha256 = "{digest}"\n'
        (root / "vllm" / "pin.toml").write_text(
            'version = "9.9"\nrevision = 1\n'
            + "".join(f"[{t}]\n{pin}" for t in ("source", "wheel.cpu", "wheel.cuda", "model"))
        )
        self.src, self.patches = root / "vllm" / "src", root / "patches"

    def archive(self, version: str, files: dict[str, str]) -> tuple[Path, str]:
        """The source of an upstream release, in the cache, and its sha256."""
        path = self.cache / f"vllm-{version}.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, text in {"tests/t.py": "x = 1\n", **files}.items():
                info = tarfile.TarInfo(f"vllm-{version}/{name}")
                info.size = len(text)
                tar.addfile(info, BytesIO(text.encode()))
        return path, sha256(path.read_bytes()).hexdigest()

    def run(self, script: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.root / "build" / f"{script}.py"), *args],
            env=os.environ | {"S4KV_CACHE": str(self.cache)},
            capture_output=True,
            text=True,
            check=False,
        )

    def good(self, script: str, *args: str) -> str:
        done = self.run(script, *args)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def bad(self, script: str, *args: str) -> str:
        done = self.run(script, *args)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    def git(self, *args: str) -> str:
        return subprocess.check_output(["git", *args], cwd=self.src, text=True).strip()

    def change(self, line: int, message: str = MESSAGE, word: str = "changed") -> None:
        path = self.src / "vllm" / "a.py"
        text = re.sub(rf"^\w+ {line}$", f"{word} {line}", path.read_text(), flags=re.M)
        path.write_text(text)
        self.git("commit", "-qam", message)
