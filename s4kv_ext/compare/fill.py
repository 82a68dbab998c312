"""Fill a KV cache with requests that do not end, until the scheduler preempts the first."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from typing import Any

import aiohttp

from s4kv_ext.compare.client import Client, Gone, Refused, message
from s4kv_ext.compare.quality import Tick
from s4kv_ext.compare.scrape import (
    PREEMPTIONS,
    PROMPT_TOKENS,
    RUNNING,
    TEXT_TOKENS,
    USAGE,
    WAITING,
    Scrape,
)

POLL = 0.1
SETTLE = 60.0  # seconds for the aborted requests to leave
DATA = b"data: "
ERROR = DATA + b'{"error"'
IDS = range(1000, 9000)  # token ids that every vocabulary has


def lengths(max_model_len: int, wanted: int) -> tuple[int, int]:
    """Tokens of a prompt and of its answer, which grows until there is no room left."""
    prompt = max(min(wanted, max_model_len * 3 // 4), 1)
    return prompt, max_model_len - prompt


def preempted(before: Scrape, now: Scrape, held: dict[str, float]) -> bool:
    """vLLM counts a preemption only when that request goes on, which in a full cache may take long.
    Meanwhile it waits again: fewer run than at the peak, and none has left."""
    if now.total(PREEMPTIONS) > before.total(PREEMPTIONS):
        return True
    there = now.total(RUNNING) + now.total(WAITING)
    return now.total(RUNNING) < held["requests"] and there >= held["there"]


def fill(
    client: Client, facts: dict[str, Any], wanted: int, seconds: float, tick: Tick
) -> dict[str, Any]:
    """What was in the cache just before the first preemption, or before the time was over."""
    prompt, answer = lengths(facts["max_model_len"], wanted)
    tokens = float(facts["cache"].get("kv_cache_size_tokens") or 0) * facts["engines"]
    count = int(tokens / prompt * 1.3) + 4
    body = {
        "model": facts["model"],
        "max_tokens": answer,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    ids = random.Random(0)

    async def one(session: aiohttp.ClientSession) -> None:
        text = [ids.choice(IDS) for _ in range(prompt)]
        sent = body | {"prompt": text, "cache_salt": uuid.uuid4().hex}
        async with session.post(f"{client.url}/v1/completions", json=sent) as told:
            if told.status != 200:
                raise Refused(message(await told.json(content_type=None)))
            async for line in told.content:
                if line.startswith(ERROR):
                    raise Refused(message(json.loads(line.removeprefix(DATA))))

    async def run() -> dict[str, Any]:
        before = await asyncio.to_thread(client.scrape)
        start = time.monotonic()
        held = {"tokens": 0.0, "requests": 0.0, "there": 0.0, "usage": 0.0}
        total = 0.0
        ended = "time"
        async with client.session() as session:
            jobs = [asyncio.ensure_future(one(session)) for _ in range(count)]
            while time.monotonic() - start < seconds:
                await asyncio.sleep(POLL)
                tick()
                now = await asyncio.to_thread(client.scrape)
                total = sum(now.total(m) - before.total(m) for m in (PROMPT_TOKENS, TEXT_TOKENS))
                done = [j for j in jobs if j.done()]
                if wrong := [e for j in done if (e := j.exception())]:
                    if isinstance(wrong[0], Refused):
                        raise wrong[0]
                    raise Gone(f"{client.url} does not answer: {type(wrong[0]).__name__}")
                if preempted(before, now, held):
                    ended = "preempted"
                    break
                if done:  # the first request has ended, and none was preempted
                    ended = "fits"
                    break
                held = {
                    "tokens": max(held["tokens"], total),
                    "requests": max(held["requests"], now.total(RUNNING)),
                    "there": max(held["there"], now.total(RUNNING) + now.total(WAITING)),
                    "usage": max(held["usage"], now.total(USAGE) / facts["engines"]),
                }
            for job in jobs:  # closing the connection aborts the request
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        took = time.monotonic() - start
        return {
            **held,
            "ended": ended,
            "tokens_at_end": total,  # with what was computed after the preemption
            "seconds": took,
            "prompt": prompt,
            "answer": answer,
        }

    result = asyncio.run(run())
    end = time.monotonic() + SETTLE
    while time.monotonic() < end:
        now = client.scrape()
        if now.total(RUNNING) + now.total(WAITING) == 0:
            break
        time.sleep(POLL)
    return result
