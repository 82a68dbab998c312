from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:  # of the whole run, not only of this folder
        if Path(__file__).parent in item.path.parents and "needs_no_gpu" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="module")
def start():
    """Start an engine: start(model, **options)."""
    from tests.gpu.engines import Engines

    engines = Engines()
    yield engines
    engines.stop()


def pytest_report_header() -> str | None:
    """A result that is kept says what it was measured with."""
    if not torch.cuda.is_available():
        return None
    from bench.harness import machine

    return ", ".join(f"{k} {v}" for k, v in machine().items())


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_no_gpu: runs without a GPU")
    if torch.cuda.is_available():
        from s4kv_ext import cuda_ops

        cuda_ops.load()
