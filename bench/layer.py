#!/usr/bin/env python3
"""What attention adds to a decode layer: int4_kivi beside FlashAttention 3 on bf16, among GEMMs.

A CUDA graph of six layers of the Qwen2.5-7B shape, each with weights of its own: between two
launches of a kernel run those of a model, and 466 MB of weights pass the L2. Each figure is a
layer with the kernels named less one without, in microseconds. bench/attention.py repeats one
kernel; what it costs next to others shows here alone.

  bench/layer.py
  bench/layer.py --cells 1x1024 32x8192 --out /tmp/layer.json
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda_timing import graph_times
from harness import batch_and_context, machine, parser, write
from peers import DIM, GROUP, HEADS, PEERS, random
from torch import Tensor
from torch.nn.functional import linear, silu

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from s4kv_ext import cuda_ops
from tests.gpu.cases import Case, Request

LAYERS = 6
HIDDEN, MLP = GROUP * HEADS * DIM, 18944
QKV = HIDDEN + 2 * HEADS * DIM
ROUNDS = 3

Attention = Callable[[int], object]  # of a layer
Weights = list[tuple[Tensor, ...]]


def layer(weights: Weights, x: Tensor, attention: Attention | None, i: int) -> None:
    qkv, out, up, down = weights[i]
    y = linear(x, qkv) + 1  # the rotary embedding's place: a small kernel before attention
    if attention:
        attention(i)
    y = linear(linear(y[:, :HIDDEN].contiguous(), out), up)
    linear(silu(y[:, :MLP]) * y[:, MLP:], down)


def int4_kivi(batch: int, context: int) -> dict[str, Attention]:
    case = Case([Request(context - 2, 1)] * batch, HEADS, GROUP, DIM, pad=0, offset=0)
    out = torch.empty_like(case.query)
    count, stride = case.pages.sealed.shape[0], case.pages.sealed.stride(0)
    memories = [case.memory] + [case.memory.clone() for _ in range(LAYERS - 1)]
    pages = [
        cuda_ops.Pages(*case.views(m, count, stride, 0), case.pages.slot_channel) for m in memories
    ]
    case.update()

    def store(i: int) -> None:
        cuda_ops.store_and_seal(case.plan, case.key, case.value, pages[i])

    def decode(i: int) -> None:
        cuda_ops.decode(case.plan, case.query, out, pages[i], case.scale)

    def both(i: int) -> None:
        store(i)
        decode(i)

    return {"int4_kivi": both, "store": store, "decode": decode}


def fa3_bf16(batch: int, context: int) -> dict[str, Attention]:
    from vllm import _custom_ops as ops

    key, value = random(batch, HEADS, DIM), random(batch, HEADS, DIM)
    cache = random(2, batch, 16, HEADS, DIM)
    slots = torch.arange(batch, device="cuda") * 16
    one = torch.ones((), device="cuda")
    runs = next(iter(PEERS["fa3_bf16"](batch=batch, context=context))).runs

    def both(i: int) -> None:
        ops.reshape_and_cache_flash(key, value, *cache, slots, "auto", one, one)
        runs[i % len(runs)]()

    return {"fa3_bf16": both}


def measure(weights: Weights, batch: int, context: int) -> dict[str, Any]:
    """In rounds by turns, for a GPU's clocks are not the same for long."""
    x = random(batch, HIDDEN)
    kinds: dict[str, Attention | None] = {"gemms": None}
    kinds |= int4_kivi(batch, context) | fa3_bf16(batch, context)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, attention in kinds.items():
            runs = [functools.partial(layer, weights, x, attention, i) for i in range(LAYERS)]
            found[name].append(statistics.median(graph_times(runs)))
    row = {}
    for name, times in found.items():
        less = [0.0] * ROUNDS if name == "gemms" else found["gemms"]
        added = sorted(t - g for t, g in zip(times, less, strict=True))
        row[name] = {k: round(v, 2) for k, v in zip(("us_min", "us", "us_max"), added, strict=True)}
    return row


def main() -> None:
    ap = parser(__doc__, "layer.json")
    cells = ["1x1024", "1x8192", "1x32768", "8x8192", "32x8192", "128x8192"]
    ap.add_argument("--cells", nargs="+", default=cells, metavar="BATCHxCONTEXT")
    args = ap.parse_args()
    print(f"{machine().get('gpu')}; microseconds a layer")
    sizes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP))
    weights = [tuple(random(*size) for size in sizes) for _ in range(LAYERS)]
    table = {}
    for name in args.cells:
        table[name] = measure(weights, *batch_and_context(name))
        print(name, ", ".join(f"{k} {v['us']}" for k, v in table[name].items()), flush=True)
    write(args.out, {"what": __doc__, "model": "Qwen2.5-7B", "cells": table})


if __name__ == "__main__":
    main()
