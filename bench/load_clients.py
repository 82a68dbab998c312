"""Clients of `load.py`: each sends one request after another and notes how it ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from s4kv_ext.compare.client import Client

TEXT = (
    "the sea a village stone of light and bread under every winter road carries river we count "
    "seven old houses before morning nobody asks why wind turns north again"
)
WORDS = TEXT.split()
KINDS = ("answer", "answer", "stream", "stream", "stream", "vanish", "vanish", "half", "too long")
COUNT = ", ".join(map(str, range(1, 81))) + ","
PROBE = {"prompt": COUNT, "max_tokens": 48, "temperature": 0}
"""A greedy request whose text has no near-ties, and is long enough for pages to be sealed."""
PATIENCE = 600.0  # seconds for one request


@dataclass
class Outcomes:
    """``ends``: by kind and how it ended; ``bad``: what must not be, the first of each kind."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """Of requests that were answered whole."""
    probes: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, end: str, detail: str = "") -> None:
        self.ends[kind, end] += 1
        if detail:
            self.bad.setdefault(f"{kind}: {end}", detail[:500])

    def table(self) -> dict[str, dict[str, int]]:
        kinds = sorted({kind for kind, _ in self.ends})
        return {k: {e: n for (kind, e), n in sorted(self.ends.items()) if kind == k} for k in kinds}


class Traffic:
    """Of one server that takes ``limit`` tokens a request, of which a word has one or two."""

    def __init__(self, client: Client, model: str, limit: int, seed: int = 0) -> None:
        self.client, self.model, self.limit = client, model, limit
        self.longest = longest = min(limit // 2, 4000)
        self.rng = Random(seed)
        self.done = Outcomes()
        self.repeated = [self.words(self.length()) for _ in range(20)]
        self.shared = [self.words(longest // 3) for _ in range(4)]

    def words(self, n: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=n))

    def length(self) -> int:
        """Most are short, some as long as may be."""
        return int(self.longest ** self.rng.uniform(0.3, 1))

    def prompt(self) -> str:
        match self.rng.randrange(4):
            case 0:
                return self.rng.choice(self.repeated)
            case 1:
                return f"{self.rng.choice(self.shared)} {self.words(self.rng.randint(1, 60))}"
            case _:
                return self.words(self.length())

    def body(self, kind: str) -> tuple[str, dict[str, Any]]:
        """Path and JSON of a request."""
        text = self.words(2 * self.limit) if kind == "too long" else self.prompt()
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": int(4 ** self.rng.uniform(0, 4)),
            "temperature": self.rng.choice((0, 0, 0.8)),
            "n": 1,
            "stream": kind in ("stream", "vanish"),
            "ignore_eos": True,
        }
        if self.rng.random() < 0.25:
            body |= {"n": self.rng.choice((2, 3, 4)), "temperature": 0.8}
        if self.rng.random() < 0.3:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        return "/v1/completions", body | {"prompt": text}

    async def run(self, clients: int, seconds: float) -> Outcomes:
        """All of them, until then; what is under way by then is waited for."""
        until = time.monotonic() + seconds
        async with self.client.session() as session:
            jobs = [self.client_loop(session, until) for _ in range(clients)]
            await asyncio.gather(*jobs, self.probe_loop(session, until))
            await self.probe(session)
        return self.done

    async def client_loop(self, session: aiohttp.ClientSession, until: float) -> None:
        await asyncio.sleep(self.rng.uniform(0, 2))
        while time.monotonic() < until:
            kind = self.rng.choice(KINDS)
            try:
                await asyncio.wait_for(self.one(session, kind), PATIENCE)
            except TimeoutError:
                self.done.note(kind, "no end", f"nothing in {PATIENCE:.0f} s")
            except (aiohttp.ClientError, OSError) as e:
                self.done.note(kind, "connection lost", repr(e))

    async def one(self, session: aiohttp.ClientSession, kind: str) -> None:
        path, body = self.body(kind)
        if kind == "half":
            return await self.half(path, json.dumps(body))
        if kind == "vanish":
            try:
                await asyncio.wait_for(self.read(session, kind, path, body), self.patience())
            except TimeoutError:
                self.done.note(kind, "left")
            return None
        return await self.read(session, kind, path, body)

    def patience(self) -> float:
        return self.rng.choice((0.05, 1.0, 10.0)) * self.rng.random()

    async def read(
        self, session: aiohttp.ClientSession, kind: str, path: str, body: dict[str, Any]
    ) -> None:
        begun = time.monotonic()
        async with session.post(self.client.url + path, json=body) as answer:
            if answer.status != 200:
                return self.refused(kind, answer.status, await answer.text())
            text = await answer.text()
        end = stream_end(text) if body["stream"] else answer_end(text, body["n"])
        self.done.note(kind, end or "answered", text[-300:] if end else "")
        if not end:
            self.done.seconds.append(time.monotonic() - begun)
        return None

    def refused(self, kind: str, status: int, text: str) -> None:
        """An error is clean if it is the client's, or says that the server is busy, in JSON."""
        try:
            clean = bool(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            clean = False
        right = clean and status == 400 and kind == "too long"
        self.done.note(kind, f"error {status}", "" if right else text or "an empty body")

    async def half(self, path: str, body: str) -> None:
        """Connects, sends a part of a request, and is gone."""
        host, _, port = self.client.url.rpartition("//")[2].partition(":")
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        _, writer = await asyncio.open_connection(host, int(port or 80))
        writer.write(whole[: self.rng.randrange(len(whole))])
        await asyncio.sleep(self.rng.random())
        writer.transport.abort()
        self.done.note("half", "left")

    async def probe_loop(self, session: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            await self.probe(session)
            await asyncio.sleep(5)

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """The same greedy request; its text must not depend on what runs beside it."""
        try:
            told = await self.client.post(
                session, "/v1/completions", PROBE | {"model": self.model, "ignore_eos": True}
            )
            self.done.probes[told["choices"][0]["text"]] += 1
        except Exception as e:
            self.done.note("probe", "failed", repr(e))


def answer_end(text: str, n: int) -> str:
    """Empty if it is a whole answer."""
    try:
        reasons = [c["finish_reason"] for c in json.loads(text)["choices"]]
    except (ValueError, KeyError, TypeError):
        return "no answer"
    return "" if reasons == ["length"] * n else "cut short"


def stream_end(text: str) -> str:
    """Empty if it is a whole stream."""
    events = [x.removeprefix("data: ") for x in text.splitlines() if x.startswith("data: ")]
    if '"error"' in "".join(events[-2:]):
        return "error event"
    return "" if events[-1:] == ["[DONE]"] else "cut short"
