"""Attention of one layer, int4_kivi beside vLLM's own CPU attention, in one run.

    python bench/attention_cpu.py [--dtype float32] [--heads 9 --kv-heads 3 --head-dim 64]

Decode: one token for each of `batch` requests at `context` - 32 tokens (halfway between two
seals). Every layer has a cache of its own and they take turns, so that the caches come from memory
as they do in the engine. Prefill: `batch` prompts of `context` tokens in chunks of --chunk tokens
in all. Both sides include storing the new keys and values. Needs a vLLM for CPU of the pinned
version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from s4kv_ext import cpu_ops
from s4kv_ext.channel_map import allocate
from s4kv_ext.format import BLOCK, head_page_bytes, recent_page_tokens, sealed_tokens
from s4kv_ext.reference import Step

VLLM_BLOCK = 128  # vLLM's default on CPU
CACHE = 256 << 20  # all layers together hold at least this much, in vLLM's cache


class Shape:
    def __init__(self, args: argparse.Namespace, batch: int, context: int):
        self.dtype = getattr(torch, args.dtype)
        self.heads, self.kv_heads, self.dim = args.heads, args.kv_heads, args.head_dim
        self.batch, self.context, self.scale = batch, context, args.head_dim**-0.5
        size = 2 * batch * context * self.kv_heads * self.dim * self.dtype.itemsize
        self.layers = min(30, max(2, -(-CACHE // size)))

    def tokens(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value as views of one fused tensor, as the engine has them."""
        qkv = torch.randn(n, (self.heads + 2 * self.kv_heads) * self.dim).to(self.dtype)
        q, k, v = qkv.split([self.heads * self.dim] + 2 * [self.kv_heads * self.dim], 1)
        return q.view(n, -1, self.dim), k.view(n, -1, self.dim), v.view(n, -1, self.dim)


def ints(x) -> Tensor:
    return torch.as_tensor(x, dtype=torch.int32)


class Kivi:
    """Caches of all layers, every page of a request its own."""

    def __init__(self, s: Shape):
        self.s = s
        n = recent_page_tokens(s.dim, s.dtype)
        self.sealed_columns, self.recent_columns = (
            -(-s.context // BLOCK) + 1,
            -(-s.context // n) + 1,
        )
        each = self.sealed_columns + self.recent_columns
        pages, stride = 1 + s.batch * each, s.kv_heads * head_page_bytes(s.dim)
        self.raw = torch.zeros(s.layers, pages * stride, dtype=torch.uint8)
        self.layers = []
        for raw in self.raw:
            recent = raw.view(s.dtype).as_strided(
                (pages, s.kv_heads, 2, n, s.dim),
                (stride // s.dtype.itemsize, 2 * n * s.dim, n * s.dim, s.dim, 1),
            )
            self.layers.append((raw.view(pages, s.kv_heads, -1), recent))
        table = 1 + torch.arange(s.batch * each, dtype=torch.int32).view(s.batch, each)
        self.sealed_table, self.recent_table = (
            table[:, : self.sealed_columns],
            table[:, self.sealed_columns :],
        )
        self.slot_channel = allocate(torch.rand(s.kv_heads, s.dim).pow(8))

    def step(self, start: Tensor, lens: Tensor) -> Step:
        return Step(start, lens, self.sealed_table, self.recent_table)

    def run(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        sealed, recent = self.layers[layer]
        cpu_ops.store_and_seal(k, v, sealed, recent, step, self.slot_channel)
        cpu_ops.attend(q, k, v, sealed, recent, step, self.slot_channel, self.s.scale, out)


class Vllm:
    def __init__(self, s: Shape):
        self.s, self.isa = s, _get_attn_isa(s.dtype, VLLM_BLOCK, s.dim)
        self.columns = -(-s.context // VLLM_BLOCK) + 1
        shape = (1 + s.batch * self.columns, s.kv_heads, 2 * VLLM_BLOCK, s.dim)
        self.raw = torch.zeros(s.layers, *shape, dtype=s.dtype)
        self.table = 1 + torch.arange(s.batch * self.columns, dtype=torch.int32).view(s.batch, -1)

    def step(self, start: Tensor, lens: Tensor):
        s = self.s
        meta = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lens),
            num_heads=s.heads,
            num_kv_heads=s.kv_heads,
            head_dim=s.dim,
            seq_lens=lens,
            dtype=s.dtype,
            query_start_loc=start,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )
        slots = []
        for i, t in enumerate(lens.tolist()):
            p = torch.arange(t - int(start[i + 1] - start[i]), t)
            slots.append(self.table[i][p // VLLM_BLOCK].long() * VLLM_BLOCK + p % VLLM_BLOCK)
        return start, lens, meta, torch.cat(slots)

    def run(self, layer: int, step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        start, lens, meta, slots = step
        key_cache, value_cache = self.raw[layer].chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, slots, self.isa)
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=start,
            seq_lens=lens,
            scale=self.s.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0.0,
            scheduler_metadata=meta,
            s_aux=None,
        )


def fill(cache: Kivi | Vllm) -> None:
    """Every request up to where its decode starts, in every layer."""
    s = cache.s
    n = s.context - BLOCK // 2 - 1
    _, k, v = s.tokens(s.batch * n)
    start, lens = ints(range(0, s.batch * n + 1, n)), ints([n] * s.batch)
    step = cache.step(start, lens)
    if isinstance(cache, Kivi):
        cpu_ops.store_and_seal(k, v, *cache.layers[0], step, cache.slot_channel)
    else:
        key_cache, value_cache = cache.raw[0].chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, step[3], cache.isa)
    cache.raw[1:] = cache.raw[0]


def decode(cache: Kivi | Vllm) -> Callable[[], None]:
    s = cache.s
    q, k, v = s.tokens(s.batch)
    out = torch.empty(s.batch, s.heads, s.dim, dtype=s.dtype)
    step = cache.step(ints(range(s.batch + 1)), ints([s.context - BLOCK // 2] * s.batch))

    def run() -> None:
        for layer in range(s.layers):
            cache.run(layer, step, q, k, v, out)

    return run


def prefill(cache: Kivi | Vllm, chunk: int) -> Callable[[], None]:
    s = cache.s
    each = chunk // s.batch
    q, k, v = s.tokens(chunk)
    out = torch.empty(chunk, s.heads, s.dim, dtype=s.dtype)
    start = ints(range(0, chunk + 1, each))
    steps = [cache.step(start, ints([c + each] * s.batch)) for c in range(0, s.context, each)]

    def run() -> None:
        for step in steps:
            cache.run(0, step, q, k, v, out)

    return run


def measure(runs: list[Callable[[], None]], seconds: float) -> list[float]:
    """Shortest time of each, taking turns: what other processes take is not theirs."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or len(times[0]) < 3:
        for run, t in zip(runs, times, strict=True):
            a = time.perf_counter()
            run()
            t.append(time.perf_counter() - a)
    return [min(t) for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--library", type=Path, default=cpu_ops.LIBRARY)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = [args.only] if args.only else ["decode", "prefill"]
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    cpu_ops.load(args.library)
    heads = f"{args.heads}/{args.kv_heads} heads of {args.head_dim}"
    print(f"{args.dtype}, {heads}, {args.threads} threads, {cpu_ops.isa()}")
    rows = []
    for kind, batch, context in itertools.product(kinds, args.batches, args.contexts):
        s = Shape(args, batch, context)
        if kind == "prefill":
            s.layers = 1
        caches = [Kivi(s), Vllm(s)]
        if kind == "decode":
            for cache in caches:
                fill(cache)
        runs = [decode(c) if kind == "decode" else prefill(c, args.chunk) for c in caches]
        ours, theirs = (t / s.layers * 1e6 for t in measure(runs, args.seconds))
        if kind == "decode":
            blocks = sealed_tokens(context) // BLOCK * batch
            gigabytes = blocks * head_page_bytes(s.dim) * s.kv_heads / 1e9
            note = f"{gigabytes / ours * 1e6:.1f} GB/s of sealed pages"
        else:
            gflop = 2 * batch * s.heads * s.dim * context * context / 1e9
            note = f"{gflop / ours * 1e6:.0f} against {gflop / theirs * 1e6:.0f} GFLOP/s"
        print(
            f"{kind:8} batch {batch} context {context:5}: int4_kivi {ours:9.1f} us, "
            f"vLLM {theirs:9.1f} us, {theirs / ours:5.2f} x, {note}",
            flush=True,
        )
        rows.append(
            {
                "kind": kind,
                "dtype": args.dtype,
                "batch": batch,
                "context": context,
                "int4_kivi_us": ours,
                "vllm_us": theirs,
            }
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
