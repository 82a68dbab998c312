"""A server that is told to stop ends its streams and then itself."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import uvicorn

GRACE = 5  # seconds in which open connections may send what they still have


def end_at_once(number: int, _: Any) -> None:
    """The handler of SIGTERM and SIGINT until the server serves: it ends by that signal, with all
    that it started. There is nothing to end in order yet, and an exception would have to get
    through whatever loads just then."""
    name = signal.Signals(number).name
    os.write(2, f"s4kv: {name} before the server was ready: it ends\n".encode())
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.terminate()  # what does not heed it is killed by guards/parent.py
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container cannot end itself by a signal


def _stopping() -> Exception:
    from vllm.entrypoints.openai.engine.protocol import GenerationError
    from vllm.v1.engine.exceptions import EngineDeadError

    class Stopping(EngineDeadError, GenerationError):
        def __init__(self) -> None:
            Exception.__init__(self, "the server is shutting down")
            self.status_code = HTTPStatus.SERVICE_UNAVAILABLE

    return Stopping()


def expect_end(engine_client: Any) -> None:
    """Called before the engine is ended: whoever notices first that it is gone, requests hear that
    the server is shutting down, not that the engine died."""
    if processor := getattr(engine_client, "output_processor", None):
        propagate = processor.propagate_error
        processor.propagate_error = lambda _: propagate(_stopping())


def end_requests(engine_client: Any, server: uvicorn.Server) -> None:
    """Called when the engine has ended. What waits for its tokens gets an error (503, or the last
    event of a stream), and a client that does not read cannot hold the process."""
    if server.config.timeout_graceful_shutdown is None:
        server.config.timeout_graceful_shutdown = GRACE
    if processor := getattr(engine_client, "output_processor", None):
        processor.propagate_error(_stopping())
