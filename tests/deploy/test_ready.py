"""`s4kv ready` against servers that answer, hang, refuse or are busy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from s4kv_ext import cli, ready

S4KV = Path(sys.executable).with_name("s4kv")
CLEAN = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}


class Engine(ThreadingHTTPServer):
    """The API's three routes that matter. `state` is up, hung, busy, empty or an HTTP status."""

    daemon_threads = False  # server_close() waits for each: none answers into a later test

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.state: str | int = "up"
        self.key = ""
        self.tokens = 0
        self.asked: list[dict] = []
        self.end = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """A client that gave up is what these tests are about; anything else is told as ever."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_) -> None:
        pass

    def say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            return self.say(401, "{}")
        if self.path == "/metrics":
            self.server.tokens += self.server.state == "busy"
            waiting = f"vllm:num_requests_waiting {time.monotonic()}\n"
            return self.say(200, f"{waiting}vllm:generation_tokens_total {self.server.tokens}\n")
        return self.say(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.state in ("hung", "busy"):
            self.server.end.wait(30)
        elif isinstance(self.server.state, int):
            return self.say(self.server.state, '{"error": {"message": "EngineCore died"}}')
        tokens = 0 if self.server.state == "empty" else 1
        return self.say(200, json.dumps({"usage": {"completion_tokens": tokens}}))


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    yield server
    server.end.set()
    server.shutdown()
    server.server_close()


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., Done]:
    """`s4kv ready` with arguments and variables, in this process: its imports are most of it."""

    def run(*args: object, **env: str) -> Done:
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["s4kv", "ready", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        code = end.value.code
        return Done(1, out, f"{err}{code}\n") if isinstance(code, str) else Done(code, out, err)

    return run


def test_one_token_is_asked_for(command, engine):
    done = command("--url", f"{engine.url}/v1/")
    assert done.returncode == 0 and done.stdout.startswith("ready: one token of m in 0.")
    assert [(x["model"], x["max_tokens"]) for x in engine.asked] == [("m", 1)]


@pytest.mark.parametrize("state", ["hung", "busy", "empty", 500, 404])
def test_not_ready(command, engine, state):
    engine.state = state
    start = time.monotonic()
    done = command("--url", engine.url, "--deadline", 1)
    assert done.returncode == 1 and done.stderr.startswith("s4kv: not ready: ") and not done.stdout
    assert done.stderr.count("\n") == 1 and engine.url in done.stderr
    assert time.monotonic() - start < 15
    if state == 500:
        assert "EngineCore died" in done.stderr


def test_nothing_listens_and_then_something_does(command, engine):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        done = command("--url", f"http://127.0.0.1:{port}", "--wait", 1)
    assert done.returncode == 1 and "cannot be reached" in done.stderr
    engine.state = 503
    threading.Timer(1, setattr, (engine, "state", "up")).start()
    assert command("--url", engine.url, "--wait", 20).returncode == 0


def test_the_key(command, engine, tmp_path):
    engine.key = "secret-key"
    file = tmp_path / "key"
    file.write_text("secret-key\n")
    assert command("--url", engine.url, "--key-file", file).returncode == 0
    assert command("--url", engine.url, VLLM_API_KEY="secret-key").returncode == 0
    start = time.monotonic()
    refused = command("--url", engine.url, "--wait", 60, VLLM_API_KEY="wrong-key")
    assert refused.returncode == 1 and time.monotonic() - start < 30  # waiting would not help
    assert "--key-file or VLLM_API_KEY" in refused.stderr and "wrong-key" not in refused.stderr


def test_wrong_commands(command, tmp_path):
    (tmp_path / "empty").touch()
    for args in (
        ("--url", "localhost:8000"),
        ("--key-file", tmp_path / "none"),
        ("--key-file", tmp_path / "empty"),
        ("--deadline", "0"),
        ("--wait", "long"),
    ):
        done = command(*args)
        assert done.returncode == 2 and done.stderr, args
        assert "Traceback" not in done.stderr
    told = command("--notify")
    assert told.returncode == 1 and "WatchdogSec=" in told.stderr


@pytest.mark.parametrize("key", ["", "sesame"])
def test_a_busy_engine_is_alive_and_a_hung_one_is_not(engine, key):
    """With a key, metrics need it too."""
    engine.key = key
    server = ready.Server(engine.url, key or None)
    assert "one token" in ready.alive(server, 2)
    engine.state = "busy"
    assert "busy" in ready.alive(server, 2)
    engine.state = "hung"  # requests arrive all the same, and are counted as waiting
    with pytest.raises(ready.NotReady):
        ready.alive(server, 2)


def test_systemd_is_told(engine, tmp_path):
    """READY at the first token only, then the watchdog while tokens come, and no longer."""
    engine.state = 503
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(20)
        env = CLEAN | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        process = subprocess.Popen(
            [S4KV, "ready", "--notify", "--url", engine.url], env=env, stderr=subprocess.PIPE
        )
        try:
            time.sleep(2)
            engine.state = "up"
            assert s.recv(1000) == b"READY=1\nWATCHDOG=1\nSTATUS=serving m"
            for _ in range(2):
                assert s.recv(1000).startswith(b"WATCHDOG=1\nSTATUS=one token in ")
            engine.state = "hung"
            s.settimeout(4)
            with pytest.raises(TimeoutError):
                while True:  # one may be on its way
                    assert b"one token" in s.recv(1000)
        finally:
            process.kill()
            assert process.stderr and b"not ready: no token" in process.stderr.read()
            process.wait()
