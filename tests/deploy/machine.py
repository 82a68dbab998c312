"""The proxy of deploy/machine, as its unit runs it, before an engine that the test gives."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

MACHINE = Path(__file__).parents[2] / "deploy" / "machine"
KEY = "k3y." + "A-b_c~d+e/f=" * 4


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def change(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


class Proxy:
    """nginx with the shipped configuration: only addresses and folders are other ones."""

    def __init__(self, nginx: str, engine: int, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.url = f"http://127.0.0.1:{self.port}"
        text = (MACHINE / "nginx.conf").read_text()
        text = change(text, "/run/s4kv-proxy", str(folder))
        text = change(text, "server 127.0.0.1:8000;", f"server 127.0.0.1:{engine};")
        text = change(text, "listen 8080;", f"listen 127.0.0.1:{self.port};")
        text = change(
            text, "syslog:server=unix:/dev/log,nohostname,tag=s4kv_proxy", f"{folder}/log"
        )
        (folder / "nginx.conf").write_text(text)
        key_file = folder / "api-key"
        key_file.write_text(f"{KEY}\n")
        subprocess.run([MACHINE / "proxy_key.py", key_file, folder / "key.conf"], check=True)
        key_file.unlink()  # nginx must not need it
        user = ["-g", "user root;"] if os.geteuid() == 0 else []  # else the workers are nobody
        self.process = subprocess.Popen(
            [nginx, "-e", "stderr", "-c", folder / "nginx.conf", *user],
            stderr=(folder / "errors").open("w"),
        )
        for _ in range(100):
            if self.process.poll() is not None:
                raise RuntimeError((folder / "errors").read_text())
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError("nginx does not listen")

    def lines(self, count: int = 0) -> list[dict[str, Any]]:
        """The log, as soon as it has so many lines. Its two processes do not wait for each other,
        so the order may differ from that of the requests."""
        for _ in range(100):
            lines = (self.folder / "log").read_text().splitlines()
            if len(lines) >= count:
                break
            time.sleep(0.05)
        return [json.loads(x) for x in lines]

    def written(self) -> str:
        """All that it wrote, the configuration of the key included."""
        return "".join((self.folder / n).read_text() for n in ("log", "errors", "key.conf"))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def send(port: int, request: bytes, timeout: float = 10) -> bytes:
    """The whole answer to bytes that no client library has tidied."""
    with socket.create_connection(("127.0.0.1", port), timeout) as s:
        s.sendall(request)
        answer = b""
        while not _whole(answer) and (piece := s.recv(1 << 16)):
            answer += piece
    return answer


def _whole(answer: bytes) -> bool:
    """nginx waits for the rest of a request that it refused; an answer's length tells its end."""
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"\r\nContent-Length: (\d+)", head)
    return bool(end and length) and len(body) >= int(length[1])


def request(path: str, key: str | None = None, method: str = "GET", extra: str = "") -> bytes:
    """One HTTP/1.1 request. `extra` is whole header lines."""
    auth = f"Authorization: {key}\r\n" if key is not None else ""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{auth}{extra}\r\n"
    ).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
