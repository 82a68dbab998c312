"""Asking the tasks of a server, greedily; and scoring prompts by their log-probabilities.

Every request has a prefix-cache salt of its own, so the cache is cold for each of them on every
side, whether or not prefix caching is on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import ClientSession

from s4kv_ext.compare.agreement import Top
from s4kv_ext.compare.client import Client, Refused, gather
from s4kv_ext.compare.tasks import Task, score

DIGITS = 4  # of a log-probability, in what is kept
Tick = Callable[[], None]


def body(task: Task, model: str, max_tokens: int, top: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    sent: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "seed": 0,
        "max_tokens": task.max_tokens or max_tokens,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
    }
    if task.schema is not None and task.constrain:
        schema = {"name": "answer", "schema": task.schema}
        sent["response_format"] = {"type": "json_schema", "json_schema": schema}
    if task.messages is None:
        return "/v1/completions", sent | {"prompt": task.prompt, "logprobs": top}
    chat = {"messages": list(task.messages), "logprobs": True, "top_logprobs": top}
    return "/v1/chat/completions", sent | chat


def kept(top: dict[Any, float]) -> Top:
    return {str(t).removeprefix("token_id:"): round(p, DIGITS) for t, p in top.items()}


def likeliest(told: dict[str, dict[str, float]], top: int) -> Top:
    """A server lists the prompt's own token too, however unlikely it is."""
    return kept({t: x["logprob"] for t, x in told.items() if x["rank"] <= top})


def text_and_tops(choice: dict[str, Any]) -> tuple[str, list[Top]]:
    logprobs = choice.get("logprobs") or {}
    if "message" not in choice:
        return choice["text"], [kept(t) for t in logprobs.get("top_logprobs") or []]
    content = logprobs.get("content") or []
    tops = [{t["token"]: t["logprob"] for t in c["top_logprobs"]} for c in content]
    message = choice["message"]
    return message.get("content") or message.get("reasoning") or "", [kept(t) for t in tops]


def each(
    client: Client, tasks: Sequence[Task],
    one: Callable[[ClientSession, Task], Awaitable[dict[str, Any]]], at_once: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """What ``one`` makes of every task, in order, over one session, so many at once."""

    async def run() -> list[dict[str, Any]]:
        async with client.session() as session:
            return await gather([partial(one, session, t) for t in tasks], at_once)

    return asyncio.run(run())


def ask(
    client: Client, model: str, tasks: Sequence[Task], max_tokens: int, top: int, at_once: int,
    tick: Tick,
) -> list[dict[str, Any]]:  # fmt: skip
    """The answers, in order; a task that the server refuses has an ``error`` instead of a text."""

    async def one(session: ClientSession, task: Task) -> dict[str, Any]:
        path, sent = body(task, model, max_tokens, top)
        answer: dict[str, Any] = {"id": task.id}
        try:
            choice = (await client.post(session, path, sent))["choices"][0]
        except Refused as e:
            answer["error"] = str(e)
        else:
            text, tops = text_and_tops(choice)
            answer |= {"text": text, "tokens": choice["token_ids"], "tops": tops}
            answer |= {"finish": choice["finish_reason"], "score": score(task, text)}
        tick()
        return answer

    return each(client, tasks, one, at_once)


def score_prompts(
    client: Client, model: str, tasks: Sequence[Task], positions: int, top: int, at_once: int,
    tick: Tick,
) -> list[dict[str, Any]]:  # fmt: skip
    """The likeliest tokens at the last `positions` of every prompt, as the server computes it."""

    async def one(session: ClientSession, task: Task) -> dict[str, Any]:
        path, sent = body(task, model, 1, top)
        sent |= {"max_tokens": 1, "prompt_logprobs": top}
        sent.pop("response_format", None)
        try:
            answer = await client.post(session, path, sent)
        except Refused as e:
            return {"id": task.id, "error": str(e)}
        finally:
            tick()
        told = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
        first = max(1, len(told) - positions)  # of the first token nothing is known
        tops = [likeliest(p, top) for p in told[first:]]
        return {"id": task.id, "first": first, "tops": tops}

    return each(client, tasks, one, at_once)
