"""The report's plots, from the figures; one that has nothing to show is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from s4kv_ext.compare.figures import Figures
from s4kv_ext.compare.svg import bars, lines

LATENCY = {"ttft_p95": "TTFT, p95", "tpot_p95": "TPOT, p95", "e2el_p95": "whole request, p95"}
STEPS = 10


def capacity(figures: Sequence[Figures]) -> str:
    told = {f.name: [f.capacity.get("kv_tokens"), f.fill.get("tokens")] for f in figures}
    names = ["as the server says", "held when filled"]
    return bars("Tokens in the KV cache", "tokens", names, told)


def scores(figures: Sequence[Figures]) -> str:
    """A bar is the mean of the rounds, the line on it their range."""
    groups = list(dict.fromkeys(g for f in figures for g in f.scores))
    rounds = {f.name: [f.scores.get(g) for g in groups] for f in figures}
    means = {n: [sum(x) / len(x) if x else None for x in of] for n, of in rounds.items()}
    spread = {n: [(min(x), max(x)) if x else None for x in of] for n, of in rounds.items()}
    return bars("Score by task, line: range over the rounds", "", groups, means, spread)


def still_equal(figures: Sequence[Figures]) -> str:
    """How many texts have not differed yet, against the share of their length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for f in figures:  # the baseline against itself too
        shares = [same / n if n else 1.0 for _, same, n in f.alike]
        at = [
            (s, sum(x >= s / STEPS for x in shares) / max(len(shares), 1)) for s in range(STEPS + 1)
        ]
        series[f.name] = [(float(s), y) for s, y in at] if shares else []
    labels = [f"{s * 100 // STEPS} %" for s in range(STEPS + 1)]
    return lines("Texts equal to the baseline's so far", "share", "of the text", series, labels)


def over_rates(figures: Sequence[Figures], key: str, title: str, unit: str) -> str:
    rates = list(dict.fromkeys(r for f in figures for r in f.speed))
    series = {
        f.name: [(float(i), f.speed[r][key]) for i, r in enumerate(rates) if r in f.speed]
        for f in figures
        if f.speed
    }
    return lines(title, unit, "request rate, a second", series, rates)


def all_of(figures: Sequence[Figures]) -> Iterator[str]:
    if any(f.capacity.get("kv_tokens") for f in figures):
        yield capacity(figures)
    if any(f.scores for f in figures):
        yield scores(figures)
    if len(figures) > 1 and all(f.alike for f in figures[1:]):
        yield still_equal(figures)
    if any(f.speed for f in figures):
        for key, title in LATENCY.items():
            yield over_rates(figures, key, title, "ms")
        yield over_rates(figures, "output_throughput", "Output", "tokens a second")
