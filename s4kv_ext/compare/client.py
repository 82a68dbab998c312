"""Requests to one server. None goes anywhere else: proxies of the environment are not used."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import aiohttp
import requests

from s4kv_ext.compare.scrape import Scrape

T = TypeVar("T")
KEY = "VLLM_API_KEY"  # as `vllm serve` reads it
TIMEOUT = 3600.0


class Gone(Exception):
    """The server does not answer any more."""


class Refused(RuntimeError):
    """The server answered with an error, for this request only."""


def headers() -> dict[str, str]:
    key = os.environ.get(KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


class Client:
    def __init__(self, url: str) -> None:
        self.url = url
        self.http = requests.Session()
        self.http.trust_env = False
        self.http.headers.update(headers())

    def get(self, path: str, timeout: float = 30) -> requests.Response:
        try:
            return self.http.get(self.url + path, timeout=timeout)
        except requests.RequestException as e:
            raise Gone(f"{self.url} does not answer: {type(e).__name__}") from e

    def json(self, path: str) -> dict[str, Any]:
        answer = self.get(path)
        if answer.status_code == 401:
            raise ValueError(f"{self.url} wants an API key: set {KEY}")
        if not answer.ok:
            raise ValueError(f"{self.url}{path} answers {answer.status_code}")
        return answer.json()

    def healthy(self) -> bool:
        try:
            return self.get("/health", 10).ok
        except Gone:
            return False

    def scrape(self) -> Scrape:
        return Scrape(self.get("/metrics").text)

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=headers(),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def post(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        try:
            async with session.post(self.url + path, json=body) as answer:
                told = await answer.json(content_type=None)
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise Gone(f"{self.url} does not answer: {type(e).__name__}") from e
        if status >= 500:
            raise Gone(f"{self.url} answers {status}: {message(told)}")
        if status != 200:
            raise Refused(message(told))
        return told


def message(told: Any) -> str:
    error = told.get("error", told) if isinstance(told, dict) else told
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


async def gather(jobs: Iterable[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Run them in order, so many at once; the first failure ends all."""
    gate = asyncio.Semaphore(at_once)

    async def one(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    tasks = [asyncio.ensure_future(one(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
