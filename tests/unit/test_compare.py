"""`s4kv compare` as a command, on servers that start at once (`fake_vllm.py`)."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import fake_vllm
import pytest
from fake_vllm import Fake

from s4kv_ext import cli
from s4kv_ext.compare import lm_eval, servers, speed, verdict
from s4kv_ext.compare.cli import split
from s4kv_ext.compare.sides import check_serve_arguments, sides

HERE = Path(__file__).parent
TASKS = [
    {"prompt": "The capital of France is", "expected": "Paris", "id": "paris"},
    {"messages": [{"role": "user", "content": "Say and, then a needle"}], "regex": "and"},
    {"prompt": "Once upon a time there was a very small village", "max_tokens": 12},
]
QUICK = ["--builtin", "none", "--fill-seconds", "5", "--fill-len", "50"]


@pytest.fixture
def fakes():
    made: list[Fake] = []

    def start(*dtypes: str, **config: object) -> list[str]:
        for dtype in dtypes:
            made.append(Fake(dtype, **config).start())
        return [x for f in made for x in ("--url", f"{f.dtype}={f.url}")]

    start.made = made  # type: ignore[attr-defined]
    yield start
    for f in made:
        f.shutdown()


@pytest.fixture
def tasks(tmp_path) -> list[str]:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, TASKS)))
    return ["--tasks", str(path)]


@pytest.fixture
def command(tmp_path, monkeypatch) -> Path:
    """`vllm`, but the fake one."""
    path = tmp_path / "vllm"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_vllm.py"} "$@"\n')
    path.chmod(0o755)
    for module in (servers, speed):
        monkeypatch.setattr(module, "vllm", lambda: str(path))
    return path


@pytest.fixture
def compare(tmp_path, monkeypatch, capfd):
    """Run the command; its exit status, its report, and what it printed."""
    out = tmp_path / "report"

    def run(*args: str) -> tuple[int, dict, str]:
        monkeypatch.setattr(sys, "argv", ["s4kv", "compare", "--out", str(out), *QUICK, *args])
        with pytest.raises(SystemExit) as e:
            cli.main()
        told = capfd.readouterr()
        path = out / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        return int(e.value.code), report, told.out + told.err

    run.out = out  # type: ignore[attr-defined]
    return run


def values(report: dict, side: str) -> dict:
    return next(f for f in report["figures"] if f["name"] == side)["values"]


def test_equal_servers_are_equal(compare, fakes, tasks):
    urls = fakes("auto", "fp8")
    status, report, told = compare(*urls, *tasks, "--skip", "speed")
    assert status == 0, told
    assert values(report, "fp8")["quality"] == 1
    assert values(report, "fp8")["agreement"] == 1
    assert 0 < values(report, "fp8")["kl"] < 1e-4
    assert report["figures"][0]["floor"]["kl"] == 0
    assert values(report, "fp8")["kv_tokens"] == 2
    assert report["first"][0].startswith("fp8 is BETTER than auto: kv_tokens 2 ×")
    assert report["first"][0] in told
    assert (compare.out / "report.md").read_text().splitlines()[0] == report["first"][0]


def test_a_broken_cache_is_worse(compare, fakes, tasks):
    urls = fakes("auto", "broken")
    status, report, told = compare(*urls, *tasks, "--skip", "speed", "--fail-if", "top1<0.9")
    assert status == 1
    assert report["first"][0].startswith(
        "broken is WORSE than auto: quality 0, not >= 0.99; top1 0"
    )
    assert "--fail-if: broken: top1 is 0, top1<0.9" in told
    assert values(report, "broken")["whole"] == 0


def test_a_condition_that_does_not_hold_leaves_the_status_0(compare, fakes, tasks):
    urls = fakes("auto", "fp8")
    gates = ["--fail-if", "quality<0.99", "--fail-if", "kl>0.1"]
    assert compare(*urls, *tasks, "--skip", "speed", *gates)[0] == 0


def test_what_was_not_measured_does_not_open_a_gate(compare, fakes, tasks):
    urls = fakes("auto", "fp8")
    status, _, told = compare(*urls, *tasks, "--skip", "speed", "--fail-if", "ttft_p95>1.2")
    assert status == 1 and "ttft_p95 was not measured" in told


def test_every_request_is_cold_greedy_and_the_same_on_both_sides(compare, fakes, tasks):
    compare(*fakes("auto", "fp8"), *tasks, "--skip", "speed,fill")
    first, second = (f.asked for f in fakes.made)
    salts = [b.pop("cache_salt") for b in first + second]
    assert len(set(salts)) == len(salts)
    assert all(b["temperature"] == 0 for b in first)
    key = lambda b: json.dumps(b, sort_keys=True)  # noqa: E731
    assert sorted(first, key=key) == sorted(second, key=key)


def test_unequal_servers_are_refused(compare, fakes, tasks):
    urls = fakes("auto")
    status, report, told = compare(*fakes("fp8", seed=1), *tasks, "--skip", "speed")
    assert len(urls) == 2 and status == 2 and not report
    assert re.search(r"auto and fp8 differ .*config.model_config.seed: 0 \| 1;", told)
    assert told.strip().count("\n") <= 3 and "Traceback" not in told


def test_servers_that_tell_less_are_compared_by_what_they_tell(compare, fakes, tasks):
    urls = fakes("auto", "fp8")
    for f in fakes.made:
        f.development = False
    status, report, _ = compare(*urls, *tasks, "--skip", "speed")
    assert status == 0 and report["whole"] is False
    assert "VLLM_SERVER_DEV_MODE=1" in (compare.out / "report.md").read_text()


def test_secrets_and_prompts_are_not_kept(compare, fakes, tasks):
    compare(*fakes("auto", "fp8"), *tasks, "--skip", "speed")
    import gzip

    for path in compare.out.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
            assert "hf_secret" not in text and "capital of France" not in text, path


def test_only_positions_that_read_the_cache_count(compare, fakes, tasks):
    _, report, _ = compare(*fakes("auto", "broken"), *tasks, "--skip", "speed")
    broken = report["figures"][1]
    lengths = [len(fake_vllm.text_of(t).split()) for t in TASKS]
    assert broken["positions"] == 2 * sum(n - fake_vllm.CHUNK for n in lengths)
    assert broken["unread"] == 2 * sum(fake_vllm.CHUNK - 1 for n in lengths)
    assert values(report, "broken")["top1"] == 0


def test_resume_measures_only_what_is_missing(compare, fakes, tasks):
    urls = fakes("auto", "fp8")
    args = [*urls, *tasks, "--skip", "speed"]
    compare(*args)
    status, _, told = compare(*args)
    assert status == 2 and "--resume goes on with it" in told
    for f in fakes.made:
        f.asked.clear()
    (compare.out / "pieces" / "fp8.1.quality-mine.json.gz").unlink()
    status, report, _ = compare(*args, "--resume")
    assert status == 0 and values(report, "fp8")["agreement"] == 1
    asked = [[b for b in f.asked if b["max_tokens"] > 8] for f in fakes.made]
    assert [len(a) for a in asked] == [0, 3]  # not counting the warm-up
    status, _, told = compare(*args, "--resume", "--top", "5")
    assert status == 2 and "begun with other settings (top)" in told


def test_resume_of_nothing(compare, fakes, tasks):
    status, _, told = compare(*fakes("auto", "fp8"), *tasks, "--resume")
    assert status == 2 and "holds no run" in told


def test_a_refused_task_is_told(compare, fakes, tasks, tmp_path):
    (tmp_path / "mine.jsonl").write_text(
        "\n".join(map(json.dumps, [*TASKS, {"prompt": "too long", "expected": "x"}]))
    )
    status, report, _ = compare(*fakes("auto", "fp8"), *tasks, "--skip", "speed")
    assert status == 0
    assert report["refused"]["fp8"] == {"mine": "the prompt is too long"}


def test_own_servers_speed_and_fill(compare, command, tasks):
    args = ["model", "--kv", "auto", "--kv", "slow", *tasks, "--rates", "1,inf"]
    status, report, told = compare(*args, "--fail-if", "tpot_p95>1.5", "--", "--max-model-len", "9")
    assert status == 1, told
    slow = values(report, "slow")
    assert slow["ttft_p95"] == slow["e2el_p99"] == 2 and slow["tokens_per_s"] == 0.5
    assert report["figures"][0]["floor"]["ttft_p95"] == 1
    assert report["figures"][0]["speed"]["inf"]["itl_p99"] == 297
    assert report["figures"][1]["fill"]["ended"] == "preempted"
    held = report["figures"][1]["fill"]["tokens"]
    assert held >= 50 * fake_vllm.HOLDS and held % 50 == 0
    assert "slow is WORSE than auto: ttft_p95 2, not <= 1.2" in told


def test_an_error_in_a_stream_is_no_preemption(compare, command, tasks):
    args = ["model", "--kv", "auto", "--kv", "cut", *tasks, "--skip", "speed"]
    status, report, told = compare(*args)
    assert status == 1
    assert report["first"][0].startswith("cut against auto is INCOMPLETE")
    failure = report["failures"][0]
    assert failure["what"] == "fill" and "no page is left" in failure["message"], told


def test_a_server_that_dies_does_not_cost_the_other(compare, command, tasks):
    args = ["model", "--kv", "auto", "--kv", "dies", *tasks, "--skip", "speed,fill"]
    status, report, told = compare(*args)
    assert status == 1
    assert report["first"][0].startswith("dies against auto is INCOMPLETE")
    failure = report["failures"][0]
    assert failure["side"] == "dies" and "EngineCore failed: out of memory" in failure["message"]
    assert "exit status 3" in failure["message"] and failure["message"] in told
    assert report["figures"][0]["scores"]["mine"] == [1, 1]


def test_a_server_that_never_starts_is_reported_once(compare, command, tasks):
    args = ["model", "--kv", "auto", "--kv", "never", *tasks, "--skip", "speed,fill", "--together"]
    status, report, told = compare(*args)
    assert status == 1 and told.count("no kernels for it") == 1
    assert [f["what"] for f in report["failures"]] == ["start"]
    assert report["figures"][0]["scores"]["mine"] == [1, 1]


def test_ctrl_c_keeps_what_is_done_and_ends_the_servers(compare, command, tasks):
    model = str(command.parent / "model")
    args = ["compare", model, "--kv", "auto", "--kv", "slow", *tasks, *QUICK, "--skip", "speed"]
    args += ["--out", str(compare.out), "--together", "--fill-seconds", "60"]
    code = (
        "import time\n"
        "from s4kv_ext import cli\n"
        "from s4kv_ext.compare import servers, fill\n"
        f"servers.vllm = lambda: {str(command)!r}\n"
        "fill.fill = lambda *a: time.sleep(60)\n"
        "cli.main()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, *args], stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
        text=True, cwd=HERE.parents[1],
    )  # fmt: skip
    last = compare.out / "pieces" / "slow.1.prompts-mine.json.gz"
    for _ in range(200):
        if last.exists() or run.poll() is not None:
            break
        time.sleep(0.1)
    os.kill(run.pid, signal.SIGINT)
    told, _ = run.communicate(timeout=180)
    assert run.returncode == 130, told
    assert "--resume goes on" in told and "Traceback" not in told
    assert last.exists()
    first = (compare.out / "report.md").read_text().splitlines()[0]
    assert "INCOMPLETE: interrupted" in first
    left = subprocess.run(["pgrep", "-f", f"serve {model}"], check=False)
    assert left.returncode == 1


class Strict(HTMLParser):
    """Every tag is closed in order; nothing is loaded from anywhere."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object"), tag
        for name, value in attrs:
            assert name not in ("src", "href", "onload"), (tag, name, value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass


def test_the_page_is_well_formed_and_its_plots_show_the_figures(compare, command, tasks):
    compare("model", "--kv", "auto", "--kv", "fp8", *tasks, "--rates", "1,inf")
    page = (compare.out / "report.html").read_text()
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert not parser.open
    plots = [ElementTree.fromstring(x) for x in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    titles = [p.attrib["aria-label"] for p in plots]
    assert titles[0] == "Tokens in the KV cache" and len(titles) == 7
    svg = "{http://www.w3.org/2000/svg}"
    bars = [r for r in plots[0].iter(f"{svg}rect") if r.get("class") == "bar"]
    heights = [float(b.attrib["height"]) for b in bars]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.02)  # 1000 and 2000 tokens
    assert [b.find(f"{svg}title").text for b in bars][:2] == [
        "auto, as the server says: 1000 tokens",
        "fp8, as the server says: 2000 tokens",
    ]
    points = list(plots[3].iter(f"{svg}circle"))
    assert len(points) == 4  # two sides at two rates
    for plot in plots:
        for node in plot.iter():
            for name in ("x", "y", "cx", "cy", "width", "height"):
                assert 0 <= float(node.get(name, 0)) <= 640, (node.tag, node.attrib)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--kv", "auto"], "two sides are needed"),
        (["m", "--kv", "auto", "--kv", "auto"], "same name"),
        (["m", "--kv", "auto", "--kv", "int4_kivi:map=/no/such"], "no file /no/such"),
        (["m", "--kv", "auto", "--kv", "fp8:map=x"], "settings are int4_kivi:map=FILE"),
        (["--kv", "auto", "--kv", "fp8"], "MODEL goes with --kv"),
        (["--url", "a=b", "--url", "c=d"], "NAME=http://HOST:PORT"),
        (["m", "--kv", "auto", "--kv", "fp8", "--builtin", "riddles"], "no set 'riddles'"),
        (["m", "--kv", "auto", "--kv", "fp8", "--fail-if", "speed>2"], "no metric 'speed'"),
        (["m", "--kv", "auto", "--kv", "fp8", "--fail-if", "quality"], "is no condition"),
        (["m", "--kv", "auto", "--kv", "fp8"], "no tasks"),
        (["m", "--kv", "auto", "--kv", "fp8", "--", "--port", "1"], "leave out --port"),
        (["m", "--kv", "auto", "--kv", "fp8", "--", "--kv-cache-dtype=auto"], "leave out --kv"),
    ],
)
def test_wrong_arguments_are_one_line(compare, args, told):
    status, _, said = compare(*args)
    assert status == 2 and told in said and said.count("\n") == 1


def test_two_files_of_one_name_are_refused(compare, fakes, tasks):
    status, _, said = compare(*fakes("auto", "fp8"), *tasks, *tasks)
    assert status == 2 and "two tasks of 'mine' have the id 'paris'" in said


def test_a_missing_server_is_one_line(compare, tasks):
    urls = ["--url", "a=http://127.0.0.1:9", "--url", "b=http://127.0.0.1:9"]
    status, _, said = compare(*urls, *tasks)
    assert status in (1, 2) and "does not answer" in said and "Traceback" not in said


def test_lm_eval_is_left_out_with_a_line_where_it_is_missing(compare, fakes, tasks, monkeypatch):
    monkeypatch.setattr(lm_eval, "installed", lambda: False)
    args = [*fakes("auto", "fp8"), *tasks, "--skip", "speed,fill", "--lm-eval", "gsm8k"]
    status, _, told = compare(*args)
    assert status == 0 and "pip install lm-eval[api]" in told


def test_lm_eval_counts_what_is_better_when_higher(tmp_path):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "results_1.json").write_text(
        json.dumps(
            {
                "results": {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1, "ppl": 9}},
                "higher_is_better": {"t": {"acc": True, "ppl": False}},
            }
        )
    )
    assert lm_eval.scores(tmp_path) == {"t acc": 0.5}


def test_help_lists_metrics_and_the_form_of_tasks(compare):
    status, _, told = compare("--help")
    assert status == 0
    for word in (
        "--fail-if",
        "ttft_p95",
        "default thresholds: quality>=0.99",
        '"expected": "Paris"',
    ):
        assert word in told


def documented() -> list[str]:
    text = (HERE.parents[1] / "docs" / "compare.md").read_text().replace("\\\n", " ")
    return re.findall(r"^ {4}(s4kv compare .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("line", documented())
def test_every_documented_command_is_real(line):
    own, rest = split(shlex.split(line)[1:])
    args = cli.parser().parse_args(own)
    assert args.out and (args.kv or args.url)
    assert all(verdict.parse(x) for x in [*args.threshold, *args.fail_if])
    check_serve_arguments(rest, sides(args.kv and ["auto", "fp8"], args.url))


def test_the_documented_defaults_are_real():
    text = (HERE.parents[1] / "docs" / "compare.md").read_text()
    assert " ".join(verdict.DEFAULTS) in " ".join(text.split())
    assert len(documented()) >= 5
