"""Two generations of processes for test_guards.py; apart because a spawned one imports it."""

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
