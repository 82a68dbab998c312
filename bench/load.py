#!/usr/bin/env python3
"""Load a server with many clients: does every request end, and is everything given back?

200 clients send prompts of all lengths, new, repeated and with shared beginnings; streams and whole
answers, n > 1, prompts that are too long, clients that leave in the middle, and half requests. The
server has a pool so small that it preempts. Checked, and said by the exit status: every request
ends in an answer or a clean error, none in 5xx; a greedy request beside it all has the same text
throughout; pages and requests are back to where they were; the memory of every process is flat.

examples:
  bench/load.py                                      ten minutes with SmolLM2 on this CPU
  bench/load.py --clients 30 --minutes 1 --out /tmp/load.json
  bench/load.py --model DIR --minutes 5 -- --dtype bfloat16 --max-model-len 8192 \\
      --kv-cache-memory-bytes 8G
  bench/load.py --url http://127.0.0.1:8000 --pid $(pgrep -f 'vllm serve')      one that runs

What comes after -- is for `vllm serve`, in place of the arguments for a CPU. An API key is taken
from VLLM_API_KEY. With --url the memory is watched where --pid names the server's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import psutil
from load_clients import Outcomes, Traffic

from s4kv_ext.compare import scrape
from s4kv_ext.compare.client import Client, Gone
from s4kv_ext.compare.servers import Died, Started
from s4kv_ext.compare.sides import Side

CPU = ["--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(128 << 20)]
STARTED = ["--served-model-name", "load"]
READY = 900.0  # seconds
QUIET = 60.0  # in which everything must be given back
EVERY = 2.0  # seconds from one look at the memory to the next
WARM = 0.25  # of the time, in which memory may grow: pages are touched, caches filled
GROWTH = 0.03  # of what it was after that, or
GROWTH_MIB = 32
COUNTERS = {
    "prompt_tokens": scrape.PROMPT_TOKENS,
    "text_tokens": scrape.TEXT_TOKENS,
    "preemptions": scrape.PREEMPTIONS,
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": scrape.PREFIX_HITS,
    "seals": "vllm:int4_kivi_seals_total",
}
GAUGES = {
    "running": scrape.RUNNING,
    "waiting": scrape.WAITING,
    "usage": scrape.USAGE,
    "sealed_pages": "vllm:int4_kivi_sealed_pages",
    "recent_pages": "vllm:int4_kivi_recent_pages",
}


class Memory(threading.Thread):
    """Resident MiB of a process and of all it started, by name, every few seconds."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.rows: list[tuple[float, dict[str, float]]] = []
        self.ended = threading.Event()
        self.begun = time.monotonic()

    def run(self) -> None:
        while not self.ended.wait(EVERY):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.rows.append((time.monotonic() - self.begun, self.now()))

    def now(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for p in (self.root, *self.root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = "API server" if p == self.root else p.name()
                found[name] = found.get(name, 0) + p.memory_info().rss / (1 << 20)
        return found


def memory_told(rows: list[tuple[float, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Of each process: MiB after the warm-up, at the end, the most, and growth by the minute.

    Start and end are medians of a tenth of the time."""
    rows = rows[int(len(rows) * WARM) :]
    told = {}
    for name in rows[-1][1] if rows else ():
        series = [(at, mib[name]) for at, mib in rows if name in mib]
        tenth = max(len(series) // 10, 1)
        start, end = (statistics.median(y for _, y in part) for part in
                      (series[:tenth], series[-tenth:]))  # fmt: skip
        if start < GROWTH_MIB:
            continue  # helpers of Python itself
        fit = statistics.linear_regression(*zip(*series)) if len(series) > 1 else None
        told[name] = {
            "start_mib": round(start),
            "end_mib": round(end),
            "most_mib": round(max(y for _, y in series)),
            "mib_a_minute": round(fit.slope * 60, 2) if fit else 0.0,
            "flat": end - start <= max(GROWTH * start, GROWTH_MIB),
        }
    return told


def reading(client: Client) -> dict[str, float]:
    now = client.scrape()
    return {name: now.total(metric) for name, metric in (COUNTERS | GAUGES).items()}


def settled(client: Client, before: dict[str, float]) -> dict[str, float]:
    """The metrics once what the server holds is what it held, or as they are after a minute."""
    end = time.monotonic() + QUIET
    while True:
        now = reading(client)
        if all(now[name] <= before[name] for name in GAUGES) or time.monotonic() > end:
            return now
        time.sleep(1)


def wrong(done: Outcomes, before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
    """What must not be, each in a line."""
    yield from (f"{what}: {detail}" for what, detail in done.bad.items())
    yield from (
        f"{n} × {kind}: {end}"
        for (kind, end), n in done.ends.items()
        if end.startswith("error 5") or end in ("no end", "connection lost", "failed")
    )
    if len(done.probes) != 1:
        yield f"the greedy request had {len(done.probes)} texts: {list(done.probes)}"
    for name in GAUGES:
        if after[name] > before[name]:
            yield f"{name} was {before[name]:g} and is {after[name]:g}"


def load(client: Client, clients: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Run it; the record, with what was wrong under ``wrong``."""
    about = client.json("/v1/models")["data"][0]
    traffic = Traffic(client, about["id"], int(about["max_model_len"]), seed)
    before, begun = reading(client), time.monotonic()
    done = asyncio.run(traffic.run(clients, seconds))
    took = time.monotonic() - begun
    after = settled(client, before)
    spent = {name: after[name] - before[name] for name in COUNTERS}
    ordered = sorted(done.seconds)
    return {
        "clients": clients,
        "seconds": round(took),
        "requests": done.table(),
        "probes": sum(done.probes.values()),
        **{name: int(n) for name, n in spent.items()},
        "prefix_hit_rate": round(spent["prefix_hits"] / max(spent["prefix_queries"], 1), 3),
        "latency_s": {f"p{q}": round(ordered[len(ordered) * q // 100], 2) for q in (50, 95)}
        if ordered
        else {},
        "held_before": {name: before[name] for name in GAUGES},
        "held_after": {name: after[name] for name in GAUGES},
        "wrong": list(wrong(done, before, after)),
    }


def watched(client: Client, pid: int | None, clients: int, seconds: float) -> dict[str, Any]:
    memory = Memory(pid) if pid else None
    if memory:
        memory.start()
    told = load(client, clients, seconds)
    if memory:
        memory.ended.set()
        memory.join()
        told["memory"] = memory_told(memory.rows)
        told["memory_by_time"] = [
            {
                "s": round(at),
                **{name: round(y) for name, y in mib.items() if name in told["memory"]},
            }
            for at, mib in memory.rows[:: max(len(memory.rows) // 40, 1)]
        ]
        told["wrong"] += [
            f"{name} grew from {m['start_mib']} to {m['end_mib']} MiB"
            for name, m in told["memory"].items()
            if not m["flat"]
        ]
    else:
        print("the memory is not watched: --pid says which process it is")
    return told


def started(model: str | None, arguments: list[str], clients: int, seconds: float) -> Any:
    """The same of a server of our own."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import own_model

    folder = own_model.folder(model or "smollm2")
    log = Path(tempfile.gettempdir()) / f"s4kv-load-{os.getpid()}.log"
    print(f"starting a server, its log is {log}", flush=True)
    side = Side("int4_kivi", ("--kv-cache-dtype", "int4_kivi"))
    server = Started(side, folder, [*STARTED, *arguments], log)
    try:
        server.wait(READY)
        return {"arguments": arguments} | watched(
            server.client, server.process.pid, clients, seconds
        )
    except Gone as e:
        raise server.died(str(e)) from e
    finally:
        server.stop()


def main() -> int:
    ap = harness.parser(__doc__, "load.json")
    ap.add_argument("--clients", type=int, default=200, help="at once (%(default)s)")
    ap.add_argument("--minutes", type=float, default=10, help="(%(default)s)")
    ap.add_argument("--model", help="a folder, or one that the project makes (smollm2)")
    ap.add_argument("--url", help="of a server that runs")
    ap.add_argument("--pid", type=int, help="of that server, to watch its memory")
    own = sys.argv[1:]
    own, more = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, CPU)
    args = ap.parse_args(own)
    seconds = 60 * args.minutes
    try:
        if args.url:
            told = watched(Client(args.url.rstrip("/")), args.pid, args.clients, seconds)
        else:
            told = started(args.model, more, args.clients, seconds)
    except (Died, Gone, ValueError, OSError, psutil.NoSuchProcess) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    for kind, ends in told["requests"].items():
        print(f"  {kind:10} {', '.join(f'{n} {end}' for end, n in ends.items())}")
    for name, m in told.get("memory", {}).items():
        print(f"  {name:18} {m['start_mib']} → {m['end_mib']} MiB, {m['mib_a_minute']} a minute")
    print(
        f"  {told['preemptions']} preemptions, prefix hit rate {told['prefix_hit_rate']:.0%}, "
        f"{told['prompt_tokens']:,} prompt and {told['text_tokens']:,} text tokens"
    )
    for line in told["wrong"]:
        print(f"WRONG: {line}")
    print("sound" if not told["wrong"] else f"not sound: {len(told['wrong'])} faults")
    harness.write(args.out, told)
    return 1 if told["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
