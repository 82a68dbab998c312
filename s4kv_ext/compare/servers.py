"""`vllm serve` processes: started on a free port of this machine, watched, and ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from s4kv_ext.compare.client import Client, Gone
from s4kv_ext.compare.sides import Side

TAIL = 12
ERROR = re.compile(r"\b\w*(Error|Exception|Unsupported): ")
GRACE = 30.0


class Died(Exception):
    """A server ended or never became ready; the message has the last lines of its log."""


def vllm() -> str:
    """The `vllm` of this installation."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if not found:
        raise FileNotFoundError("no command vllm beside this Python: install the wheel into it")
    return found


def environment() -> dict[str, str]:
    """For servers and benchmarks: no usage statistics, no proxy on the way to this machine, and
    /server_info, by which the sides are checked to be equal."""
    local = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    return os.environ | local | {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def tail(log: Path, start: int = 0) -> str:
    """The last lines of a log, and before them the first error, which is mostly their cause."""
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
        first = next((i for i, x in enumerate(lines) if ERROR.search(x)), len(lines))
        cause = [lines[first], "…"] if first < len(lines) - TAIL else []
        return "\n".join(cause + lines[-TAIL:])
    return ""


class Running:
    """A server that somebody else started."""

    def __init__(self, side: Side) -> None:
        assert side.url
        self.side = side
        self.client = Client(side.url)

    def wait(self, seconds: float) -> None:
        if not self.client.healthy():
            raise Died(f"{self.client.url} does not answer /health")

    def died(self, reason: str) -> Died:
        return Died(f"{reason}; its log is where it was started")

    def log_text(self) -> str:
        return ""

    def stop(self) -> None:
        """It is not ours to end."""


class Started:
    """A server of our own, in a process group of its own: Ctrl-C here is not for it."""

    def __init__(self, side: Side, model: str, arguments: list[str], log: Path) -> None:
        self.side, self.log = side, log
        port = free_port()
        self.client = Client(f"http://127.0.0.1:{port}")
        command = [vllm(), "serve", model, *arguments, *side.flags]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self.start = out.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise self.died("it ended before it was ready")
            with contextlib.suppress(Gone):
                if self.client.get("/health", 5).ok:
                    return
            time.sleep(0.5)
        raise self.died(f"it was not ready in {seconds:.0f} s (--start-timeout)")

    def died(self, reason: str) -> Died:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)  # an engine that failed takes its server down in a moment
        status = self.process.poll()
        ended = "" if status is None else f", exit status {status}"
        return Died(f"{reason}{ended}; the last lines of {self.log}:\n{tail(self.log, self.start)}")

    def log_text(self) -> str:
        with self.log.open("rb") as f:
            f.seek(self.start)
            return f.read().decode(errors="replace")

    def stop(self) -> None:
        """SIGTERM to the server, SIGKILL to what is left of its group."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Server = Started | Running
