"""A few of the clients of bench/load.py, for a short while; bench/results/load.json is of 200."""

from __future__ import annotations

import sys
from pathlib import Path

from s4kv_ext.compare.client import Client

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from load import load


def test_every_request_ends_and_gives_back_what_it_held(server):
    told = load(Client(server.url), clients=30, seconds=15)
    print(told)
    assert not told["wrong"]
    assert told["requests"]["vanish"]["left"] and told["requests"]["half"]["left"]
    assert told["requests"]["stream"] == {"answered": told["requests"]["stream"]["answered"]}
    assert told["requests"]["too long"].keys() == {"error 400"}
    assert told["prefix_hits"] and told["seals"] and told["probes"] >= 2
