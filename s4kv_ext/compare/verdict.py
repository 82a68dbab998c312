"""What the figures say: thresholds, the verdict, and the conditions of `--fail-if`."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from s4kv_ext.compare.figures import METRICS, Figures, inside

OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
FORM = re.compile(r"\s*(\w+)\s*(<=|>=|==|<|>)\s*([-+.\deE]+)\s*")
DEFAULTS = (
    *("quality>=0.99", "top1>=0.95", "kl<=0.02", "top1_text>=0.95", "kl_text<=0.02"),
    *("kv_tokens>=1", "ttft_p95<=1.2", "tpot_p95<=1.2", "tokens_per_s>=0.9", "errors<=0"),
)
NEEDED = ("quality", "agreement")  # without either, nothing can be said
GAINS = ("quality", "kv_tokens", "tokens_per_s", "ttft_p95", "tpot_p95")
GAIN = 1.05  # less is not called better


@dataclass(frozen=True)
class Condition:
    metric: str
    sign: str
    number: float

    def holds(self, value: float) -> bool:
        return bool(OPERATORS[self.sign](value, self.number))

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.number:g}"


def parse(text: str) -> Condition:
    found = FORM.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no condition: it is METRIC<NUMBER, such as 'quality<0.99'")
    metric, sign, number = found.groups()
    if metric not in METRICS:
        raise ValueError(f"{text!r}: no metric {metric!r}, there are {', '.join(METRICS)}")
    try:
        return Condition(metric, sign, float(number))
    except ValueError:
        raise ValueError(f"{text!r}: {number!r} is no number") from None


def thresholds(own: Sequence[Condition]) -> list[Condition]:
    """The defaults, but those of a metric that the user gives."""
    given = {c.metric for c in own}
    return [c for c in map(parse, DEFAULTS) if c.metric not in given] + list(own)


@dataclass(frozen=True)
class Verdict:
    side: str
    word: str  # better, equal, worse, incomplete
    reasons: tuple[str, ...]  # why it is that
    noise: tuple[str, ...]  # thresholds missed by no more than the noise floor
    asked: tuple[str, ...]  # the thresholds that were applied


def number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.3f}".rstrip("0").rstrip(".")


def judge(f: Figures, limits: Sequence[Condition], lacking: str) -> Verdict:
    """`lacking`: why pieces are missing, if any are."""
    wrong: list[str] = []
    noise: list[str] = []
    asked: list[str] = []
    for c in limits:
        value = f.values.get(c.metric)
        if value is None:
            continue
        asked.append(str(c))
        if not c.holds(value):
            told = f"{c.metric} {number(value)}, not {c.sign} {c.number:g}"
            (noise if inside(c.metric, value, f.floor) else wrong).append(told)
    if wrong:
        return Verdict(f.name, "worse", tuple(wrong), tuple(noise), tuple(asked))
    if lacking or not any(n in f.values for n in NEEDED):
        why = lacking or "quality was not measured"
        return Verdict(f.name, "incomplete", (why,), tuple(noise), tuple(asked))
    gains = []
    for name in GAINS:
        value = f.values.get(name)
        # A speed without a noise floor proves nothing; a capacity needs none.
        if not value or inside(name, value, f.floor) or name not in (*f.floor, "kv_tokens"):
            continue
        if (value if METRICS[name].higher else 1 / value) >= GAIN:
            gains.append(f"{name} {number(value)} ×")
    if gains:
        return Verdict(f.name, "better", tuple(gains), tuple(noise), tuple(asked))
    return Verdict(f.name, "equal", ("no threshold is missed",), tuple(noise), tuple(asked))


def line(v: Verdict, base: str) -> str:
    """The report's first line."""
    against = {
        "better": f"{v.side} is BETTER than {base}",
        "worse": f"{v.side} is WORSE than {base}",
        "equal": f"{v.side} is EQUAL to {base}",
        "incomplete": f"{v.side} against {base} is INCOMPLETE",
    }[v.word]
    noise = f"; inside the noise floor: {', '.join(v.noise)}" if v.noise else ""
    limits = ", ".join(v.asked) or "none could be applied"
    return f"{against}: {'; '.join(v.reasons)}{noise} [thresholds: {limits}]"


def failures(conditions: Sequence[Condition], figures: Sequence[Figures]) -> list[str]:
    """Which conditions of --fail-if hold, for any side. What was not measured counts as failed: a
    gate that could not look must not open."""
    found = []
    for f in figures:
        for c in conditions:
            value = f.values.get(c.metric)
            if value is None:
                found.append(f"{f.name}: {c.metric} was not measured")
            elif c.holds(value):
                found.append(f"{f.name}: {c.metric} is {number(value)}, {c}")
    return found
