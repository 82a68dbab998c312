"""What is compared: a side is a KV cache dtype with its settings, or a server that already runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from s4kv_ext.format import KV_CACHE_DTYPE

SETTINGS = ("map", "keys")
OURS = (
    *("--kv-cache-dtype", "--host", "--port", "--uds", "--enable-log-requests"),
    *("--ssl-keyfile", "--root-path"),
)
"""Flags of `vllm serve` that belong to the comparison, not to both sides alike."""


@dataclass(frozen=True)
class Side:
    name: str
    flags: tuple[str, ...] = ()
    url: str | None = None

    @property
    def slug(self) -> str:
        """For file names."""
        return re.sub(r"[^A-Za-z0-9_]+", "-", self.name).strip("-")


def from_kv(text: str) -> Side:
    """`auto`, `fp8`, `int4_kivi`, `int4_kivi:map=FILE`, `int4_kivi:keys=plain`."""
    dtype, _, rest = text.partition(":")
    flags = ["--kv-cache-dtype", dtype]
    settings = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if dtype != KV_CACHE_DTYPE or key not in SETTINGS or not equals:
            raise ValueError(f"--kv {text}: settings are {KV_CACHE_DTYPE}:map=FILE and :keys=plain")
        if key == "map":
            path = Path(value).expanduser().resolve()
            if not path.is_file():
                raise ValueError(f"--kv {text}: no file {value}; s4kv calibrate writes one")
            value = str(path)
        settings[key] = value
    if settings:
        flags += ["--additional-config", json.dumps({KV_CACHE_DTYPE: settings})]
    return Side(text, tuple(flags))


def from_url(text: str) -> Side:
    name, equals, url = text.partition("=")
    if not equals or not url.startswith(("http://", "https://")):
        raise ValueError(f"--url {text}: it is NAME=http://HOST:PORT")
    return Side(name, url=url.rstrip("/").removesuffix("/v1"))


def sides(kv: list[str], urls: list[str]) -> list[Side]:
    """All of them, the baseline first."""
    found = [*map(from_kv, kv), *map(from_url, urls)]
    if kv and urls:
        raise ValueError("either --kv, for servers started here, or --url, for running ones")
    if len(found) < 2:
        raise ValueError("two sides are needed, the baseline first: --kv auto --kv int4_kivi")
    slugs = [s.slug for s in found]
    if len(set(slugs)) < len(slugs):
        raise ValueError(f"two sides have the same name: {', '.join(s.name for s in found)}")
    return found


def check_serve_arguments(given: list[str], chosen: list[Side]) -> None:
    """Refuse what would make the sides differ, or a server unreachable."""
    names = {a.partition("=")[0].replace("_", "-") for a in given if a.startswith("--")}
    if wrong := sorted(names & set(OURS)):
        raise ValueError(f"leave out {wrong[0]}: s4kv compare sets it for each side")
    if "--additional-config" in names and any("--additional-config" in s.flags for s in chosen):
        raise ValueError("leave out --additional-config: --kv int4_kivi:map=FILE sets it")
