"""What kernels cost among those of a model, which alone they do not show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "layer.py"


def test_store_and_decode_do_not_hinder_each_other(tmp_path: Path) -> None:
    """Decode launched early cost 8 us more than store and decode one after the other."""
    out = tmp_path / "layer.json"
    subprocess.run([sys.executable, BENCH, "--cells", "1x1024", "--out", out], check=True)
    row = json.loads(out.read_text())["cells"]["1x1024"]
    us = {name: row[name]["us"] for name in ("int4_kivi", "store", "decode")}
    print(us)
    assert us["int4_kivi"] < us["store"] + us["decode"] + 4
