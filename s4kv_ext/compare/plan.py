"""Which pieces there are, and in which order."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from s4kv_ext.compare.sides import Side
from s4kv_ext.compare.store import Piece
from s4kv_ext.compare.tasks import Task

SETTINGS = (
    *("model", "arguments", "rounds", "speed_rounds", "concurrency", "context", "top"),
    *("max_tokens", "positions", "input_len", "output_len", "num_prompts", "bench_args"),
    *("fill_len",),
)


def order(sides: Sequence[Side], rounds: int) -> list[tuple[Side, int]]:
    """A B, B A, A B, …: what drifts with time meets all sides alike."""
    return [(s, r) for r in range(rounds) for s in (sides if r % 2 == 0 else reversed(sides))]


def groups(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = {}
    for t in tasks:
        found.setdefault(t.task, []).append(t)
    return found


def pieces(
    side: Side, turn: int, args: argparse.Namespace, names: Sequence[str]
) -> Iterator[Piece]:
    """Of one side in one round; what may end a server comes last."""

    def piece(kind: str, name: str = "") -> Piece:
        return Piece(side.slug, turn, kind, name)

    yield piece("facts")
    if "capacity" not in args.skip and turn == 0:
        yield piece("capacity")
    if "quality" not in args.skip:
        yield from (piece("quality", n) for n in names)
        yield from (piece("lm-eval", t) for t in args.lm_eval)
    if "speed" not in args.skip and turn < args.speed_rounds:
        yield from (piece("speed", r) for r in args.rates)
    if "prompts" not in args.skip:
        yield from (piece("prompts", n) for n in names)
    if "fill" not in args.skip and turn == args.rounds - 1:
        yield piece("fill")


def fingerprint(
    args: argparse.Namespace, sides: Sequence[Side], tasks: Sequence[Task]
) -> dict[str, Any]:
    """What must be the same for `--resume`; more rates or parts may be asked for."""
    return {
        "sides": [[s.name, *s.flags, s.url] for s in sides],
        "tasks": sha256(repr(tasks).encode()).hexdigest()[:16],
        **{name: getattr(args, name) for name in SETTINGS},
    }
