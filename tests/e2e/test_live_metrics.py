"""/metrics of real servers: int4_kivi's own, and each that the dashboard and the alerts ask for."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import monitoring
import pytest
import requests
from conftest import Server, gone, process_name, served
from prometheus_client.parser import text_string_to_metric_families

from s4kv_ext.format import sealed_tokens

PAGE = 3 * 5184  # bytes of a layer's page: SmolLM2 has 3 KV heads of 64
PLAIN = 3 * 2 * 64 * 2  # of a token in bf16
NAMES = (
    *("sealed_pages", "recent_pages", "bytes_per_token", "density", "seals_total", "info"),
    "page_mismatches_total",
)
OWN = {"up": {"job", "instance"}}
"""Prometheus makes it, not the server."""


def samples(server: Server) -> list:
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def own(server: Server, name: str) -> dict[str, float]:
    """One of int4_kivi's metrics, by engine."""
    found = [s for s in samples(server) if s.name == f"vllm:int4_kivi_{name}"]
    return {s.labels["engine"]: s.value for s in found}


def complete(server: Server, prompt: list[int], max_tokens: int, **options) -> requests.Response:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = requests.post(f"{server.url}/v1/completions", json=body | options, timeout=300)
    answer.raise_for_status()
    return answer


@pytest.fixture(scope="module")
def several(model_path, tmp_path_factory):
    """Two engines behind two API servers, two layers of nonsense each."""
    folder = tmp_path_factory.mktemp("several")
    for file in Path(model_path()).iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each engine wants a NUMA node
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_PLUGINS", "")  # int4_kivi is no plugin: each process has it
        s = Server(
            str(folder),
            folder / "log",
            *("--served-model-name", "smollm2", "--load-format", "dummy", "--dtype", "float32"),
            *("--kv-cache-dtype", "int4_kivi", "--kv-cache-memory-bytes", str(32 << 20)),
            *("--max-model-len", "2048", "--enforce-eager"),
            *("--data-parallel-size", "2", "--api-server-count", "2"),
        )
    yield from served(s)


def test_pages_of_one_request_while_it_runs(server):
    """Read between its steps, wherever it is: the figures agree with each other and with vLLM's."""
    before = own(server, "seals_total")["0"]
    prompt = [100 + i % 7 for i in range(500)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, server, prompt, 200)
        seen = []
        while not answer.done():
            seen.append({s.name: s.value for s in samples(server)})
            time.sleep(0.2)
        answer.result()
    seen = [s for s in seen if s["vllm:int4_kivi_sealed_pages"]]
    assert seen, "the request was too quick to be seen"
    (info,) = [s for s in samples(server) if s.name == "vllm:cache_config_info"]
    for s in seen:
        sealed, recent = s["vllm:int4_kivi_sealed_pages"], s["vllm:int4_kivi_recent_pages"]
        pool_pages = int(info.labels["num_gpu_blocks"]) - 1
        assert sealed + recent == pytest.approx(s["vllm:kv_cache_usage_perc"] * pool_pages)
        assert sealed_tokens(500) // 64 <= sealed <= sealed_tokens(700) // 64
        tokens = s["vllm:int4_kivi_density"] * (sealed + recent) * PAGE / PLAIN
        assert tokens == pytest.approx(round(tokens))
        assert sealed_tokens(round(tokens)) == 64 * sealed
    assert own(server, "seals_total")["0"] - before == sealed_tokens(699) // 64


def test_idle(server):
    """Nothing in use, a density of nothing, and a map that the log names."""
    assert own(server, "sealed_pages") == own(server, "recent_pages") == {"0": 0}
    assert math.isnan(own(server, "density")["0"])
    assert own(server, "bytes_per_token") == {"0": 30 * PAGE / 64}
    (info,) = [s for s in samples(server) if s.name == "vllm:int4_kivi_info"]
    assert info.labels["model_name"] == "smollm2" and info.labels["format_version"] == "1"
    (told,) = re.findall(r"channel map ([0-9a-f]{16}), format version 1", server.log.read_text())
    assert info.labels["channel_map"] == told


def test_two_engines_behind_two_api_servers(several):
    """All is there before the first request; then whichever server is asked knows of all steps."""
    for name in NAMES:
        assert set(own(several, name)) == {"0", "1"}, name
    assert own(several, "bytes_per_token") == dict.fromkeys("01", 2 * PAGE / 64)
    maps = {s.labels["channel_map"] for s in samples(several) if s.name == "vllm:int4_kivi_info"}
    assert len(maps) == 1  # equal weights
    prompts = [[i, *range(100, 299)] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: complete(several, p, 50), prompts))
    for _ in range(4):  # the API servers take turns
        seals = own(several, "seals_total")
        assert sum(seals.values()) == 8 * sealed_tokens(249) // 64
        assert all(seals.values()), "one engine did everything"
        assert own(several, "sealed_pages") == dict.fromkeys("01", 0)


@pytest.mark.parametrize("kind", ["server", "several"])
def test_the_dashboard_and_the_alerts_ask_for_what_there_is(kind, request):
    """Each metric, each label, and each value that is asked for."""
    live = request.getfixturevalue(kind)
    complete(live, [1, 2, 3], 2)
    labels: dict[str, set[str]] = dict(OWN)
    found: dict[str, list[dict[str, str]]] = {}
    for s in samples(live):
        labels.setdefault(s.name, set(s.labels)).intersection_update(s.labels)
        found.setdefault(s.name, []).append(s.labels)
    asked = set()
    for query in monitoring.queries():
        for s in monitoring.selectors(query.promql):
            asked.add(s.metric)
            assert s.metric in labels, f"{query.where}: no metric {s.metric}"
            has = labels[s.metric] | monitoring.ADDED
            assert s.labels <= has, f"{query.where}: {s.metric} has no {s.labels - has}"
            for label, value in s.equal.items():
                values = {x[label] for x in found.get(s.metric, ()) if label in x}
                wanted = label in monitoring.ADDED or value in values
                assert wanted or (label, value) == ("status", "5xx"), (query.where, label, value)
        result = monitoring.result_labels(query.promql, labels)
        assert query.shown <= result, f"{query.where} shows {query.shown - result}"
    assert {f"vllm:int4_kivi_{name}" for name in NAMES} <= asked


def test_sigkill_of_a_worker_ends_all(several):
    """Of one engine of two: nothing that would answer with half of the machine, or keep memory."""
    everybody = several.family()
    next(p for p in everybody if "Worker" in process_name(p)).kill()
    several.process.wait(120)
    assert not gone(everybody, 10)
