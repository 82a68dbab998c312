"""The service of deploy/machine as it runs: every route of a real server through the proxy, and
what happens when its engine stops. It is started three times, the last time only to see that it is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import own_model
import pytest
import requests
from machine import KEY, MACHINE, Proxy, change, free_port, request, send, status
from supervisor import Supervisor

pytestmark = pytest.mark.machine

BIN = Path(sys.executable).parent
WATCHDOG = 18.0  # instead of 60, for a test's sake
BEARER = f"Bearer {KEY}"


def until(true: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.2)


class Machine:
    """One machine with the service and the proxy before it."""

    def __init__(self, model: str, folder: Path, start_proxy) -> None:
        self.port = free_port()
        unit = (MACHINE / "s4kv.service").read_text()
        unit = change(unit, "/opt/s4kv/bin", str(BIN))
        unit = change(unit, "--port 8000", f"--port {self.port}")
        unit = change(unit, "ready --notify", f"ready --notify --url http://127.0.0.1:{self.port}")
        env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        env |= {
            "HOME": os.environ["HOME"],
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "S4KV_MODEL": model,
            "S4KV_KV": "int4_kivi",
            "S4KV_ARGS": "--served-model-name smollm2 --dtype float32 --max-model-len 1024 "
            f"--kv-cache-memory-bytes {128 << 20} --enforce-eager "
            "--max-num-batched-tokens 512 "  # a shorter trial run at the start
            """--additional-config '{"int4_kivi": {"keys": "plain"}}'""",
        }
        self.url = f"http://127.0.0.1:{self.port}"
        self.service = Supervisor(unit, env, folder, WATCHDOG, abort=10)
        self.proxy: Proxy = start_proxy(self.port)

    def up(self, start: int, seconds: float = 400) -> None:
        """Wait until the service is up after that many starts."""
        s = self.service
        until(lambda: len(s.starts) == start and s.ready.is_set(), seconds, self.journal())

    def journal(self) -> str:
        return self.service.log.read_text()[-5000:] if self.service.log.exists() else ""

    def check(self, *options: str) -> tuple[int, float, str]:
        """`s4kv ready` through the proxy: its status, its seconds and what it said."""
        start = time.monotonic()
        done = subprocess.run(
            [BIN / "s4kv", "ready", "--url", self.proxy.url, *options],
            env=os.environ | {"VLLM_API_KEY": KEY},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, time.monotonic() - start, done.stdout + done.stderr


@pytest.fixture(scope="module")
def machine(start_proxy, tmp_path_factory) -> Iterator[Machine]:
    m = Machine(own_model.folder(), tmp_path_factory.mktemp("machine"), start_proxy)
    try:
        m.up(1)
        yield m
    finally:
        m.service.stop()


def test_a_client_with_the_key_is_served(machine):
    code, _, told = machine.check()
    assert code == 0 and told.startswith("ready: one token of smollm2 in "), told
    client = openai.OpenAI(base_url=f"{machine.proxy.url}/v1", api_key=KEY, max_retries=0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(
        model="smollm2", messages=question, temperature=0, max_tokens=24
    )
    assert "Paris" in answer.choices[0].message.content
    with pytest.raises(openai.AuthenticationError, match="Send the API key"):
        client.with_options(api_key="wrong").models.list()


def test_every_route_of_the_server(machine):
    """Those that it tells of and those that it does not: /v1/… with the key, and nothing else."""
    told = requests.get(f"{machine.url}/openapi.json", timeout=10).json()["paths"]
    hidden = (Path(__file__).parent / "paths.txt").read_text().split("\n")
    routes = {re.sub(r"\{\w+\}", "x", path) for path in told}
    assert {"/tokenize", "/v1/completions", "/v1/responses/x/cancel", "/metrics"} <= routes
    cases, before = {}, len(machine.proxy.lines())
    for path in sorted(routes | {x for x in hidden if x.startswith("/")}):
        for key in (None, "Bearer wrong", BEARER):
            for method in ("GET", "POST", "OPTIONS"):
                name = f"route-{len(cases)}"
                extra = f"X-Request-Id: {name}\r\n"
                answer = send(machine.proxy.port, request(path, key, method, extra))
                if path == "/health":
                    passes = method == "GET"
                else:
                    plain = path.startswith("/v1/") and path in routes
                    passes = plain and key == BEARER and method != "OPTIONS"
                cases[name] = (path, key, method, passes)
                assert passes or status(answer) in (400, 401, 404, 405), cases[name]
    lines = machine.proxy.lines(before + len(cases))
    reached = {x["id"] for x in lines if x["first_byte"]}  # the engine
    for name, case in cases.items():
        assert (name in reached) == case[3], case


def test_request_ids_do_not_swell_answers(machine):
    body = {"model": "smollm2", "prompt": "1", "max_tokens": 1}
    url, key = f"{machine.proxy.url}/v1/completions", {"Authorization": BEARER}
    named = requests.post(url, json=body, headers=key | {"X-Request-Id": "job-1"}, timeout=60)
    assert named.json()["id"].startswith("cmpl-job-1") and named.headers["X-Request-Id"] == "job-1"
    long = requests.post(url, json=body, headers=key | {"X-Request-Id": "x" * 3000}, timeout=60)
    assert long.ok and len(long.content) < 2000 and len(long.headers["X-Request-Id"]) == 32
    huge = requests.post(url, json=body, headers=key | {"X-Request-Id": "x" * 60000}, timeout=60)
    assert huge.status_code == 400 and len(huge.content) < 1000


def test_two_requests_of_one_id(machine):
    """A client's retry must not disturb the first."""
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 30, "ignore_eos": True}
    headers = {"Authorization": BEARER, "X-Request-Id": "same"}
    got: list[requests.Response] = []

    def ask() -> None:
        url = f"{machine.proxy.url}/v1/completions"
        got.append(requests.post(url, json=body, headers=headers, timeout=60))

    both = [threading.Thread(target=ask) for _ in range(2)]
    for t in both:
        t.start()
    for t in both:
        t.join()
    assert [r.json()["usage"]["completion_tokens"] for r in got] == [30, 30]


def test_nothing_said_is_written_down(machine):
    prompt = "a-prompt-nobody-may-read"
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, "user": "user-of-the-body"}
    for path in ("completions", "chat/completions"):  # the second is refused, with its body
        url = f"{machine.proxy.url}/v1/{path}"
        requests.post(url, json=body, headers={"Authorization": BEARER}, timeout=60)
    told = machine.proxy.written() + machine.service.log.read_text()
    assert KEY not in told and prompt not in told and "user-of-the-body" not in told


def test_a_killed_engine_is_noticed_and_comes_back(machine):
    machine.service.engine().send_signal(signal.SIGKILL)
    code, seconds, told = machine.check("--deadline", "20")
    assert code == 1 and seconds < 30, (code, seconds, told)
    machine.up(2)
    assert machine.service.ends[0].startswith("status "), machine.service.ends
    assert machine.check()[0] == 0


def test_a_stopped_engine_is_noticed_and_replaced(machine):
    engine = machine.service.engine()
    engine.send_signal(signal.SIGSTOP)
    assert requests.get(f"{machine.proxy.url}/health", timeout=10).ok  # which knows nothing
    code, seconds, told = machine.check("--deadline", "8")
    assert code == 1 and seconds < 30 and "within 8 s" in told, (code, seconds, told)
    until(lambda: len(machine.service.starts) == 3, 60, machine.journal())
    assert machine.service.ends[1] == "watchdog"
    assert not engine.is_running()
    assert "Fatal Python error: Aborted" in machine.journal()  # and where each thread stood


def test_stopping_lets_requests_end(machine):
    machine.up(3)
    url, headers = f"{machine.proxy.url}/v1/completions", {"Authorization": BEARER}
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 150, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with requests.post(url, json=body, headers=headers, stream=True, timeout=60) as r:
        lines = r.iter_lines()
        assert next(lines).startswith(b"data: ")
        machine.service.terminate()
        rest = [x for x in lines if x]
    assert rest[-1] == b"data: [DONE]"
    assert json.loads(rest[-2][6:])["usage"]["completion_tokens"] == 150
    until(lambda: len(machine.service.ends) == 3, 60, machine.journal())
    answer = requests.get(f"{machine.proxy.url}/v1/models", headers=headers, timeout=10)
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "30"
