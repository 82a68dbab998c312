"""No process of vLLM outlives the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

GRACE = 5  # seconds for an orderly end

_watching: int | None = None  # the process that does; a forked child inherits the value


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent has gone, however it went.

    Not PR_SET_PDEATHSIG: that is sent when the *thread* ends that started the process.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is None or _watching == os.getpid():
        return
    _watching = os.getpid()

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="s4kv-parent", daemon=True).start()
