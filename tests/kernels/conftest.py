import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels.sequences import ISAS, available

from s4kv_ext import cpu_ops


@pytest.fixture(scope="session", autouse=True)
def library():
    """The built operators; S4KV_CPU_LIBRARY names another build of them."""
    cpu_ops.load(Path(os.environ.get("S4KV_CPU_LIBRARY", cpu_ops.LIBRARY)))


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """The operators share their work among threads, also where OMP_NUM_THREADS says one."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


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
