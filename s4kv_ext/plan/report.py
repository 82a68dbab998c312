"""A plan as text and as JSON."""

from __future__ import annotations

import shlex
from typing import Any

from s4kv_ext.plan import memory
from s4kv_ext.plan.cache import DTYPES
from s4kv_ext.plan.gpus import GIB, MIB
from s4kv_ext.plan.sizing import Model, Plan, Row

HOUR = "USD an hour"


def command(plan: Plan) -> str:
    """The server to start, as one line for a shell."""
    flags = ["--kv-cache-dtype", plan.best.dtype, "--max-model-len", str(plan.context)]
    if plan.model.dtype != "auto":
        flags += ["--dtype", plan.model.dtype]
    if plan.gpus > 1:
        flags += ["--tensor-parallel-size", str(plan.gpus)]
    flags += ["--gpu-memory-utilization", str(plan.limits.utilization)]
    flags += ["--max-num-batched-tokens", str(plan.limits.batched_tokens)]
    flags += ["--max-num-seqs", str(plan.limits.sequences)]
    return shlex.join(["vllm", "serve", str(plan.model.folder), *flags])


def text(plan: Plan, price: float | None = None) -> str:
    """price: USD an hour of the whole machine."""
    lines = [*_sizes(plan), "", *_table(plan), ""]
    if plan.refused:
        lines += [plan.refused, ""]
    lines += [*_bound(plan), "", command(plan)]
    if plan.servers > 1:
        lines.append(f"{plan.servers} such servers fit on the machine, each with its own GPUs.")
    return "\n".join([*lines, "", *_cost(plan, price)])


def _sizes(plan: Plan) -> list[str]:
    config, w = plan.model.config, plan.weights
    count = f"{w.parameters / 1e9:.2f} B parameters " if w.parameters else ""
    dtype = str(config.dtype).removeprefix("torch.")
    of = "" if plan.gpus == 1 else f", on {plan.gpus} GPUs by tensor parallelism"
    left = memory.outside(plan.machine.gpu.memory, plan.limits)
    part = f"{plan.limits.utilization:.0%}"
    rest = f"the rest of vLLM's {part}"
    if plan.workspace:
        rest += f", less {plan.workspace / MIB:.0f} MiB of workspace with int4_kivi"
    rows = [
        ("weights", w.gpu, f"{count}{w.source}, {dtype}"),
        ("activations", plan.activations, f"a step of {plan.limits.batched_tokens} tokens"),
        ("libraries", memory.FIXED, "CUDA's kernels and buffers, as measured on an H200"),
        ("KV cache", plan.cache_bytes, rest),
        ("left free", left, f"beyond vLLM's {part}: CUDA graphs, and others on the GPU"),
    ]
    table = [f"  {name:12}{nbytes / GIB:7.2f} GiB  {note}" for name, nbytes, note in rows]
    return [f"{plan.model.name} on {plan.machine}{of}. Each GPU:", *table]


def _table(plan: Plan) -> list[str]:
    wanted = f"{f'machines for {plan.users}':>18}" if plan.users else ""
    users = f"users at {plan.context}"
    lines = [f"{'KV cache':11}{'bytes a token':>14}{'KV tokens':>13}{users:>18}{wanted}"]
    for r in plan.rows:
        need = f"{r.instances or 'none fits':>18}" if plan.users else ""
        lines.append(f"{r.dtype:11}{r.token_bytes:14,.0f}{r.tokens:13,}{r.users:18,}{need}")
    if max(r.users for r in plan.rows) > (most := plan.limits.sequences):
        lines.append(f"A server runs {most} at a time; more with a larger --max-num-seqs.")
    return lines


def _bound(plan: Plan) -> list[str]:
    lines = [f"A decode step reads, on each GPU, {plan.weights.step / 1e9:.1f} GB of weights and"]
    for r in plan.rows:
        lines.append(
            f"  {r.dtype:11}{r.step_bytes / 1e9:6.1f} GB of cache for {_users(r.load)}: "
            f"bound by {r.bound(plan.weights.step)}"
        )
    return lines


def _users(count: int) -> str:
    return f"{count:,} user{'' if count == 1 else 's'}"


def _cost(plan: Plan, price: float | None) -> list[str]:
    if price is None:
        return [
            "Cost: prices differ by region and change; give --price, USD an hour of one machine."
        ]
    return [
        f"{r.dtype:11}{machines(r)} × {plan.machine.name}: {machines(r) * price:.2f} {HOUR}, "
        f"{machines(r) * price / users(plan, r):.4f} a user"
        for r in plan.rows
        if r.users
    ]


def comparison(model: Model, plans: list[Plan], problems: list[str]) -> str:
    """A line for each machine: the users that it holds, or how many machines the users need."""
    if not plans:
        return "\n".join(problems)
    first = plans[0]
    what = f"machines for {first.users} users" if first.users else "users of one machine"
    lines = [f"{model.name}, requests of {first.context} tokens: {what}", ""]
    lines.append(f"{'':30}{''.join(f'{d:>11}' for d in DTYPES)}")
    for plan in plans:
        rows = {r.dtype: r for r in plan.rows}
        name = f"{plan.machine.name:14}{plan.machine.count} × {plan.machine.gpu.name:5}"
        cells = "".join(f"{_cell(rows.get(d), plan):>11}" for d in DTYPES)
        lines.append(f"{name} {f'--tp {plan.gpus}':6}{cells}")
    lines += [""] * bool(problems) + problems
    if model.refused:
        lines += ["", model.refused]
    return "\n".join([*lines, "", "More with --gpu NAME: the bytes, and the command to start."])


def _cell(row: Row | None, plan: Plan) -> str:
    if row is None or not row.users:
        return "-"
    return f"{row.instances or row.users * plan.servers:,}"


def machines(row: Row) -> int:
    return row.instances or 1


def users(plan: Plan, row: Row) -> int:
    """That the machines paid for are for."""
    return plan.users or row.users * plan.servers


def as_json(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """All bytes are of one GPU, but bytes_per_token of a server's GPUs together."""
    gpu = plan.machine.gpu
    return {
        "model": plan.model.name,
        "machine": plan.machine.name,
        "gpu": {"name": gpu.name, "bytes": gpu.memory, "count": plan.machine.count},
        "context": plan.context,
        "users": plan.users,
        "tensor_parallel_size": plan.gpus,
        "servers": plan.servers,
        "gpu_memory_utilization": plan.limits.utilization,
        "max_num_batched_tokens": plan.limits.batched_tokens,
        "max_num_seqs": plan.limits.sequences,
        "weights_bytes": plan.weights.gpu,
        "weights_source": plan.weights.source,
        "parameters": plan.weights.parameters,
        "activation_bytes": plan.activations,
        "fixed_bytes": memory.FIXED,
        "kv_cache_bytes": plan.cache_bytes,
        "unused_bytes": memory.outside(gpu.memory, plan.limits),
        "int4_kivi_workspace_bytes": plan.workspace,
        "int4_kivi_refused": plan.refused,
        "step_weight_bytes": plan.weights.step,
        "kv_cache_dtypes": {
            r.dtype: {
                "bytes_per_token": round(r.token_bytes, 1),
                "kv_tokens": r.tokens,
                "users": r.users,
                "load": r.load,
                "step_cache_bytes": r.step_bytes,
                "bound_by": r.bound(plan.weights.step),
                "machines": r.instances,
                "usd_per_hour": machines(r) * price if price is not None and r.users else None,
            }
            for r in plan.rows
        },
        "command": command(plan),
    }
