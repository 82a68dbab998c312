"""Tasks of lm-evaluation-harness, where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from s4kv_ext.compare.servers import environment, tail

MISSING = "lm-evaluation-harness is not installed, --lm-eval is left out: pip install lm-eval[api]"


def installed() -> bool:
    return find_spec("lm_eval") is not None


def command(url: str, model: str, tokenizer: str, task: str, at_once: int) -> list[str]:
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": tokenizer,
        "num_concurrent": str(at_once),
        "tokenized_requests": "False",
    }
    told = ",".join(f"{k}={v}" for k, v in arguments.items())
    return [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", told, "--tasks", task),
    ]


def scores(folder: Path) -> dict[str, float]:
    """Of the newest result every figure of which more is better, by task and name."""
    path = max(folder.rglob("results*.json"), key=lambda p: p.stat().st_mtime)
    told = json.loads(path.read_text())
    return {
        f"{task} {name.partition(',')[0]}": float(value)
        for task, row in told["results"].items()
        for name, value in row.items()
        if told["higher_is_better"].get(task, {}).get(name.partition(",")[0])
    }


def measure(
    url: str, model: str, tokenizer: str, task: str, at_once: int, log: Path
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = [*command(url, model, tokenizer, task, at_once), "--output_path", folder]
        with log.open("a") as out:
            done = subprocess.run(
                run, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=environment(), check=False,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"lm_eval failed, the end of {log}:\n{tail(log)}")
        return {"scores": scores(Path(folder))}
