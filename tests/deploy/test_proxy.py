"""What reaches the engine through the proxy, and what is written down about it."""

from __future__ import annotations

import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import KEY, MACHINE, request, send, status

HERE = Path(__file__).parent
BEARER = f"Bearer {KEY}"
WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    KEY,
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    f"Bearer {KEY.upper()}",
    f"Bearer {KEY.lower()}",
    f"Bearer {KEY} x",
    f"Bearer  {KEY}",
    f"Basic {KEY}",
    "Bearer *",
    "Bearer $token",
]
PLAIN = ["/v1/models", "/v1/chat/completions", "/v1/responses/resp_1-a", "/v1/models?x=/../y"]
PATHS = [x for x in HERE.joinpath("paths.txt").read_text().split("\n") if x.startswith("/")]


class Engine(socketserver.ThreadingTCPServer):
    """Answers every request, and keeps what it got."""

    allow_reuse_address = daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[bytes] = []
        self.hold = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def take(self) -> list[bytes]:
        got, self.got = self.got, []
        return got


class Handler(socketserver.StreamRequestHandler):
    server: Engine

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        lengths = [x for x in head.splitlines() if x.lower().startswith(b"content-length:")]
        body = self.rfile.read(int(lengths[0].split(b":")[1])) if lengths else b""
        self.server.got.append(head + body)
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
            b"X-Request-Id: of-the-engine\r\n\r\ndata: 1\n\n"
        )
        if b"/v1/slow " in head:
            self.server.hold.wait(10)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def proxy(start_proxy, engine):
    return start_proxy(engine.server_address[1])


@pytest.mark.parametrize("path", PLAIN)
def test_the_key_opens_v1(proxy, engine, path):
    for key in (BEARER, f"bearer {KEY}"):
        assert status(send(proxy.port, request(path, key))) == 200
        assert engine.take()[0].startswith(f"GET {path} HTTP/1.1\r\n".encode())


@pytest.mark.parametrize("key", WRONG)
def test_nothing_else_opens_it(proxy, engine, key):
    for path in PLAIN:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            answer = send(proxy.port, request(path, key, method))
            assert status(answer) == 401 and b"\r\nWWW-Authenticate: Bearer\r\n" in answer
    twice = request(
        PLAIN[0], key or "x", extra=f"X-Api-Key: {KEY}\r\nProxy-Authorization: {BEARER}\r\n"
    )
    assert status(send(proxy.port, twice)) == 401
    assert engine.take() == []


@pytest.mark.parametrize("path", PATHS)
def test_no_other_path_passes(proxy, engine, path):
    """Whether or not there is a key: as the path was sent it is neither /v1/… nor /health."""
    for key in (None, "Bearer wrong", BEARER):
        for method in ("GET", "POST"):
            for target in (path, f"http://x{path}"):
                answer = send(proxy.port, request(target, key, method))
                assert status(answer) in (400, 404), answer
    assert engine.take() == []


def test_absolute_addresses_and_other_targets(proxy, engine):
    assert status(send(proxy.port, request("http://elsewhere/v1/models"))) == 401
    assert status(send(proxy.port, request("http://elsewhere/v1/models", BEARER))) == 200
    assert engine.take()[0].startswith(b"GET /v1/models HTTP/1.1\r\nHost: engine\r\n")
    for target in ("*", "x:443", "v1/models"):
        for method in ("OPTIONS", "CONNECT", "GET"):
            assert status(send(proxy.port, request(target, BEARER, method))) in (400, 405)
    assert engine.take() == []


def test_only_some_methods(proxy, engine):
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "get", "X" * 500):
        assert status(send(proxy.port, request("/v1/models", BEARER, method))) in (400, 405)
    for method in ("POST", "DELETE", "OPTIONS"):
        assert status(send(proxy.port, request("/health", None, method))) == 405
    assert engine.take() == []


def test_health_needs_no_key_and_takes_nothing_along(proxy, engine):
    answer = send(proxy.port, request("/health", extra="Cookie: a=b\r\n"))
    assert status(answer) == 200
    (got,) = engine.take()
    assert b"Cookie" not in got
    large = "Content-Length: 5000000\r\n"
    assert status(send(proxy.port, request("/health", extra=large))) == 413
    assert engine.take() == []


def test_the_engine_gets_chosen_headers_and_the_body(proxy, engine):
    body = b'{"prompt": "secret words"}'
    extra = (
        "Content-Type: application/json\r\nAccept: text/event-stream\r\nCookie: a=b\r\n"
        "X-data-parallel-rank: 7\r\nX-Forwarded-For: 1.2.3.4\r\nX-Request-Id: job-7.a_B\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    answer = send(proxy.port, request("/v1/completions", BEARER, "POST", extra) + body)
    (got,) = engine.take()
    head, _, sent = got.partition(b"\r\n\r\n")
    names = {line.partition(b":")[0].lower() for line in head.splitlines()[1:]}
    assert names == {
        *(b"host", b"connection", b"content-length"),
        *(b"content-type", b"accept", b"x-request-id"),
    }
    assert sent == body and b"X-Request-Id: job-7.a_B\r\n" in head + b"\r\n"
    assert answer.count(b"X-Request-Id: job-7.a_B\r\n") == 1 and b"of-the-engine" not in answer


@pytest.mark.parametrize("given", ["", "a" * 65, "x" * 7000, "a b", 'a"b', "ä", "a\tb", "../x"])
def test_request_ids_that_are_not_plain_are_replaced(proxy, engine, given):
    answer = send(proxy.port, request("/v1/models", BEARER, extra=f"X-Request-Id: {given}\r\n"))
    (got,) = engine.take()
    ids = [x for x in got.splitlines() if x.startswith(b"X-Request-Id: ")]
    assert len(ids) == 1 and len(ids[0]) == len("X-Request-Id: ") + 32
    assert ids[0] in answer and len(answer) < 1000


def test_limits(proxy, engine):
    many = "".join(f"X-{i}: {'y' * 7000}\r\n" for i in range(6))
    for extra in (f"X: {'y' * 9000}\r\n", many, f"X-Request-Id: {'x' * 60000}\r\n"):
        answer = send(proxy.port, request("/v1/models", BEARER, extra=extra))
        assert status(answer) == 400 and b"headers are larger" in answer and len(answer) < 1000
    assert status(send(proxy.port, request(f"/v1/{'x' * 9000}", BEARER))) == 414
    size = f"Content-Length: {(16 << 20) + 1}\r\n"
    assert status(send(proxy.port, request("/v1/completions", BEARER, "POST", size))) == 413
    # Without a key nobody's body is waited for.
    size = f"Content-Length: {16 << 20}\r\n"
    start = time.monotonic()
    assert status(send(proxy.port, request("/v1/completions", None, "POST", size))) == 401
    assert time.monotonic() - start < 4
    assert engine.take() == []
    large = request("/v1/completions", BEARER, "POST", size) + b"x" * (16 << 20)
    assert status(send(proxy.port, large)) == 200
    assert len(engine.take()[0]) > 16 << 20
    assert not [f for f in (proxy.folder / "body").rglob("*") if f.is_file()]


def test_tokens_pass_as_they_come(proxy, engine):
    engine.hold.clear()
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as s:
        s.sendall(request("/v1/slow", BEARER))
        start, first = time.monotonic(), b""
        while b"data: 1" not in first:
            first += s.recv(4096)
        assert time.monotonic() - start < 2 and b"[DONE]" not in first
        engine.hold.set()
        rest = b""
        while piece := s.recv(4096):
            rest += piece
    assert b"[DONE]" in rest
    engine.take()


def test_one_line_a_request_and_no_secrets(proxy, engine):
    time.sleep(0.3)  # lines of earlier requests
    before = len(proxy.lines())
    body = b'{"prompt": "my-prompt-text"}'
    extra = f"Content-Length: {len(body)}\r\nUser-Agent: my-agent\r\nX-Request-Id: job-8\r\n"
    send(proxy.port, request("/v1/completions?q=my-query", BEARER, "POST", extra) + body)
    send(proxy.port, request("/v1/completions", "Bearer my-wrong-key", "POST", extra) + body)
    send(proxy.port, request(f"/{'my-path' * 1000}", BEARER, "M" * 400))
    send(proxy.port, b"no HTTP at all\r\n\r\n")
    lines = {x["status"]: x for x in proxy.lines(before + 4)[before:]}
    assert len(proxy.lines()) == before + 4 and sorted(lines) == [200, 400, 401, 404]
    assert lines[200]["id"] == lines[401]["id"] == "job-8"
    assert lines[200]["path"] == lines[401]["path"] == "/v1/completions"
    assert lines[200]["method"] == lines[401]["method"] == "POST"
    assert lines[404]["path"] == "/" + ("my-path" * 29)[:199] and lines[404]["method"] == "?"
    assert lines[200]["first_byte"] and not lines[401]["first_byte"]
    assert max(len(json.dumps(x)) for x in lines.values()) < 700
    told = proxy.written()
    for secret in (KEY, "my-prompt", "my-query", "my-wrong-key", "my-agent"):
        assert secret not in told
    engine.take()


def test_clients_learn_when_the_engine_is_down(start_proxy):
    with socket.socket() as s:  # bound, and nobody listens
        s.bind(("127.0.0.1", 0))
        proxy = start_proxy(s.getsockname()[1])
        answer = send(proxy.port, request("/v1/models", BEARER))
        assert status(answer) == 503 and b"\r\nRetry-After: 30\r\n" in answer
        assert "not up" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert status(send(proxy.port, request("/health"))) == 503
        assert status(send(proxy.port, request("/v1/models"))) == 401


@pytest.mark.parametrize(
    "text", ["", "short", "with blanks " * 5, '"; evil "' * 5, "x" * 300, "é" * 40]
)
def test_a_key_that_is_none_is_refused(tmp_path, text):
    """Before nginx starts, with a line that says how to make one, and not the key."""
    (tmp_path / "key").write_text(text)
    command = [sys.executable, MACHINE / "proxy_key.py", tmp_path / "key", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "openssl rand -hex 32" in done.stderr
    assert not (tmp_path / "out").exists() and (not text or text not in done.stderr)
