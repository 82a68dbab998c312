"""A plain Debian with systemd, in a container of its own, to try on it what runs on an instance.

It needs root, mmdebstrap, systemd-nspawn and Debian's packages; elsewhere the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # by the Python that they have
# What deploy/machine/install.sh asks for too: it then finds it there, and takes seconds.
PACKAGES = (
    *("ca-certificates", "curl", "dbus", "g++", "libnuma1", "logrotate", "nginx", "openssl"),
    *("python3", "python3-dev", "python3-venv", "systemd", "systemd-sysv", "zstd"),
)


def need() -> str:
    """The suite to make, or a skip that says what is missing."""
    suite = SUITES.get(sys.version_info[:2])
    if os.geteuid() != 0:
        pytest.skip("not root: a machine of its own cannot be made")
    for program in ("mmdebstrap", "systemd-nspawn"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt-get install mmdebstrap systemd-container zstd")
    if suite is None:
        pytest.skip("no Debian has this Python: the packages of .venv would not load there")
    return suite


def make(folder: Path, cache: Path) -> None:
    """Unpack the root in `folder`; it is made once and kept in `cache`."""
    suite = need()
    name = sha256(" ".join([suite, *PACKAGES]).encode()).hexdigest()[:12]
    archive = cache / f"root-{suite}-{name}.tar.zst"
    if not archive.exists():
        made = archive.with_name(f"{os.getpid()}-{archive.name}")
        wanted = f"--include={','.join(PACKAGES)}"
        done = subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", wanted, suite, made],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            made.unlink(missing_ok=True)
            pytest.skip(f"no Debian can be made here: {done.stderr.strip()[-300:]}")
        for old in cache.glob(f"root-{suite}-*"):
            old.unlink()
        made.rename(archive)
    folder.mkdir(parents=True)
    subprocess.run(["tar", "--zstd", "-xf", archive, "-C", folder], check=True)


class Machine:
    """The root, switched off: `chroot` runs a command in it, with the host's network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.leader = folder, 0
        self.nspawn: subprocess.Popen | None = None
        self.binds: dict[Path, str] = {}  # folders of the host, for reading

    def path(self, inside: str) -> Path:
        return self.folder / inside.lstrip("/")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def read(self, inside: str) -> str:
        return self.path(inside).read_text()

    def _nspawn(self, *options: str) -> list[str]:
        always = ("--quiet", "--register=no", "--keep-unit", "--console=pipe")
        binds = (f"--bind-ro={host}:{inside}" for host, inside in self.binds.items())
        return ["systemd-nspawn", *always, *binds, "-D", str(self.folder), *options]

    def chroot(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        proxies = {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
        settings = [f"--setenv={k}={v}" for k, v in (proxies | env).items()]
        return self._run(*self._nspawn(*settings), *command)

    def switch_on(self) -> None:
        """Boot, with a loopback network of its own."""
        self.nspawn = subprocess.Popen(
            self._nspawn("--private-network", "--boot"),
            stdin=subprocess.DEVNULL,
            stdout=self.path("../console").open("w"),
            stderr=subprocess.STDOUT,
        )
        children = Path(f"/proc/{self.nspawn.pid}/task/{self.nspawn.pid}/children")
        end = time.monotonic() + 30
        while time.monotonic() < end and self.nspawn.poll() is None:
            if pids := children.read_text().split():
                self.leader = int(pids[0])
                state = self.run("systemctl", "is-system-running")
                if state.stdout.strip() in ("running", "degraded"):
                    return
            time.sleep(0.2)
        pytest.skip(f"systemd does not run here: {self.path('../console').read_text()[-300:]}")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command on the running machine."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return self._run("nsenter", "-t", str(self.leader), "-a", "env", "-i", path, *command)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )

    def switch_off(self) -> None:
        if self.nspawn is None:
            return
        if self.leader and self.nspawn.poll() is None:
            os.kill(self.leader, signal.SIGKILL)  # and with it all that runs there
        else:
            self.nspawn.terminate()
        self.nspawn.wait(30)
        self.nspawn, self.leader = None, 0
