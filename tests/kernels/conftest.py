import os
from pathlib import Path

import pytest
import torch
from kernels.sequences import ISAS, available

from s4kv_ext import cpu_ops


@pytest.fixture(scope="session", autouse=True)
def library():
    """The built operators; S4KV_CPU_LIBRARY names another build of them."""
    cpu_ops.load(Path(os.environ.get("S4KV_CPU_LIBRARY", cpu_ops.LIBRARY)))


@pytest.fixture(params=ISAS)
def isa(request, library):
    best = cpu_ops.isa()
    if request.param not in available():
        pytest.skip(f"this processor has no {request.param}")
    cpu_ops.use_isa(request.param)
    yield request.param
    cpu_ops.use_isa(best)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def report(capsys):
    """Prints a line whether or not pytest captures: a run is also the record of error and speed."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="", flush=True)

    return line
