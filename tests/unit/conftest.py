import os
import signal
from collections.abc import Iterator

import pytest

# Ctrl-C is ignored by what a shell starts in the background, and so by all that this starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Commands that run in this process set variables; the next tests must not have them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
