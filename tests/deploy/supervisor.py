"""As much of systemd as s4kv.service leans on, for machines where systemd does not run.

It runs the unit's own ExecStart with its Environment, listens for READY and WATCHDOG, ends the
main process and what is left of its group, and starts it again. The sandbox and the back-off are
systemd's own and not imitated.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil


class Supervisor:
    """`env` is what the environment file would set; `replace` changes the unit's text."""

    def __init__(
        self, unit: str, env: dict[str, str], folder: Path, watchdog: float, abort: float
    ) -> None:
        self.command, self.env = parse(unit, env)
        self.watchdog, self.abort, self.log = watchdog, abort, folder / "journal"
        address = str(folder / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.env |= {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(watchdog * 1e6))}
        self.starts: list[int] = []  # the main process of each
        self.ends: list[str] = []  # why each of them ended
        self.ready = threading.Event()
        self.stopping = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.stopping:
            self._once()
            time.sleep(1)

    def _once(self) -> None:
        with self.log.open("a") as log:
            main = subprocess.Popen(
                self.command, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.starts.append(main.pid)
        seen: set[psutil.Process] = set()
        heard, why = time.monotonic(), ""
        self.socket.settimeout(0.5)
        while main.poll() is None:
            seen |= set(children(main.pid))
            try:
                told = self.socket.recv(4096).decode().split("\n")
            except TimeoutError:
                told = []
            if "WATCHDOG=1" in told:
                heard = time.monotonic()
            if "READY=1" in told:
                self.ready.set()
            if self.ready.is_set() and time.monotonic() - heard > self.watchdog:
                why = "watchdog"
                main.send_signal(signal.SIGABRT)
                try:
                    main.wait(self.abort)
                except subprocess.TimeoutExpired:
                    main.kill()
        self.ready.clear()
        self.ends.append(why or f"status {main.wait()}")
        for process in seen:  # KillMode=mixed: what is left is killed
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(seen, 10)

    def engine(self) -> psutil.Process:
        """The engine's process; the front end is its parent."""
        found = [p for p in children(self.starts[-1]) if "EngineCore" in command(p)]
        assert len(found) == 1, found
        return found[0]

    def terminate(self) -> None:
        """As `systemctl stop` begins: no restart after this."""
        self.stopping = True
        os.kill(self.starts[-1], signal.SIGTERM)

    def stop(self) -> None:
        self.stopping = True
        while self.thread.is_alive():
            for pid in self.starts[-1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.thread.join(0.5)
        self.socket.close()


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> str:
    """Its words; nothing of one that ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def parse(unit: str, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """ExecStart's words and the environment, with variables put in as systemd does."""
    text = unit.replace("\\\n", " ")
    for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE):
        env = dict(word.split("=", 1) for word in shlex.split(line)) | env
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words: list[str] = []
    for word in shlex.split(line):
        if re.fullmatch(r"\$\w+", word):
            words += shlex.split(env[word[1:]])
        else:
            word = re.sub(r"\$\{(\w+)\}", lambda m: env[m[1]], word)
            words.append(word.replace("$$", "$"))
    return words, env
