"""Generations of processes for test_guards.py; apart because a spawned one imports it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

from s4kv_ext.guards import parent


def child(pipe, stubborn: bool) -> None:
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.GRACE = 0.5
    parent.end_with_parent()
    pipe.send(os.getpid())
    time.sleep(60)


def middle(pipe, method: str, stubborn: bool) -> None:
    parent.end_with_parent()  # a forked child must not believe that it watches already
    multiprocessing.get_context(method).Process(target=child, args=(pipe, stubborn)).start()
    time.sleep(60)


def deaf(pipe) -> None:
    """It does not look after its parent yet."""
    pipe.send(os.getpid())
    time.sleep(60)


def starting(pipe) -> None:
    """An API server that waits for its engine as vLLM's does."""
    import uvloop
    import zmq
    from vllm.entrypoints.openai import api_server
    from vllm.utils.network_utils import get_open_zmq_ipc_path, zmq_socket_ctx

    async def worker(*_) -> None:
        multiprocessing.get_context("spawn").Process(target=deaf, args=(pipe,)).start()
        with zmq_socket_ctx(get_open_zmq_ipc_path(), zmq.ROUTER, bind=True) as socket:
            socket.poll(60_000)

    api_server.setup_server = lambda *_, **__: (None, None)
    api_server.run_server_worker = worker
    uvloop.run(api_server.run_server(None))
