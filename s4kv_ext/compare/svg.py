"""Two kinds of plots as inline SVG: nothing is loaded, nothing runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 64
COLOURS = ("#4c6a92", "#c8643c", "#5b8c5a", "#8a5a8c", "#9a8a3c", "#3c8a8a")
Point = tuple[float, float]


def short(x: float) -> str:
    if x and abs(x) < 0.01:
        return f"{x:.0e}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(x) >= size:
            return f"{x / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{x:.4g}"


def ticks(top: float) -> list[float]:
    """Four to eight round numbers from 0 past `top`."""
    step = 10 ** math.floor(math.log10(top or 1))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if top / s <= 6)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def frame(title: str, unit: str, marks: Sequence[float], names: Sequence[str]) -> Iterator[str]:
    """Title, the axis of the values and the legend."""
    yield text(LEFT, 16, f"{title} ({unit})" if unit else title, "start", ' font-weight="bold"')
    for m in marks:
        y = height(m, marks)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
        yield text(LEFT - 6, y + 4, short(m), "end")
    for i, name in enumerate(names):
        x, y = LEFT + i * (WIDTH - LEFT - RIGHT) / len(names), HEIGHT - 12
        yield f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{COLOURS[i % 6]}"/>'
        yield text(x + 14, y, name, "start")


def height(value: float, marks: Sequence[float]) -> float:
    room = HEIGHT - TOP - BOTTOM
    return TOP + room * (1 - value / (marks[-1] or 1))


def whole(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">' + "".join(parts) + "</svg>"
    )


def bars(
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    spread: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
) -> str:
    """A group of bars for each of `groups`, in it one a series; `spread`: a line from, to."""
    known = [v for values in series.values() for v in values if v is not None]
    ranges = [r for of in (spread or {}).values() for r in of if r is not None]
    marks = ticks(max([*known, *(high for _, high in ranges), 0.0]))
    parts = list(frame(title, unit, marks, list(series)))
    room = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    wide = room * 0.8 / max(len(series), 1)
    for g, group in enumerate(groups):
        left = LEFT + g * room + room * 0.1
        parts.append(text(left + room * 0.4, HEIGHT - BOTTOM + 18, group))
        for i, (name, values) in enumerate(series.items()):
            if (v := values[g]) is None:
                continue
            x, y = left + i * wide, height(v, marks)
            parts.append(
                f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{wide * 0.92:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLOURS[i % 6]}">'
                f"<title>{escape(f'{name}, {group}: {v:.6g} {unit}')}</title></rect>"
            )
            if ends := (spread or {}).get(name, [None] * len(groups))[g]:
                low, high = (height(e, marks) for e in ends)
                mid = x + wide * 0.46
                parts.append(
                    f'<line x1="{mid:.1f}" x2="{mid:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
                    'stroke="currentColor" stroke-width="2"/>'
                )
    return whole(title, parts)


def lines(
    title: str, unit: str, xlabel: str, series: Mapping[str, Sequence[Point]], labels: Sequence[str]
) -> str:
    """A line a series; x runs from 0 to len(labels) - 1, and the labels stand below it."""
    marks = ticks(max((y for points in series.values() for _, y in points), default=1.0))
    parts = list(frame(title, unit, marks, list(series)))
    last = max(len(labels) - 1, 1)

    def across(x: float) -> float:
        return LEFT + 14 + (WIDTH - LEFT - RIGHT - 28) * x / last

    for i, label in enumerate(labels):
        parts.append(text(across(i), HEIGHT - BOTTOM + 16, label))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 32, xlabel))
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % 6]
        placed = [(across(x), height(y, marks), y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, value in placed:
            parts.append(
                f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
                f"<title>{escape(f'{name}: {value:.6g} {unit}')}</title></circle>"
            )
    return whole(title, parts)
