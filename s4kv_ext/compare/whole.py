"""The whole of it: check the arguments, measure, judge, report."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from s4kv_ext.compare import builtin, figures, lm_eval, plan, report, sides, tasks, verdict
from s4kv_ext.compare.client import Client, Gone
from s4kv_ext.compare.run import Run, say
from s4kv_ext.compare.store import Store

CONTEXT = 4096


def longest(args: argparse.Namespace, chosen: list[sides.Side]) -> int:
    """The longest request that all servers will take, as far as it is known before they start."""
    for name, value in zip(args.arguments, [*args.arguments[1:], ""]):
        told = value if name == "--max-model-len" else name.removeprefix("--max-model-len=")
        if name.startswith("--max-model-len") and told.isdigit():
            return int(told)
    for url in (s.url for s in chosen if s.url):
        with suppress(Gone):  # which is reported where it is measured
            return int(Client(url).json("/v1/models")["data"][0]["max_model_len"])
    config = Path(args.model or "").expanduser() / "config.json"
    if config.is_file():
        read = json.loads(config.read_text())
        return int(read.get("text_config", read).get("max_position_embeddings", 2 * CONTEXT))
    return 2 * CONTEXT


def gather_tasks(args: argparse.Namespace) -> list[tasks.Task]:
    """The user's own, then the built-in ones."""
    own = [t for path in args.tasks for t in tasks.load(path)]
    names = [n for n in args.builtin.split(",") if n and n != "none"]
    if wrong := set(names) - set(builtin.SETS):
        raise ValueError(f"--builtin: no set {wrong.pop()!r}: {', '.join(builtin.SETS)}, or none")
    if names and find_spec("pydoc_data") is None:
        raise ValueError("--builtin: this Python lacks its pydoc_data: use --builtin none")
    found = own + builtin.make(names, args.context, args.builtin_count)
    if not found and not {"quality", "prompts"} <= set(args.skip):
        raise ValueError(
            "no tasks: give --tasks FILE, or --builtin sets, or --skip quality,prompts"
        )
    if both := {t.task for t in own} & set(names):
        raise ValueError(
            f"--tasks: {both.pop()!r} is the name of a built-in set, name it otherwise"
        )
    seen = Counter((t.task, t.id) for t in found)
    if twice := [key for key, n in seen.items() if n > 1]:
        raise ValueError(f"--tasks: two tasks of {twice[0][0]!r} have the id {twice[0][1]!r}")
    return found


def compare(args: argparse.Namespace) -> int:
    chosen = sides.sides(args.kv, args.url)
    if bool(args.kv) != bool(args.model):
        raise ValueError("MODEL goes with --kv; with --url the servers have one already")
    if args.url and args.arguments:
        raise ValueError("arguments after -- are for servers that are started: use them with --kv")
    sides.check_serve_arguments(args.arguments, chosen)
    limits = verdict.thresholds([verdict.parse(x) for x in args.threshold])
    gates = [verdict.parse(x) for x in args.fail_if]
    args.speed_rounds = min(args.speed_rounds or args.rounds, args.rounds)
    args.context = args.context or min(CONTEXT, longest(args, chosen) // 2)
    if args.lm_eval and not lm_eval.installed():
        say(lm_eval.MISSING)
        args.lm_eval = []
    asked = gather_tasks(args)
    settings = plan.fingerprint(args, chosen, asked)
    store = Store(args.out, settings, args.resume)
    run = Run(args, chosen, asked, store)
    try:
        run.measure()
    except KeyboardInterrupt:
        told(run, settings, limits, gates, "interrupted")
        say(f"interrupted; what is done is in {args.out}: the same command with --resume goes on")
        return 130
    return told(run, settings, limits, gates, "")


def told(
    run: Run,
    settings: dict[str, Any],
    limits: list[verdict.Condition],
    gates: list[verdict.Condition],
    lacking: str,
) -> int:
    """Write the report, print its first lines, return the exit status."""
    args, names = run.args, [(s.name, s.slug) for s in run.sides]
    groups = list(plan.groups(run.tasks))
    found = figures.collect(run.store, names, groups, args.lm_eval, args.rates, args.rounds)
    bad = {row["side"] for row in run.failures}
    base = found[0].name
    verdicts = []
    for f in found[1:]:
        failed = [name for name in (base, f.name) if name in bad]
        why = f"a measurement of {' and '.join(failed)} failed" if failed else lacking
        verdicts.append(verdict.judge(f, limits, why))
    holding = verdict.failures(gates, found[1:])
    shown = report.context(found, verdicts, limits, holding, run.failures, settings)
    page = report.save(args.out, shown, found)
    for v in verdicts:
        print(verdict.line(v, base))
    for line in holding:
        print(f"--fail-if: {line}")
    print(f"report: {page}", flush=True)
    return 1 if holding or run.failures else 0
