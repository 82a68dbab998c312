"""Hostile requests, made by rule and by hand: no 5xx but 501, answers and log in proportion to what
was sent, and whoever else uses the server notices nothing.

A run repeats: `make fuzz COUNT=20000 SEED=7` makes a longer one with other bodies.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import hostile
import psutil
import pytest
import requests
import schemathesis
from conftest import Server, served
from hypothesis import HealthCheck, Phase, given, seed, settings

COUNT = int(os.environ.get("S4KV_FUZZ_COUNT", "400"))  # of bodies by hostile.py
SEED = int(os.environ.get("S4KV_FUZZ_SEED", "1"))
EXAMPLES = max(4, COUNT // 100)  # of each route, by its OpenAPI schema
SLOW = 1.0  # seconds that /health may take
GREEDY = {
    "model": hostile.MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24,
    "ignore_eos": True,
}  # fmt: skip


@dataclass
class Neighbour:
    """Somebody else: asks for /health all the time, and for the same greedy text."""

    url: str
    slow: list[tuple[float, str]] = field(default_factory=list)  # and what was sent meanwhile
    asked: int = 0
    texts: list[str] = field(default_factory=list)
    sent: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    def health(self) -> None:
        session = requests.Session()
        while not self.stop.wait(0.05):
            began, sent = time.monotonic(), self.sent
            assert session.get(f"{self.url}/health", timeout=60).status_code == 200
            self.asked += 1
            if (took := time.monotonic() - began) > SLOW:
                self.slow.append((took, sent))

    def text(self) -> None:
        session = requests.Session()
        while not self.stop.wait(0.5):
            answer = session.post(f"{self.url}/v1/completions", json=GREEDY, timeout=60)
            self.texts.append(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def target(model_path, tmp_path_factory) -> Iterator[Server]:
    s = Server(
        model_path(),
        tmp_path_factory.mktemp("fuzz") / "log",
        *("--served-model-name", hostile.MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--kv-cache-dtype", "int4_kivi", "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--enable-request-id-headers"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--override-generation-config", json.dumps({"max_new_tokens": 8})),  # no long answers
    )
    yield from served(s)


@pytest.fixture(scope="module")
def neighbour(target) -> Iterator[Neighbour]:
    n = Neighbour(target.url)
    threads = [threading.Thread(target=f, daemon=True) for f in (n.health, n.text)]
    for t in threads:
        t.start()
    yield n
    n.stop.set()


@dataclass
class Judge:
    """Looks at every answer; keeps what is wrong, so that one fault does not hide the next."""

    server: Server
    neighbour: Neighbour
    wrong: list[str] = field(default_factory=list)

    def send(self, what: str, sent: int, call: Callable[[], requests.Response]) -> None:
        self.neighbour.sent = what[:300]
        log = self.server.log.stat().st_size
        began = time.monotonic()
        try:
            answer = call()
        except requests.RequestException as e:
            self.wrong.append(f"no answer ({e!r:.100}): {what:.300}")
            return
        took, logged = time.monotonic() - began, self.server.log.stat().st_size - log
        events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
        codes = [answer.status_code, *(e["error"]["code"] for e in events if e.get("error"))]
        bad = {
            f"{codes}": any(c >= 500 and c != 501 for c in codes),
            f"{len(answer.content)} bytes back": sent > 0
            and len(answer.content) > 16_384 + 20 * sent,
            f"{logged} bytes of log": logged > 16_384 + 4 * sent,
            f"{took:.0f} s": took > 30,
        }
        if any(bad.values()):
            why = ", ".join(k for k, v in bad.items() if v)
            self.wrong.append(f"{why}: {what:.300} -> {answer.text:.300}")

    def verdict(self) -> None:
        assert not self.wrong, f"{len(self.wrong)} faults:\n" + "\n".join(self.wrong[:20])
        assert self.server.process.poll() is None


@pytest.fixture
def judge(target, neighbour) -> Judge:
    return Judge(target, neighbour)


def post(judge: Judge, path: str, body: bytes, **headers: str) -> None:
    headers = {"Content-Type": "application/json"} | headers
    judge.send(
        f"{path} {headers if len(headers) > 1 else ''} {body[:280]!r}",
        len(body) + sum(map(len, headers.values())),
        lambda: requests.post(judge.server.url + path, data=body, headers=headers, timeout=60),
    )


def test_spoilt_values(judge):
    for path, body in islice(hostile.bodies(SEED), COUNT):
        post(judge, path, body)
    judge.verdict()


def test_what_the_schema_makes(judge):
    """From the server's own description of itself, all routes that it has."""
    described = requests.get(f"{judge.server.url}/openapi.json", timeout=60).json()
    operations = [r.ok() for r in schemathesis.openapi.from_dict(described).get_all_operations()]
    assert len(operations) > 20
    for operation in operations:

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def send(case: Any) -> None:
            made = case.as_transport_kwargs(base_url=judge.server.url)
            size = len(json.dumps(made["json"])) if made.get("json") is not None else 0
            what = f"{made['method']} {made['url']} {made.get('json')!r}"
            judge.send(what, size, lambda: requests.request(**made, timeout=60))

        send()
    judge.verdict()


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


BIG = 50_000_000
BODIES = {
    "a long prompt": ("/v1/completions", {"prompt": "x " * (BIG // 2)}),
    "a long message": ("/v1/chat/completions", {"messages": say("x" * BIG)}),
    "a long text to tokenize": ("/tokenize", {"prompt": "x" * BIG}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_large_bodies(judge, name):
    path, body = BODIES[name]
    before = memory(judge.server)
    post(judge, path, json.dumps({"model": hostile.MODEL, "max_tokens": 3} | body).encode())
    judge.verdict()
    time.sleep(1)
    assert memory(judge.server) - before < 12 * BIG


def memory(server: Server) -> int:
    """Bytes that the server and its children hold."""
    root = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))


def raw(server: Server, data: bytes, then: bytes = b"") -> bytes:
    """What comes back for these bytes; after `then` the client leaves."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(data)
        if then:
            time.sleep(0.2)
            s.sendall(then)
            return b""
        s.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := s.recv(65_536):
                answer += part
        except TimeoutError:
            pass
        return answer


JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
WIRE = {
    "a chunk cut off": HEAD + JSON + CHUNKED + b"ff\r\n{",
    "a chunk of a size that is none": HEAD + JSON + CHUNKED + b"zz\r\n{}",
    "less than announced": HEAD + JSON + b"Content-Length: 1000\r\n\r\n{",
    "a negative length": HEAD + JSON + b"Content-Length: -1\r\n\r\n{}",
    "two lengths": HEAD + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and chunks": HEAD + JSON + b"Content-Length: 2\r\n" + CHUNKED + b"0\r\n\r\n",
    "control characters in a header": HEAD + JSON + b"X-Request-Id: a\x00\x1b[31m\r\n\r\n",
    "not ASCII in a header": HEAD + JSON + b"X-Request-Id: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
    "a long header": HEAD + JSON + b"X-A: " + b"a" * 5_000_000 + b"\r\n\r\n",
    "many headers": HEAD + JSON + b"".join(b"X-%d: a\r\n" % i for i in range(5000)) + b"\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00" + b"\0" * 500,
    "an unknown method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path that climbs": b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long path": b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", WIRE)
def test_on_the_wire(judge, name):
    before = judge.server.log.stat().st_size
    answer = raw(judge.server, WIRE[name])
    status = answer.split(b" ")[1] if answer.startswith(b"HTTP/1.1 ") else b"closed"
    assert status == b"closed" or 400 <= int(status) < 500, answer[:300]
    assert len(answer) < 16_384
    assert judge.server.log.stat().st_size - before < 16_384 + 4 * len(WIRE[name])
    raw(judge.server, WIRE[name], then=b"\r\n")
    judge.verdict()


@pytest.mark.parametrize(
    "kind",
    [
        *("", "text/plain", "application/xml", "multipart/form-data", "application/json;"),
        *("application/json; charset=utf-7", "application/x-www-form-urlencoded", "a" * 5000),
    ],
)
def test_content_types(judge, kind):
    for path in hostile.ROUTES:
        always, _ = hostile.ROUTES[path]
        post(judge, path, json.dumps(always).encode(), **{"Content-Type": kind})
    judge.verdict()


def test_a_body_has_a_bound(judge):
    """128 MiB (S4KV_MAX_BODY): sent in pieces, so that nothing announces it."""

    def pieces() -> Iterator[bytes]:
        yield b'{"model": "'
        for _ in range(140):
            yield b"a" * (1 << 20)

    before = memory(judge.server)
    try:
        answer = requests.post(
            f"{judge.server.url}/v1/completions",
            data=pieces(),
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        assert answer.status_code == 413, answer.text[:300]
        assert "S4KV_MAX_BODY" in answer.json()["error"]["message"]
    except requests.ConnectionError:
        pytest.fail("the connection ended without an answer")
    assert memory(judge.server) - before < 3 * 140 << 20


def test_nobody_else_noticed(target, neighbour):
    time.sleep(1)
    assert len(neighbour.texts) > 10
    assert set(neighbour.texts) == {neighbour.texts[0]}
    # Another program may have the machine for a while; a request that keeps the server from
    # answering is found again by its text.
    print(f"{len(neighbour.slow)} of {neighbour.asked} answers of /health above {SLOW} s")
    assert len(neighbour.slow) <= neighbour.asked / 20, neighbour.slow
    assert all(took < 10 * SLOW for took, _ in neighbour.slow), neighbour.slow
    # Nothing is left of all that. The gauges are of the last step: an abort is none.
    neighbour.stop.set()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + 30
    while True:
        requests.post(f"{target.url}/v1/completions", json=GREEDY, timeout=60).raise_for_status()
        left = {name: value for name in names if (value := target.metric(f"vllm:{name}"))}
        if not left or time.monotonic() > end:
            break
    assert not left
