"""How alike two answers are: greedy text, and log-probabilities in the same context."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST = 1e-6  # a probability below it is rounding
Top = dict[str, float]
"""The likeliest tokens at one position, and their log-probabilities."""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


def share(a: Sequence[int], b: Sequence[int]) -> float:
    longest = max(len(a), len(b))
    return common(a, b) / longest if longest else 1.0


def best(top: Top) -> str:
    return max(top, key=lambda t: top[t])


def divergence(p: Top, q: Top) -> float:
    """The least that KL(p ‖ q) can be, in nats, given the likeliest tokens of both.

    Tokens that both list count each; those only p lists are one bucket, all others another. What q
    gives to the first bucket is not told, but it is no more than what its list leaves over, nor,
    for each token, than its own least likely one; within that the best case is assumed.
    """
    both = sorted(p.keys() & q.keys())  # a sum must not depend on the order of a set
    kl = sum(math.exp(p[t]) * (p[t] - q[t]) for t in both)
    only = sum(math.exp(x) for t, x in p.items() if t not in both)
    rest_p = 1.0 - sum(math.exp(p[t]) for t in both)
    rest_q = max(1.0 - sum(math.exp(q[t]) for t in both), LEAST)
    if rest_p <= LEAST:
        return max(kl, 0.0)
    left = 1.0 - sum(math.exp(x) for x in q.values())
    most = max(min(left, (len(p) - len(both)) * math.exp(min(q.values()))), LEAST)
    given = min(rest_q * only / rest_p, most)
    for mass, of_q in ((only, given), (rest_p - only, rest_q - given)):
        if mass > LEAST:
            kl += mass * math.log(mass / max(of_q, LEAST))
    return max(kl, 0.0)


def compared(p: Sequence[Top], q: Sequence[Top]) -> list[tuple[float, bool]]:
    """KL and whether the likeliest token is the same, at each position."""
    return [(divergence(a, b), best(a) == best(b)) for a, b in zip(p, q) if a and b]
