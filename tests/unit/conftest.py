import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Commands that run in this process set variables; the next tests must not have them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
