"""Does a server answer? One token within a deadline; its /health is 200 also where none ever comes.

`watch` says so to systemd, which restarts a server that stopped answering. A busy server may not
serve the probe in time; it shows signs of work, and is left alone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

WORK = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",  # moves with each chunk of a long prompt
)
"""Metrics that move while the engine computes. Requests that only arrive move none of them."""


class NotReady(Exception):
    """No token came; says why."""


class Refused(NotReady):
    """The server will not answer this caller, however long it waits."""


@dataclass(frozen=True)
class Server:
    """An address without a trailing slash, and the key and the model to ask with.

    No key sends none; no model asks for the first that the server names.
    """

    url: str
    key: str | None = None
    model: str | None = None


def probe(server: Server, deadline: float) -> tuple[str, float]:
    """The model that answered and the seconds it took. Raises NotReady after `deadline` seconds."""
    start = time.monotonic()
    try:
        model = asyncio.run(_probe(server, deadline))
    except TimeoutError:
        raise NotReady(f"no token from {server.url} within {deadline:g} s") from None
    except aiohttp.ClientConnectorError as e:
        raise NotReady(f"{server.url} cannot be reached: {e.strerror}") from e
    except aiohttp.ClientError as e:
        raise NotReady(f"{server.url} ended the connection: {type(e).__name__}") from e
    return model, time.monotonic() - start


def _session(server: Server) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    return aiohttp.ClientSession(headers=headers)


async def _probe(server: Server, deadline: float) -> str:
    async with asyncio.timeout(deadline), _session(server) as http:
        model = server.model
        if model is None:
            listed = await _json(server, http.get(f"{server.url}/v1/models"))
            if not listed.get("data"):
                raise NotReady(f"{server.url} names no model")
            model = str(listed["data"][0]["id"])
        body = {"model": model, "prompt": "1", "max_tokens": 1, "ignore_eos": True}
        told = await _json(server, http.post(f"{server.url}/v1/completions", json=body))
        if told.get("usage", {}).get("completion_tokens") != 1:
            raise NotReady(f"{server.url} answered without a token")
        return model


async def _json(server: Server, request: Any) -> dict[str, Any]:
    async with request as answer:
        if answer.status in (401, 403):
            raise Refused(f"{server.url} refuses the key ({answer.status})")
        if answer.status != 200:
            raise NotReady(f"{server.url} answers {answer.status}: {(await answer.text())[:300]}")
        try:
            told = await answer.json(content_type=None)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise NotReady(f"{server.url} does not speak the OpenAI API")
        return told


def wait(server: Server, deadline: float, seconds: float) -> tuple[str, float]:
    """`probe` again and again, until one succeeds or `seconds` are over."""
    end = time.monotonic() + seconds
    while True:
        try:
            return probe(server, deadline)
        except Refused:
            raise
        except NotReady:
            if time.monotonic() >= end:
                raise
            time.sleep(min(2.0, max(0.0, end - time.monotonic())))


def work(server: Server, deadline: float) -> tuple[str, ...] | None:
    """What the WORK metrics say now; None where the server tells none in time."""
    try:
        text = asyncio.run(_metrics(server, deadline))
    except (TimeoutError, aiohttp.ClientError):
        return None
    return tuple(x for x in text.splitlines() if x.startswith(WORK))


async def _metrics(server: Server, deadline: float) -> str:
    url = f"{server.url}/metrics"
    async with asyncio.timeout(deadline), _session(server) as http, http.get(url) as answer:
        return await answer.text()


def alive(server: Server, deadline: float) -> str:
    """How the server shows that it works: a token, or that it is busy. Raises NotReady."""
    before = work(server, deadline / 4)
    try:
        _, seconds = probe(server, deadline)
        return f"one token in {seconds:.2f} s"
    except Refused:
        raise
    except NotReady:
        if before is None or work(server, deadline / 4) in (None, before):
            raise
        return f"busy: no token within {deadline:g} s, but the engine works"


def watch(server: Server, deadline: float | None) -> None:
    """Tell systemd READY at the first token, then that the server is alive, until the parent ends.

    The pace follows WatchdogSec=: a sixth of it passes between two probes, and one has a third.
    Raises ValueError where systemd does not listen.
    """
    address, limit = os.environ.get("NOTIFY_SOCKET"), os.environ.get("WATCHDOG_USEC")
    if not address or not limit:
        raise ValueError("--notify is for a systemd service with Type=notify and WatchdogSec=")
    seconds, parent = int(limit) / 1e6, os.getppid()
    deadline = min(deadline or seconds, seconds / 3)
    ready = False
    while os.getppid() == parent:
        try:
            if ready:
                notify(address, f"WATCHDOG=1\nSTATUS={alive(server, deadline)}")
            else:
                model, _ = probe(server, deadline)
                notify(address, f"READY=1\nWATCHDOG=1\nSTATUS=serving {model}")
                ready = True
        except NotReady as e:
            if ready:
                print(f"s4kv: not ready: {e}", file=sys.stderr, flush=True)
        time.sleep(seconds / 6 if ready else 1)


def notify(address: str, state: str) -> None:
    """One message to systemd, as sd_notify(3) sends it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
