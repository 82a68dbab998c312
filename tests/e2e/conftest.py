"""Engines and servers of the end-to-end tests. Starting one takes most of a minute on two cores,
so each is shared by all tests that can share it."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_model
import psutil
import pytest
import requests

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tests look into the scheduler
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


@pytest.fixture(scope="session")
def model_path():
    """Folder of one of the models that the project makes itself."""
    return own_model.folder


@pytest.fixture(scope="module")
def start_engine(model_path):
    """Start engines in this process, one at a time: the last one ends when the next starts."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    running: list[Any] = []

    def stop() -> None:
        while running:
            llm = running.pop()
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()

    def start(name: str = "smollm2", **options: Any) -> Any:
        stop()
        defaults = {
            "dtype": "float32",
            "kv_cache_dtype": "int4_kivi",
            "max_model_len": 2048,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 256 << 20,
            "enforce_eager": True,
            "seed": 0,
        }
        running.append(LLM(model_path(name), **(defaults | options)))
        return running[-1]

    yield start
    stop()


class Server:
    """A `vllm serve` process and its address."""

    def __init__(self, path: str, log: Path, *options: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        if "--port" in options:
            self.port = int(options[options.index("--port") + 1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [Path(sys.executable).with_name("vllm"), "serve", path]
        # It runs one whole step before it serves: 4096 tokens are 20 s of each start.
        command += ["--max-num-batched-tokens", "512"]
        env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.process = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(self.port), *options],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )

    def wait(self, seconds: float = 900) -> None:
        """Until it serves; on two slow cores that are shared, a start has taken 300 s."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log.read_text()[-4000:]}")
            try:
                if requests.get(f"{self.url}/health", timeout=60).ok:
                    return
            except requests.ConnectionError:
                time.sleep(0.5)
        raise TimeoutError(f"no /health in {seconds} s:\n{self.log.read_text()[-4000:]}")

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = requests.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        values = [
            float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith((name + "{", name + " "))
        ]
        assert values, f"no metric {name}"
        return sum(values)

    def family(self) -> list[psutil.Process]:
        """The API server and all that it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)


def served(server: Server) -> Iterator[Server]:
    """Once it serves; it ends when whoever asked is done."""
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def process_name(process: psutil.Process) -> str:
    """Its name; nothing of a zombie, or of one that ended since it was listed."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.NoSuchProcess:
        return ""


def gone(processes: list[psutil.Process], seconds: float) -> list[str]:
    """What is still there after that time."""
    end = time.monotonic() + seconds
    while (alive := [n for n in map(process_name, processes) if n]) and time.monotonic() < end:
        time.sleep(0.2)
    return alive


@pytest.fixture(scope="session")
def server(model_path, tmp_path_factory) -> Iterator[Server]:
    """One server with int4_kivi for all tests that only talk to it."""
    s = Server(
        model_path(),
        tmp_path_factory.mktemp("server") / "log",
        *("--served-model-name", "smollm2", "--dtype", "float32", "--kv-cache-dtype", "int4_kivi"),
        *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--shutdown-timeout", "60"),
    )
    yield from served(s)
