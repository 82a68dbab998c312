"""What pip is told, uv is told."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "build"))

from indexes import pip_settings, uv_settings  # noqa: E402

sys.path.remove(str(ROOT / "build"))


def settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, **env: str
) -> dict[str, str]:
    file = tmp_path / "pip.conf"
    file.write_text(text)
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for name, value in (env | {"PIP_CONFIG_FILE": str(file)}).items():
        monkeypatch.setenv(name, value)
    return pip_settings(sys.executable)


def test_files_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    text = f"""
[global]
index-url = http://index.example/simple
extra-index-url = http://a.example/simple
    file:///nowhere/simple
find-links = {links} /nowhere
trusted-host = a.example
cert = /etc/ca.pem
[install]
pre = true
"""
    found = settings(tmp_path, monkeypatch, text, PIP_INDEX_URL="http://env.example/simple")
    flags, env = uv_settings(found)
    pairs = list(pairwise(flags))
    assert ("--index-url", "http://env.example/simple") in pairs  # the environment wins
    assert ("--extra-index-url", "http://a.example/simple") in pairs
    assert ("--find-links", str(links)) in pairs
    assert ("--allow-insecure-host", "a.example") in pairs
    assert ("--prerelease", "allow") in pairs
    assert ("--index-strategy", "unsafe-best-match") in pairs  # as pip chooses
    assert not [f for f in flags if "nowhere" in f]
    assert env["SSL_CERT_FILE"] == "/etc/ca.pem"


def test_nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, _ = uv_settings(settings(tmp_path, monkeypatch, "", PIP_NO_INDEX="1"))
    assert "--no-index" in flags
    assert "--index-url" not in flags
