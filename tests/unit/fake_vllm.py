#!/usr/bin/env python3
"""A stand-in for the command `vllm` that starts at once: `serve` with a made-up model, and
`bench serve` with made-up latencies. Only what `s4kv compare` asks of the real one.

KV cache dtypes: auto, fp8 (a little off), broken (wrong answers), slow (wrong latencies), dies (the
server ends when it is asked anything with "needle" in it), never (it ends before it is ready), cut
(streams end with an error).
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import urllib.request
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK = 4
HOLDS = 3  # streams before one is preempted
TOKENS = {"auto": 1000, "fp8": 2000}


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, dtype: str = "auto", port: int = 0, **config: object) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.dtype, self.config = dtype, config
        self.asked: list[dict] = []
        self.running = self.preempted = self.count = 0
        self.development = True
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> Fake:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self


def text_of(body: dict) -> str:
    if "messages" in body:
        return " ".join(m["content"] for m in body["messages"])
    return str(body["prompt"])


def answer(dtype: str, prompt: str, n: int) -> tuple[list[int], list[dict[str, float]], str]:
    """Tokens, the likeliest ones at each position, and the text."""
    tokens = [zlib.crc32(f"{prompt} {i}".encode()) % 50 for i in range(n)]
    words = ["Paris" if "France" in prompt else "and", *(f"t{t}" for t in tokens)]
    sure = 0.9
    if dtype == "fp8":
        sure = 0.899
    if dtype == "broken":
        tokens, words, sure = [t + 1 for t in tokens], ["nothing"], 0.4
    tops = [{f"token_id:{t}": math.log(sure), f"token_id:{t + 1}": math.log(0.09)} for t in tokens]
    return tokens, tops, " ".join(words)


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *args: object) -> None:
        pass

    def send(self, told: object, status: int = 200) -> None:
        data = (told if isinstance(told, str) else json.dumps(told)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        s = self.server
        path = self.path.partition("?")[0]
        if path == "/server_info" and s.development:
            config = {
                "model_config": {"seed": 0, "hf_token": "hf_secret", **s.config},
                "scheduler_config": {"max_num_batched_tokens": CHUNK},
                "cache_config": {"cache_dtype": s.dtype},
                "instance_id": id(s),
            }
            self.send({"vllm_config": config, "vllm_env": {"VLLM_PORT": s.server_port}})
        elif path == "/v1/models":
            self.send({"data": [{"id": "fake", "root": "/models/fake", "max_model_len": 200}]})
        elif path == "/metrics":
            self.send(self.metrics())
        elif path in ("/health", "/version"):
            self.send({"version": "0.25.1"})
        else:
            self.send({"error": {"message": "no such path"}}, 404)

    def metrics(self) -> str:
        s = self.server
        tokens = TOKENS.get(s.dtype, 1000)
        cache = {
            "cache_dtype": s.dtype,
            "num_gpu_blocks": tokens // 10,
            "kv_cache_size_tokens": tokens,
            "kv_cache_max_concurrency": tokens / 200,
            "kv_cache_memory_bytes": 100_000,
        }
        labels = ",".join(f'{k}="{v}"' for k, v in cache.items())
        return (
            f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n"
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {s.running}\n"
            f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total {s.preempted}\n"
            f"# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total {s.count}\n"
        )

    def do_POST(self) -> None:
        s = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        s.asked.append(body)
        prompt = text_of(body)
        if s.dtype == "dies" and "needle" in prompt:
            print("EngineCore failed: out of memory", flush=True)
            os._exit(3)
        if body.get("stream"):
            self.stream(body)
        elif "too long" in prompt:
            self.send({"error": {"message": "the prompt is too long"}}, 400)
        else:
            self.send(self.completion(body, prompt))

    def completion(self, body: dict, prompt: str) -> dict:
        dtype = self.server.dtype
        tokens, tops, words = answer(dtype, prompt, body["max_tokens"])
        choice = {"token_ids": tokens, "finish_reason": "length"}
        if "messages" in body:
            rows = [[{"token": t, "logprob": p} for t, p in top.items()] for top in tops]
            content = [{"top_logprobs": row} for row in rows]
            choice |= {"message": {"content": words}, "logprobs": {"content": content}}
        else:
            choice |= {"text": words, "logprobs": {"top_logprobs": tops}}
        told: dict = {"choices": [choice]}
        if "prompt_logprobs" in body:
            n = len(prompt.split())
            _, tops, _ = answer("auto", prompt, n)
            _, damaged, _ = answer(dtype, prompt, n)
            tops[CHUNK:] = damaged[CHUNK:]  # the first chunk does not read the cache
            rows = [
                {
                    t.removeprefix("token_id:"): {"logprob": p, "rank": i}
                    for i, (t, p) in enumerate(x.items(), 1)
                }
                for x in tops
            ]
            target = told if "messages" in body else choice
            target["prompt_logprobs"] = [None, *rows[1:]]
        return told

    def stream(self, body: dict) -> None:
        s = self.server
        with s.lock:
            s.running += 1
            s.count += len(body["prompt"])
            full = s.running > HOLDS
        if full:
            time.sleep(0.5)
            s.preempted += 1
        self.send_response(200)
        self.end_headers()
        if s.dtype == "cut":
            self.wfile.write(b'data: {"error": {"message": "no page is left"}}\n\n')
            return
        try:
            while True:
                self.wfile.write(b"data: {}\n\n")
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            with s.lock:
                s.running -= 1


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def serve() -> None:
    dtype = option("--kv-cache-dtype")
    if dtype == "never":
        print("ValueError: --kv-cache-dtype never: no kernels for it", flush=True)
        sys.exit(1)
    Fake(dtype, int(option("--port"))).serve_forever(0.01)


def bench() -> None:
    with urllib.request.urlopen(option("--base-url") + "/metrics") as answer:
        slow = 2.0 if 'cache_dtype="slow"' in answer.read().decode() else 1.0
    rate = option("--request-rate")
    load = 3.0 if rate == "inf" else 1.0
    told: dict = {"completed": 4, "failed": 0, "duration": 1.0}
    told |= {"request_throughput": 4 / slow, "output_throughput": 40 / slow}
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for p in (50, 95, 99):
            told[f"p{p}_{metric}_ms"] = p * slow * load
    folder = Path(option("--result-dir"))
    (folder / option("--result-filename")).write_text(json.dumps(told))


if __name__ == "__main__":
    bench() if sys.argv[1] == "bench" else serve()
