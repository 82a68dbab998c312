"""`s4kv compare` on real servers: int4_kivi is as good as the baseline, a damaged cache is not.

One run for all tests: three servers at once, of which the plugin in `broken_cache/` damages the
third one's sealed pages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from s4kv_ext.compare.svg import COLOURS

HERE = Path(__file__).parent
BROKEN = "int4_kivi:keys=plain"
MEMORY = 56 << 20  # bytes, of a cache that fills within seconds
SECRET = "The ferry to Tadoussac leaves at seven"
TASKS = [
    {"prompt": f"{SECRET}. " * 30 + "The ferry to", "expected": "Tadoussac leaves at seven"},
    {
        "messages": [{"role": "user", "content": "The capital of France, as JSON."}],
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "max_tokens": 40,
    },
]
BROWSERS = ("google-chrome", "chromium", "chromium-browser")


def compare(model: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(HERE / "broken_cache"), os.getenv("PYTHONPATH")]))
    keep = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [
        *(Path(sys.executable).with_name("s4kv"), "compare", model, *options, "--together"),
        *("--kv", "auto", "--kv", "int4_kivi", "--kv", BROKEN, "--out", folder / "report"),
        *("--tasks", folder / "mine.jsonl", "--builtin", "quotes", "--builtin-count", "3"),
        *("--context", "500", "--max-tokens", "32", "--fill-len", "250"),
        *("--rates", "4", "--speed-rounds", "1", "--num-prompts", "6"),
        *("--input-len", "64", "--output-len", "8", "--fail-if", "top1<0.8"),
        # Six requests on a busy machine say nothing of speed, and five tasks little of quality.
        *("--threshold", "quality>=0.8", "--threshold", "tokens_per_s>=0.01"),
        *("--threshold", "ttft_p95<=100", "--threshold", "tpot_p95<=100"),
        *("--", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"),
        *("--max-num-batched-tokens", "128", "--kv-cache-memory-bytes", str(MEMORY)),
    ]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=keep | {"PYTHONPATH": path}
    )


@pytest.fixture(scope="module")
def run(model_path, tmp_path_factory):
    """The exit status, the folder of the report, and what was printed."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    done = compare(model_path(), folder)
    print(done.stdout, done.stderr)
    assert (folder / "report" / "report.json").exists(), done.stderr
    return done.returncode, folder / "report", done.stdout


@pytest.fixture(scope="module")
def report(run):
    return json.loads((run[1] / "report.json").read_text())


def test_the_damaged_cache_is_caught(run, report):
    status, _, told = run
    assert status == 1
    assert report["words"] == ["better", "worse"]
    gates = [x for x in told.splitlines() if x.startswith("--fail-if")]
    assert len(gates) == 1 and gates[0].startswith(f"--fail-if: {BROKEN}: top1 is 0.")
    good, bad = (f["values"] for f in report["figures"][1:])
    assert good["kl"] < 0.01 < 0.3 < bad["kl"]
    assert good["top1"] > 0.95 and bad["top1"] < 0.8
    assert bad["quality"] < 0.8 <= good["quality"]


def test_the_baseline_agrees_with_itself_better_than_anything(report):
    floor, good = report["figures"][0]["floor"], report["figures"][1]["values"]
    assert floor["kl"] <= good["kl"] and floor["agreement"] >= good["agreement"]
    assert report["figures"][1]["positions"] > 500


def test_capacity_and_filling(report):
    base, good, _ = report["figures"]
    assert good["values"]["kv_tokens"] > 3
    for f in (base, good):
        held = f["fill"]
        print(held)
        assert held["ended"] == "preempted"
        # Between two readings of /metrics, which a busy server does not give often.
        assert held["tokens"] <= held["tokens_at_end"]
        assert 0.5 * f["capacity"]["kv_tokens"] < held["tokens_at_end"]
    assert good["fill"]["tokens_at_end"] > 1.5 * base["fill"]["tokens_at_end"]
    assert good["capacity"]["memory_bytes"] == MEMORY


def test_speed_is_measured_on_every_side(report):
    for f in report["figures"]:
        row = f["speed"]["4"]
        assert row["completed"] == 6 and row["failed"] == 0 and row["prefix_hits"] == 0
        assert 0 < row["ttft_p50"] <= row["ttft_p95"] <= row["e2el_p99"]


def test_conditions_were_read_from_the_servers(report):
    assert report["whole"] is True
    assert len(set(report["conditions"].values())) == 1 and len(report["conditions"]) == 3


def test_no_prompt_is_in_a_log_and_no_server_is_left(run):
    logs = list((run[1] / "logs").glob("*.server.log"))
    assert len(logs) == 3
    for log in logs:
        text = log.read_text()
        assert "Application startup complete" in text and SECRET not in text
        port = int(re.search(r"'port': (\d+)", text)[1])
        with socket.socket() as s:
            assert s.connect_ex(("127.0.0.1", port)) != 0


def test_a_second_run_with_resume_has_nothing_to_do(run, report, model_path):
    """It makes the report anew from what is there, in seconds."""
    status, folder, _ = run
    before = json.loads((folder / "report.json").read_text())
    done = compare(model_path(), folder.parent, "--resume")
    assert done.returncode == status, done.stderr
    assert "starting a server" not in done.stderr
    assert json.loads((folder / "report.json").read_text())["figures"] == before["figures"]


def test_the_page_shows_its_plots(run, tmp_path):
    """In a browser, where there is one: the colours of all three sides are on the picture."""
    page = run[1] / "report.html"
    plots = re.findall(r"<svg.*?</svg>", page.read_text(), re.DOTALL)
    assert len(plots) == 7
    for plot in plots:
        ElementTree.fromstring(plot)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        pytest.skip(f"the plots are well-formed; no browser to draw them: {', '.join(BROWSERS)}")
    shot = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
    subprocess.run([browser, *flags, page.as_uri()], capture_output=True, timeout=120, check=True)
    seen = Counter(Image.open(shot).convert("RGB").getdata())
    for colour in COLOURS[:3]:
        rgb = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert seen[rgb] > 1000, f"{colour} is hardly on the picture"
