import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def report(capsys) -> Callable[[str], None]:
    """Prints a line whether or not pytest captures: a run is also the record of error and speed.

    To stderr, which pytest-xdist leaves to its workers.
    """

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="", file=sys.stderr, flush=True)

    return line
