"""A stream of /v1/responses that fails ends with an event that says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any


def ends_with_its_error(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method that generates events give an event in place of an exception. The client has
    status 200 by then; an exception would close the connection on it."""

    @wraps(generate)
    async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        number = 0
        try:
            async with aclosing(generate(self, *args, **kwargs)) as events:
                async for event in events:
                    yield event
                    number += 1
        except Exception as e:
            yield error_event(self.create_error_response(e).error, number)

    return stream


def error_event(error: Any, number: int) -> Any:
    """The event of the Responses API, and in it the object that other streams have, at which client
    libraries raise. Logs the exception that is being handled if it is the server's."""
    from openai.types.responses import ResponseErrorEvent
    from vllm.logger import init_logger

    if error.code >= 500:
        init_logger("vllm.s4kv_ext").exception("a stream of /v1/responses failed")
    return ResponseErrorEvent.model_validate(
        {
            "type": "error",
            "code": str(error.code),
            "message": error.message,
            "param": error.param,
            "sequence_number": number,
            "error": error.model_dump(),
        }
    )
