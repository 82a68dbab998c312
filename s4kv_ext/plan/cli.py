"""The command `s4kv plan`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s4kv_ext import models
from s4kv_ext.plan import gpus

if TYPE_CHECKING:
    from s4kv_ext.plan.gpus import Machine
    from s4kv_ext.plan.sizing import Model, Plan

EXAMPLES = """examples:
  s4kv plan /models/Qwen2.5-7B-Instruct --gpu g6e.xlarge --context 8192 --users 50
  s4kv plan /models/Qwen2.5-7B-Instruct/config.json --gpu L40Sx2
  s4kv plan /models/Qwen2.5-7B-Instruct --memory 24GiB --json
  s4kv plan /models/Qwen2.5-7B-Instruct --users 50       # every instance that is known
"""


def add(sub: argparse._SubParsersAction) -> None:
    p = sub.add_parser(
        "plan",
        help="what fits on a GPU: weights, KV tokens, users, instances",
        description="Predict how many KV tokens and users a model has room for, with the KV cache "
        "dtypes auto, fp8 and int4_kivi, and the command to start. Needs no GPU and no weights. "
        "Without --gpu and --memory, all AWS instances that are known are compared.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = ", ".join(models.VARIANTS)
    p.add_argument(
        "model", type=Path, metavar="MODEL", help=f"a folder, a config.json, or one of {own}"
    )
    where = p.add_mutually_exclusive_group()
    where.add_argument("--gpu", help="an instance (g6e.xlarge) or GPUs (L40S, L40Sx2)")
    where.add_argument("--memory", metavar="SIZE", help="of one GPU: 24GiB, 22587MiB")
    p.add_argument(
        "--context", type=int, metavar="TOKENS", help="of a request, prompt and answer (8192)"
    )
    p.add_argument("--users", type=int, help="requests of that length at the same time")
    p.add_argument("--tp", type=int, metavar="N", help="GPUs of one server (all of the machine)")
    p.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, metavar="PART", help="(0.92)"
    )
    p.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="(as vllm serve)")
    p.add_argument("--max-num-seqs", type=int, metavar="N", help="(as vllm serve)")
    p.add_argument("--dtype", default="auto", help="of the model, as for vllm serve (auto)")
    p.add_argument("--price", type=float, metavar="USD", help="an hour of one machine")
    p.add_argument("--json", action="store_true", help="for machines")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check(args)
    machine = _machine(args)  # before the model, which takes seconds
    folder = models.named(args.model)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(
        f"s4kv: loading vLLM, which reads {folder}; takes 10 to 30 s",
        file=sys.stderr,
        flush=True,
    )
    from s4kv_ext.plan import report, sizing

    model = sizing.load(folder, args.dtype)
    if machine is None:
        return _compare(args, model)
    plan = sizing.make(model, machine, gpus=args.tp, **_options(args, machine))
    if args.json:
        print(json.dumps(report.as_json(plan, args.price), indent=1))
    else:
        print(report.text(plan, args.price))
    return 0


def _check(args: argparse.Namespace) -> None:
    for flag in ("context", "users", "tp", "max_num_batched_tokens", "max_num_seqs"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: use 1 or more")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ValueError(
            f"--gpu-memory-utilization {args.gpu_memory_utilization}: use a part, as 0.92"
        )
    for flag in ("price", "tp"):
        if getattr(args, flag) is not None and not (args.gpu or args.memory):
            raise ValueError(f"--{flag} is of one machine: name it with --gpu")


def _machine(args: argparse.Namespace) -> Machine | None:
    if args.memory:
        return gpus.memory(args.memory)
    return gpus.machine(args.gpu) if args.gpu else None


def _options(args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """For ``sizing.make``."""
    from s4kv_ext.plan.memory import Limits

    default = Limits.default(machine.gpu.large)
    limits = Limits(
        args.gpu_memory_utilization,
        args.max_num_batched_tokens or default.batched_tokens,
        args.max_num_seqs or default.sequences,
    )
    return {"context": args.context, "users": args.users, "limits": limits}


def _compare(args: argparse.Namespace, model: Model) -> int:
    """One line for each kind of instance, split as holds most users."""
    from s4kv_ext.plan import report, sizing

    plans: list[Plan] = []
    found: list[dict[str, Any]] = []
    problems = []
    for machine in gpus.smallest():
        try:
            plans.append(sizing.widest(model, machine, **_options(args, machine)))
        except sizing.DoesNotFit as e:
            problems.append(f"{machine}: {e}")
            found.append({"machine": machine.name, "does_not_fit": str(e)})
        else:
            found.append(report.as_json(plans[-1]))
    if args.json:
        print(json.dumps({"model": model.name, "machines": found}, indent=1))
    else:
        print(report.comparison(model, plans, problems))
    return 0 if plans else 1
