"""`s4kv compare`: figures, the noise floor, thresholds and the verdict."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from s4kv_ext.compare import capacity, figures, fill, plan, servers, svg, verdict
from s4kv_ext.compare.conditions import MAY_DIFFER
from s4kv_ext.compare.figures import Figures
from s4kv_ext.compare.scrape import Scrape
from s4kv_ext.compare.sides import from_kv
from s4kv_ext.compare.store import Piece, Store

LIMITS = verdict.thresholds([])
GOOD = {"quality": 1.0, "agreement": 0.9, "kl": 0.001, "top1": 0.99, "kv_tokens": 1.0}


def judged(values: dict, floor: dict | None = None, lacking: str = "") -> verdict.Verdict:
    return verdict.judge(Figures("b", GOOD | values, floor or {}), LIMITS, lacking)


@pytest.mark.parametrize(
    ("values", "floor", "word"),
    [
        ({}, {}, "equal"),
        ({"kv_tokens": 3.0}, {}, "better"),
        ({"kv_tokens": 0.9}, {}, "worse"),
        ({"quality": 0.98}, {}, "worse"),
        ({"quality": 0.98}, {"quality": 1.03}, "equal"),  # the baseline differs as much
        ({"quality": 0.96}, {"quality": 1.03}, "worse"),
        ({"kl": 0.05}, {"kl": 0.06}, "equal"),
        ({"kl": 0.05}, {"kl": 0.04}, "worse"),
        ({"top1": 0.9}, {"top1": 0.89}, "equal"),
        ({"ttft_p95": 1.3}, {"ttft_p95": 1.1}, "worse"),
        ({"ttft_p95": 1.3}, {"ttft_p95": 0.6}, "equal"),
        ({"ttft_p95": 0.5}, {"ttft_p95": 1.1}, "better"),
        ({"ttft_p95": 0.5}, {}, "equal"),  # without a noise floor it proves nothing
        ({"tokens_per_s": 2.0}, {"tokens_per_s": 0.99}, "better"),
        ({"errors": 1.0}, {}, "worse"),
    ],
)
def test_word(values, floor, word):
    v = judged(values, floor)
    assert v.word == word, v


def test_a_missed_threshold_inside_the_noise_is_called_so():
    v = judged({"quality": 0.98, "kv_tokens": 3.0}, {"quality": 0.97})
    assert "inside the noise floor: quality 0.98, not >= 0.99" in verdict.line(v, "a")
    assert verdict.line(v, "a").startswith("b is BETTER than a: kv_tokens 3 ×")


def test_worse_counts_though_something_is_missing():
    assert judged({}, lacking="interrupted").word == "incomplete"
    assert judged({"quality": 0.5}, lacking="interrupted").word == "worse"
    assert verdict.judge(Figures("b", {"kv_tokens": 3.0}), LIMITS, "").word == "incomplete"


def test_own_thresholds_replace_those_of_the_same_metric():
    own = verdict.thresholds([verdict.parse("kl <= 1e-3"), verdict.parse("e2el_p99<2")])
    told = [str(c) for c in own]
    assert "kl<=0.001" in told and "kl<=0.02" not in told
    assert "quality>=0.99" in told and told[-1] == "e2el_p99<2"


@pytest.mark.parametrize("text", ["", "kl", "kl=1", "kl<", "kl<x", "<1", "kl<1<2", "kl<1e"])
def test_what_is_no_condition(text):
    with pytest.raises(ValueError, match="is no"):
        verdict.parse(text)


def test_order_alternates():
    sides = [from_kv("auto"), from_kv("fp8"), from_kv("int4_kivi")]
    told = [(s.name, r) for s, r in plan.order(sides, 2)]
    assert [n for n, _ in told] == ["auto", "fp8", "int4_kivi", "int4_kivi", "fp8", "auto"]
    assert [r for _, r in told] == [0, 0, 0, 1, 1, 1]


def test_noise_of_a_ratio_is_two_sided():
    assert figures.inside("quality", 1.02, {"quality": 0.97})
    assert not figures.inside("quality", 1.04, {"quality": 0.97})
    assert not figures.inside("quality", 1.0, {})
    assert figures.inside("agreement", 0.95, {"agreement": 0.9})


def test_speed_is_judged_by_its_worst_rate():
    base = {"1": {"ttft_p95": 10.0, "output_throughput": 5.0}, "4": {"ttft_p95": 20.0}}
    side = {"1": {"ttft_p95": 5.0, "output_throughput": 6.0}, "4": {"ttft_p95": 30.0}}
    assert figures.speed_ratios(base, side) == {"tokens_per_s": 1.2, "ttft_p95": 1.5}


def answers(*scores: float) -> dict:
    one = {"text": "", "tokens": [1], "tops": [{"1": -0.1}], "finish": "stop"}
    rows = [one | {"id": str(i), "score": s} for i, s in enumerate(scores)]
    return {"answers": rows, "prefix_hits": 0}


def test_the_noise_floor_is_the_baseline_against_itself(tmp_path):
    store = Store(tmp_path / "out", {}, False)
    for slug, turn, scores in [
        ("a", 0, (1, 1)),
        ("a", 1, (1, 0)),
        ("b", 0, (1, 0)),
        ("b", 1, (1, 1)),
    ]:
        store.put(Piece(slug, turn, "quality", "t"), answers(*scores))
    base, side = figures.collect(store, [("a", "a"), ("b", "b")], ["t"], [], [], 2)
    assert base.floor["quality"] == 0.5 and side.values["quality"] == 1.0
    assert side.scores == {"t": [0.5, 1.0]}


def test_every_group_weighs_the_same(tmp_path):
    store = Store(tmp_path / "out", {}, False)
    for slug, right in (("a", 1), ("b", 0)):
        store.put(Piece(slug, 0, "quality", "many"), answers(*[1] * 9))
        store.put(Piece(slug, 0, "quality", "one"), answers(right))
    _, side = figures.collect(store, [("a", "a"), ("b", "b")], ["many", "one"], [], [], 1)
    assert side.values["quality"] == 0.5 and side.floor == {}


def test_capacity_counts_all_engines_and_reads_the_log():
    cache = {
        "num_gpu_blocks": "10",
        "kv_cache_size_tokens": "1024",
        "kv_cache_memory_bytes": "None",
    }
    facts = {"cache": cache, "engines": 2, "max_model_len": 100}
    told = capacity.read(facts, "INFO Available KV cache memory: 2.0 GiB\n")
    assert told["kv_tokens"] == 2048 and told["bytes_a_token"] == 2**21
    assert told["max_concurrency"] is None and told["memory_bytes"] == 2**32
    assert capacity.read(facts, "")["bytes_a_token"] is None


def metrics(running: int, waiting: int, preempted: int = 0) -> Scrape:
    return Scrape(
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {running}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting {waiting}\n"
        f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total {preempted}\n"
    )


def test_a_preemption_shows_before_it_is_counted():
    start, held = metrics(0, 0), {"requests": 4, "there": 9}
    assert not fill.preempted(start, metrics(4, 5), held)
    assert fill.preempted(start, metrics(5, 4, preempted=1), held)
    assert fill.preempted(start, metrics(3, 6), held)
    # One has left, with its answer or an error, or because its client went.
    assert not fill.preempted(start, metrics(3, 5), held)


def test_prompts_of_filling_leave_room_to_grow():
    assert fill.lengths(8192, 4096) == (4096, 4096)
    assert fill.lengths(1024, 4096) == (768, 256)


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("cache.cache_dtype", True),
        ("cache.num_gpu_blocks", True),
        ("cache.enable_prefix_caching", False),
        ("cache.gpu_memory_utilization", False),
        ("config.model_config.dtype", False),
        ("config.model_config.model", False),
        ("config.scheduler_config.max_num_seqs", False),
        ("config.additional_config.int4_kivi.map", True),
        ("config.additional_config.other", False),
        ("config.parallel_config.tensor_parallel_size", False),
        ("config.parallel_config.data_parallel_rpc_port", True),
    ],
)
def test_what_may_differ(name, may):
    assert bool(MAY_DIFFER.fullmatch(name)) is may


def test_plots_take_any_values():
    plots = [
        svg.bars("a < b", "t", [], {}),
        svg.bars("t", "", ["x"], {"<s>": [None], "u": [0.0]}),
        svg.bars("t", "", ["x"], {"s": [1e12]}, {"s": [(0.5e12, 2e12)]}),
        svg.lines("t", "ms", "rate", {"s": []}, []),
        svg.lines("t", "ms", "rate", {"s": [(0.0, 1e-7)]}, ["1"]),
    ]
    for plot in plots:
        ElementTree.fromstring(plot)


def test_the_tail_of_a_log_names_the_first_error(tmp_path):
    log = tmp_path / "log"
    lines = ["ValueError: of an older start", "INFO ok", "ERROR ValueError: no room", *["x"] * 20]
    log.write_text("\n".join(lines))
    told = servers.tail(log, len(lines[0])).splitlines()
    assert told[:2] == ["ERROR ValueError: no room", "…"] and len(told) == 2 + servers.TAIL
    assert servers.tail(tmp_path / "none") == ""
