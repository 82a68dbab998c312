"""The report: one HTML page that needs nothing else, and the same as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from s4kv_ext.compare import conditions, plots
from s4kv_ext.compare.figures import METRICS, Figures, inside
from s4kv_ext.compare.speed import LATENCIES, PERCENTILES
from s4kv_ext.compare.store import write
from s4kv_ext.compare.verdict import Condition, Verdict, line, number

TEMPLATES = Path(__file__).parent
SHOWN = 12  # first differences in the report; all are in the JSON


def against(figures: Sequence[Figures], limits: Sequence[Condition]) -> list[dict[str, Any]]:
    """A row a metric: every side's value, the noise floor, and which threshold it has."""
    asked: dict[str, list[str]] = {}
    for c in limits:
        asked.setdefault(c.metric, []).append(str(c))
    rows = []
    for name, metric in METRICS.items():
        values = [f.values.get(name) for f in figures[1:]]
        if all(v is None for v in values):
            continue
        noise = figures[0].floor.get(name)
        rows.append(
            {
                "name": name,
                "what": metric.what,
                "values": ["–" if v is None else number(v) for v in values],
                "noise": "–" if noise is None else number(noise),
                "inside": [v is not None and inside(name, v, figures[0].floor) for v in values],
                "limit": ", ".join(asked.get(name, [])) or "–",
            }
        )
    return rows


def show(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else number(value)


CAPACITY = {
    "kv_blocks": "blocks",
    "kv_tokens": "tokens",
    "bytes_a_token": "bytes a token",
    "memory_bytes": "bytes of memory",
    "max_concurrency": "requests of max_model_len at once",
}
FILL = {
    "tokens": "tokens held",
    "requests": "requests running",
    "usage": "share in use",
    "ended": "ended by",
    "seconds": "seconds",
}
ENDED = {
    "preempted": "the first preemption",
    "fits": "a request that was complete before any was preempted",
    "time": "the time given (--fill-seconds)",
}
SPEED = {
    **{f"{m}_p{p}": f"{m.upper()} p{p}, ms" for m in LATENCIES for p in PERCENTILES},
    "request_throughput": "requests a second",
    "output_throughput": "output tokens a second",
    "queue_ms": "mean time in the queue, ms",
    "preemptions": "preemptions",
    "failed": "failed requests",
}


def rows(names: dict[str, str], of: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"name": told, "values": [show(x.get(key)) for x in of]}
        for key, told in names.items()
        if any(x.get(key) is not None for x in of)
    ]


def context(
    figures: Sequence[Figures], verdicts: Sequence[Verdict], limits: Sequence[Condition],
    failed: Sequence[str], failures: Sequence[dict[str, str]], settings: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """All that both templates show."""
    base = figures[0]
    groups = list(dict.fromkeys(g for f in figures for g in f.scores))
    fills = [f.fill | {"ended": ENDED.get(f.fill.get("ended", ""))} for f in figures]
    rates = list(dict.fromkeys(r for f in figures for r in f.speed))
    known = next((f.facts for f in figures if f.facts), {})
    return {
        "first": [line(v, base.name) for v in verdicts],
        "words": [v.word for v in verdicts],
        "names": [f.name for f in figures],
        "against": against(figures, limits),
        "plots": list(plots.all_of(figures)),
        "scores": [
            {
                "name": g,
                "values": [" ".join(number(x) for x in f.scores.get(g, [])) for f in figures],
            }
            for g in groups
        ],
        "refused": {f.name: f.refused for f in figures if f.refused},
        "first_differences": {
            f.name: [r for r in f.alike if r[1] < r[2]][:SHOWN] for f in figures[1:]
        },
        "positions": {f.name: (f.positions, f.unread) for f in figures[1:]},
        "chunk": known.get("chunk"),
        "capacity": rows(CAPACITY, [f.capacity for f in figures]),
        "fill": rows(FILL, fills),
        "speed": {r: rows(SPEED, [f.speed.get(r, {}) for f in figures]) for r in rates},
        "failed": failed,
        "failures": failures,
        "settings": settings,
        "whole": bool(known.get("whole")),
        "conditions": {
            f.name: conditions.digest(f.facts["conditions"]) for f in figures if f.facts
        },
        "prefix_hits": {f.name: f.prefix_hits for f in figures if f.prefix_hits},
        "facts": {k: known.get(k) for k in ("root", "max_model_len", "chunk", "max_num_seqs")},
        "version": known.get("conditions", {}).get("version"),
    }


def environment(escape: bool) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )


def save(folder: Path, told: dict[str, Any], figures: Sequence[Figures]) -> Path:
    """The path of the HTML page."""
    page = environment(True).get_template("report.html.j2").render(told)
    text = environment(False).get_template("report.md.j2").render(told)
    raw = [asdict(f) | {"facts": None} for f in figures]
    data = {k: v for k, v in told.items() if k != "plots"} | {"figures": raw}
    write(folder / "report.html", page.encode())
    write(folder / "report.md", text.encode())
    write(folder / "report.json", json.dumps(data, indent=1).encode())
    return folder / "report.html"
