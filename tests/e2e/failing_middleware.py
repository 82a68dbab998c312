"""A middleware of the user's, for `--middleware`, that fails: nobody catches its exception."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response


async def fail(request: Request, call_next) -> Response:
    if request.headers.get("x-fail"):
        raise RuntimeError("as asked")
    return await call_next(request)
