"""From pieces to figures: each side against the baseline, and the baseline against itself.

The second is the noise floor: what a difference of nothing looks like, on this machine, at the same
concurrency, with a server started anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from s4kv_ext.compare import agreement
from s4kv_ext.compare.speed import LATENCIES, PERCENTILES
from s4kv_ext.compare.store import Piece, Store


@dataclass(frozen=True)
class Metric:
    what: str
    higher: bool = False
    ratio: bool = False


METRICS = {
    "quality": Metric("mean score of the tasks, times the baseline's", True, True),
    "agreement": Metric("share of greedy tokens before the first that differs", True),
    "whole": Metric("share of greedy texts that are equal to the end", True),
    "kl": Metric("mean KL to the baseline at prompt positions, nats"),
    "top1": Metric("share of prompt positions with the same likeliest token", True),
    "kl_text": Metric("mean KL at answered positions, to the first difference, nats"),
    "top1_text": Metric("share of answered positions with the same likeliest token", True),
    "kv_tokens": Metric("tokens that the KV cache holds, times the baseline's", True, True),
    "max_concurrency": Metric(
        "longest requests that fit at once, times the baseline's", True, True
    ),
    "filled": Metric(
        "tokens really held at the first preemption, times the baseline's", True, True
    ),
    "requests_per_s": Metric("finished requests a second, times the baseline's", True, True),
    "tokens_per_s": Metric("output tokens a second, times the baseline's", True, True),
    **{
        f"{m}_p{p}": Metric(f"{m.upper()}, percentile {p}, times the baseline's", False, True)
        for m in LATENCIES
        for p in PERCENTILES
    },
    "preemptions": Metric("preemptions while speed was measured"),
    "errors": Metric("requests that failed while speed was measured"),
}
OF_SPEED = {"requests_per_s": "request_throughput", "tokens_per_s": "output_throughput"}


@dataclass
class Figures:
    """Of one side. ``values`` by metric; ``floor`` of the same metrics, from the baseline alone."""

    name: str
    values: dict[str, float] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)  # by group, a round each
    refused: dict[str, str] = field(default_factory=dict)  # by group, what the server said
    alike: list[tuple[str, int, int]] = field(default_factory=list)  # task, equal, all tokens
    positions: int = 0
    unread: int = 0  # prompt positions that may have read nothing from the cache
    capacity: dict[str, Any] = field(default_factory=dict)
    fill: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, dict[str, float]] = field(default_factory=dict)  # by rate, means over rounds
    facts: dict[str, Any] = field(default_factory=dict)
    prefix_hits: float = 0.0
    measured: int = 0


class Reader:
    """The pieces of one side."""

    def __init__(self, store: Store, slug: str, rounds: int) -> None:
        self.store, self.slug, self.rounds = store, slug, rounds

    def get(self, turn: int, kind: str, name: str = "") -> Any:
        return self.store.get(Piece(self.slug, turn, kind, name))

    def all(self, kind: str, name: str = "") -> list[Any]:
        return [x for r in range(self.rounds) if (x := self.get(r, kind, name)) is not None]


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def scores(
    reader: Reader, turn: int, groups: Sequence[str], tasks: Sequence[str]
) -> dict[str, float]:
    """Mean score of each group that has right answers, tasks of lm-eval included."""
    found = {}
    for name in groups:
        piece = reader.get(turn, "quality", name) or {"answers": []}
        of = [a["score"] for a in piece["answers"] if a.get("score") is not None]
        if of:
            found[name] = fmean(of)
    for task in tasks:
        piece = reader.get(turn, "lm-eval", task) or {"scores": {}}
        found |= {f"lm-eval {name}": value for name, value in piece["scores"].items()}
    return found


def overall(of: dict[str, float], names: Iterable[str]) -> float | None:
    """Every group weighs the same."""
    return mean(of[n] for n in names if n in of)


def answers(piece: Any) -> dict[str, Any]:
    return {a["id"]: a for a in (piece or {"answers": []})["answers"] if "error" not in a}


Row = tuple[str, int, int, list[tuple[float, bool]]]


def texts(a: Reader, ra: int, b: Reader, rb: int, groups: Sequence[str]) -> list[Row]:
    """Task, equal tokens, all tokens, and what differs at each position up to the first that does;
    up to there both sides saw the same tokens."""
    found = []
    for name in groups:
        x, y = answers(a.get(ra, "quality", name)), answers(b.get(rb, "quality", name))
        for task in sorted(x.keys() & y.keys()):
            p, q = x[task], y[task]
            same = agreement.common(p["tokens"], q["tokens"])
            both = agreement.compared(p["tops"][: same + 1], q["tops"][: same + 1])
            length = max(len(p["tokens"]), len(q["tokens"]))
            found.append((f"{name} {task}", same, length, both))
    return sorted(found)


def prompts(
    a: Reader, ra: int, b: Reader, rb: int, groups: Sequence[str], chunk: int
) -> tuple[list[tuple[float, bool]], int]:
    """What differs at each prompt position past the first chunk, and how many lie within it: those
    attend to the chunk's own keys and values, and to nothing that a cache has changed."""
    found, unread = [], 0
    for name in groups:
        x, y = answers(a.get(ra, "prompts", name)), answers(b.get(rb, "prompts", name))
        for task in sorted(x.keys() & y.keys()):
            skip = max(chunk - x[task]["first"], 0)
            p, q = x[task]["tops"], y[task]["tops"]
            unread += min(skip, len(p))
            found += agreement.compared(p[skip:], q[skip:])
    return found, unread


def likeness(
    pairs: Sequence[tuple[int, int]], a: Reader, b: Reader, groups: Sequence[str], chunk: int
) -> tuple[dict[str, float], list[Row], int, int]:
    """The absolute figures of b against a, over pairs of rounds."""
    rows, scored, unread = [], [], 0
    for ra, rb in pairs:
        rows += texts(a, ra, b, rb, groups)
        more, left = prompts(a, ra, b, rb, groups, chunk)
        scored += more
        unread += left
    answered = [x for *_, both in rows for x in both]
    told = {
        "agreement": mean(same / n if n else 1.0 for _, same, n, _ in rows),
        "whole": mean(float(same == n) for _, same, n, _ in rows),
        "kl": mean(k for k, _ in scored),
        "top1": mean(t for _, t in scored),
        "kl_text": mean(k for k, _ in answered),
        "top1_text": mean(t for _, t in answered),
    }
    return {k: v for k, v in told.items() if v is not None}, rows, len(scored), unread


def worst(values: Iterable[float], higher: bool) -> float | None:
    found = list(values)
    return (min if higher else max)(found) if found else None


def speed_ratios(
    base: dict[str, dict[str, float]], side: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Of each metric the worst ratio over the request rates."""
    found = {}
    for name, metric in METRICS.items():
        key = OF_SPEED.get(name, name)
        pairs = [(base[r].get(key), side[r].get(key)) for r in base.keys() & side.keys()]
        ratio = worst([y / x for x, y in pairs if x and y is not None], metric.higher)
        if ratio is not None and metric.ratio:
            found[name] = ratio
    return found


def averaged(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {k: fmean(r[k] for r in rows) for k in rows[0]}


def speeds(
    reader: Reader, rates: Sequence[str], turn: int | None = None
) -> dict[str, dict[str, float]]:
    found = {}
    for rate in rates:
        rows = reader.all("speed", rate) if turn is None else [reader.get(turn, "speed", rate)]
        if rows and rows[0]:
            found[rate] = averaged(rows)
    return found


def ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None


def collect(
    store: Store, names: Sequence[tuple[str, str]], groups: Sequence[str], lm_tasks: Sequence[str],
    rates: Sequence[str], rounds: int,
) -> list[Figures]:  # fmt: skip
    """The figures of all sides, the baseline's first; names are pairs of name and slug."""
    readers = [Reader(store, slug, rounds) for _, slug in names]
    base = readers[0]
    facts: dict[str, Any] = next(iter(base.all("facts")), {})
    chunk = int(facts.get("chunk") or 0)
    all_scores = [[scores(r, t, groups, lm_tasks) for t in range(rounds)] for r in readers]
    noise, own_rows = floor(base, all_scores[0], groups, rates, chunk)
    found: list[Figures] = []
    for (name, _), reader, own in zip(names, readers, all_scores):
        f = Figures(name, floor=noise, alike=own_rows)
        f.facts = next(iter(reader.all("facts")), {})
        f.capacity = reader.get(0, "capacity") or {}
        f.fill = reader.get(rounds - 1, "fill") or {}
        f.speed = speeds(reader, rates)
        f.measured = sum(bool(reader.all("quality", g)) for g in groups) + len(f.speed)
        for group in dict.fromkeys(g for s in own for g in s):
            f.scores[group] = [s[group] for s in own if group in s]
        for group in groups:
            for piece in reader.all("quality", group):
                f.prefix_hits += piece["prefix_hits"]
                for a in piece["answers"]:
                    if "error" in a:
                        f.refused[group] = a["error"]
        if reader is not base:
            against(f, found[0], base, reader, all_scores[0], own, groups, chunk)
        if f.speed:
            f.values["preemptions"] = sum(r["preemptions"] for r in f.speed.values())
            f.values["errors"] = sum(r["failed"] for r in f.speed.values())
        found.append(f)
    return found


def against(
    f: Figures, first: Figures, base: Reader, reader: Reader, base_scores: list[dict[str, float]],
    own: list[dict[str, float]], groups: Sequence[str], chunk: int,
) -> None:  # fmt: skip
    """Fill in what stands against the baseline."""
    turns = [(r, r) for r in range(base.rounds)]
    f.values, rows, f.positions, f.unread = likeness(turns, base, reader, groups, chunk)
    f.alike = [row[:3] for row in rows]
    common = sorted(set().union(*base_scores) & set().union(*own))
    before = mean(x for s in base_scores if (x := overall(s, common)) is not None)
    after = mean(x for s in own if (x := overall(s, common)) is not None)
    told = {"quality": ratio(before, after)}
    for name in ("kv_tokens", "max_concurrency"):
        told[name] = ratio(first.capacity.get(name), f.capacity.get(name))
    if first.fill.get("ended") == "preempted":  # where it never was, more may have fitted
        told["filled"] = ratio(first.fill.get("tokens"), f.fill.get("tokens"))
    f.values |= {k: v for k, v in told.items() if v is not None}
    f.values |= speed_ratios(first.speed, f.speed)


def floor(
    base: Reader, base_scores: list[dict[str, float]], groups: Sequence[str], rates: Sequence[str],
    chunk: int,
) -> tuple[dict[str, float], list[tuple[str, int, int]]]:  # fmt: skip
    """The same figures of the baseline, each round against the one before, and its ``alike``."""
    turns = list(pairwise(range(base.rounds)))
    found, rows, *_ = likeness(turns, base, base, groups, chunk)
    ratios: dict[str, list[float]] = {}
    for ra, rb in turns:
        names = sorted(base_scores[ra].keys() & base_scores[rb].keys())
        quality = ratio(overall(base_scores[ra], names), overall(base_scores[rb], names))
        if quality is not None:
            ratios.setdefault("quality", []).append(quality)
        for name, value in speed_ratios(speeds(base, rates, ra), speeds(base, rates, rb)).items():
            ratios.setdefault(name, []).append(value)
    furthest: Callable[[float], float] = lambda x: abs(x - 1)  # noqa: E731
    noise = found | {name: max(values, key=furthest) for name, values in ratios.items()}
    return noise, [row[:3] for row in rows]


def inside(name: str, value: float, noise: dict[str, float]) -> bool:
    """Is a difference no larger than the baseline's own?"""
    if name not in noise:
        return False
    if METRICS[name].ratio:
        return abs(value - 1) <= abs(noise[name] - 1)
    return value >= noise[name] if METRICS[name].higher else value <= noise[name]
