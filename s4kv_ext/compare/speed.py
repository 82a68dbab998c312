"""Speed through vLLM's own `vllm bench serve`, one request rate a run."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

from s4kv_ext.compare.client import KEY, Client, Gone
from s4kv_ext.compare.scrape import PREEMPTIONS, PREFIX_HITS, QUEUE_COUNT, QUEUE_SUM
from s4kv_ext.compare.servers import environment, tail, vllm

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = ("50", "95", "99")
KEPT = ("completed", "failed", "duration", "request_throughput", "output_throughput")


def command(
    client: Client, facts: dict[str, Any], tokenizer: str, rate: str, how: dict[str, Any]
) -> list[str]:
    """Random prompts by default; what the user gave for `vllm bench serve` comes last and wins."""
    salt = json.dumps({"cache_salt": uuid.uuid4().hex, "temperature": 0})
    return [
        *(vllm(), "bench", "serve", "--backend", "openai", "--base-url", client.url),
        *("--model", facts["model"], "--tokenizer", tokenizer, "--request-rate", rate),
        *("--dataset-name", "random", "--ignore-eos", "--seed", "0", "--disable-tqdm"),
        *("--random-input-len", str(how["input_len"])),
        *("--random-output-len", str(how["output_len"])),
        *("--num-prompts", str(how["num_prompts"]), "--num-warmups", str(how["warmups"])),
        *("--percentile-metrics", ",".join(LATENCIES)),
        *("--metric-percentiles", ",".join(PERCENTILES), "--extra-body", salt),
        *how["arguments"],
    ]


def measure(
    client: Client, facts: dict[str, Any], tokenizer: str, rate: str, how: dict[str, Any], log: Path
) -> dict[str, Any]:
    """Latencies in ms, throughput a second, and what /metrics counted meanwhile."""
    before = client.scrape()
    with tempfile.TemporaryDirectory() as folder:
        run = command(client, facts, tokenizer, rate, how)
        run += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        env = environment()
        if KEY in os.environ:
            env["OPENAI_API_KEY"] = os.environ[KEY]
        with log.open("a") as out:
            done = subprocess.run(
                run, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env,
                check=False,
            )  # fmt: skip
        path = Path(folder) / "result.json"
        if done.returncode or not path.exists():
            if not client.healthy():
                raise Gone(f"{client.url} does not answer any more")
            raise RuntimeError(f"vllm bench serve failed, the end of {log}:\n{tail(log)}")
        told = json.loads(path.read_text())
    after = client.scrape()

    def grown(name: str) -> float:
        return after.total(name) - before.total(name)

    row = {name: told[name] for name in KEPT}
    row |= {f"{m}_p{p}": told[f"p{p}_{m}_ms"] for m in LATENCIES for p in PERCENTILES}
    row["preemptions"] = grown(PREEMPTIONS)
    row["prefix_hits"] = grown(PREFIX_HITS)
    row["queue_ms"] = 1e3 * grown(QUEUE_SUM) / max(grown(QUEUE_COUNT), 1)
    return row
