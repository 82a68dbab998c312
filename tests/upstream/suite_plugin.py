"""Loaded into upstream's suites: pytest -p suite_plugin; EXCLUDED names the exclusions."""

import os
import tomllib
from pathlib import Path

import pytest


def excluded() -> list[str]:
    with Path(os.environ["EXCLUDED"]).open("rb") as f:
        return [test for group in tomllib.load(f)["excluded"] for test in group["tests"]]


def pytest_collection_modifyitems(config, items):
    out = [item for item in items if any(matches(item.nodeid, e) for e in excluded())]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in set(out)]
    for item in items:
        # Upstream cleans up distributed state and memory after each test: a second each on a CPU.
        item.add_marker(pytest.mark.skip_global_cleanup)


def matches(node: str, entry: str) -> bool:
    """A file, a test function with all its parameters, or one test."""
    return node == entry or node.startswith((f"{entry}::", f"{entry}["))
