"""The outermost middleware of the API server."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from s4kv_ext.guards.limits import limit
from s4kv_ext.guards.requests import bounded_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ID_HEADER = b"x-request-id"
MAX_BODY = 128 << 20  # bytes; it is held in memory, several times over while it is read
VARIABLE = "S4KV_MAX_BODY"  # another bound
# Values of JSON in a body, a list or an object counted four times: so many are read in 0.1 s, into
# 50 MB. No prompt has as many token ids, no text as many commas.
MAX_VALUES = 2_000_000


class Guard:
    """Bounds the request id of the header and the body, and answers what nobody caught.

    Starlette answers such an exception and then raises it again; the HTTP server closes the
    connection, on which the client's next request may be under way already.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.max_body = limit(VARIABLE, MAX_BODY)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        scope["headers"] = [
            (name, bounded_id(value.decode("latin-1")).encode() if name == ID_HEADER else value)
            for name, value in scope["headers"]
        ]
        if scope["type"] == "websocket":
            return await self.app(scope, receive, send)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, bounded(receive, self.max_body), sending)
        except Exception as error:
            if started:
                raise
            response = await answer(scope, error)
            await response(scope, receive, send)
        return None


def bounded(receive: Receive, most: int) -> Receive:
    """The same, but a body of more bytes, or of more values than any prompt has, ends in 413 before
    the rest of it has been read."""
    received = values = 0

    async def receiving() -> Message:
        nonlocal received, values
        message = await receive()
        body = message.get("body", b"")
        received += len(body)
        values += body.count(b",") + 4 * (body.count(b"[") + body.count(b"{"))
        if received > most or values > MAX_VALUES:
            from fastapi import HTTPException

            bytes_ = f"{most} bytes (the server's variable {VARIABLE})"
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has more than {bytes_ if received > most else f'{MAX_VALUES} values'}",
            )
        return message

    return receiving


async def answer(scope: Scope, error: Exception) -> Any:
    from starlette.requests import Request
    from vllm.entrypoints.serve.utils.server_utils import exception_handler
    from vllm.logger import init_logger

    response = await exception_handler(Request(scope), error)
    if response.status_code >= 500:
        init_logger("vllm.s4kv_ext").error(
            "an error that nobody caught, %s %.200s", scope["method"], scope["path"], exc_info=error
        )
    return response
