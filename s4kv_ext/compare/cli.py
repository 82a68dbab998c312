"""The arguments of `s4kv compare`, and its exit status."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

PARTS = ("capacity", "quality", "speed", "prompts", "fill")
SETS = ("quotes", "needle", "structured", "instructions", "refusals", "turns")

DESCRIPTION = """Compare KV cache dtypes on your model, prompts and traffic; the first --kv is the
baseline. A server is started for each, one after the other, equal in everything else; or, with
--url, servers that already run are compared. Capacity, quality and speed are measured, the baseline
against itself as noise floor, and --out gets report.html, report.md and report.json, whose first
line is the verdict. No prompt leaves the machine but to the given servers.

Exit status: 0; 1 if a condition of --fail-if holds or something could not be measured;
2 for wrong arguments or unequal servers; 130 after Ctrl-C (--resume goes on)."""

EPILOG = """examples:
  s4kv compare /models/Qwen2.5-7B-Instruct --kv auto --kv int4_kivi --out report/
  s4kv compare MODEL --kv auto --kv fp8 --kv int4_kivi:map=map.safetensors \\
      --tasks mine.jsonl --rates 1,4,16 --out report/ -- --max-model-len 32768
  s4kv compare --url old=http://10.0.0.1:8000 --url new=http://10.0.0.2:8000 --out report/
  s4kv compare MODEL --kv auto --kv int4_kivi --out report/ \\
      --fail-if 'quality<0.99' --fail-if 'ttft_p95>1.2'

what comes after -- is for `vllm serve`, on all sides alike. A server with an API key: set
VLLM_API_KEY.

metrics of --threshold and --fail-if, of each side against the baseline:
"""

TASKS = """
tasks, one JSON object a line of --tasks:
"""


def numbers(text: str) -> list[str]:
    """Request rates, as given: they name the pieces."""
    found = [x.strip() for x in text.split(",")]
    for x in found:
        try:
            wrong = not float(x) > 0
        except ValueError:
            wrong = True
        if wrong:
            raise argparse.ArgumentTypeError(f"{x!r} is no request rate (a number, or inf)")
    return found


def parts(text: str) -> list[str]:
    found = [x for x in text.split(",") if x]
    if wrong := set(found) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part {wrong.pop()!r}: {', '.join(PARTS)}")
    return found


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def option(name: str, help: str, **how: Any) -> tuple[str, dict[str, Any]]:
    return name, {"help": help, **how}


def many(name: str, metavar: str, help: str, **how: Any) -> tuple[str, dict[str, Any]]:
    return option(name, help, action="append", default=[], metavar=metavar, **how)


def count(name: str, default: int | None, help: str) -> tuple[str, dict[str, Any]]:
    told = f"{help} ({default})" if default else help
    return option(name, told, type=positive, default=default, metavar="N")


def flag(name: str, help: str) -> tuple[str, dict[str, Any]]:
    return option(name, help, action="store_true")


OPTIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "what is compared": [
        many("--kv", "DTYPE", "auto, fp8, int4_kivi, int4_kivi:map=FILE, …; twice or more"),
        many("--url", "NAME=URL", "a server that runs; twice or more"),
        option("--out", "folder of the report", type=Path, required=True),
        flag("--resume", "measure only what --out lacks"),
        count("--rounds", 2, "with 1 there is no noise floor"),
        flag("--together", "keep all servers up at once, where there is memory for all"),
        count("--start-timeout", 900, "seconds for a server to become ready"),
        option(
            "--skip",
            "capacity, quality, speed, prompts (their log-probabilities), fill",
            type=parts,
            default=[],
            metavar="PART,…",
        ),
    ],
    "quality": [
        many("--tasks", "FILE", "JSONL", type=Path),
        option("--builtin", "built-in sets, or none (%(default)s)", default=",".join(SETS)),
        count("--builtin-count", 8, "tasks of each built-in set, at most 8"),
        count("--context", None, "tokens of the built-in long contexts; 4096 or half of what fits"),
        count("--max-tokens", 128, "of an answer"),
        count("--concurrency", 4, "requests at once"),
        count("--top", 20, "log-probabilities a position"),
        count("--positions", 512, "last positions of a prompt that are scored"),
        many("--lm-eval", "TASK", "of lm-evaluation-harness, if it is installed"),
    ],
    "speed and capacity": [
        option("--rates", "a second (1,4,inf)", type=numbers, default=["1", "4", "inf"]),
        count("--speed-rounds", None, "default: as --rounds"),
        count("--num-prompts", 64, "at each rate"),
        count("--input-len", 1024, "tokens"),
        count("--output-len", 128, "tokens"),
        option(
            "--bench-args",
            "more for vllm bench serve: '--dataset-name sharegpt --dataset-path FILE'",
            type=shlex.split,
            default=[],
            metavar="'…'",
        ),
        option("--tokenizer", "folder; for a --url server whose model is not on this machine"),
        count("--fill-len", 4096, "tokens of a request that fills the cache"),
        count("--fill-seconds", 600, "at most"),
    ],
    "verdict": [
        many("--threshold", "COND", "such as 'kl<=0.01', in place of that metric's default"),
        many("--fail-if", "COND", "such as 'quality<0.99': exit status 1 if a side meets it"),
    ],
}


class Help(argparse.Action):
    """The list of metrics is made only when it is asked for."""

    def __init__(self, option_strings: Any, dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from s4kv_ext.compare import tasks
        from s4kv_ext.compare.figures import METRICS
        from s4kv_ext.compare.verdict import DEFAULTS

        parser.epilog = EPILOG + "\n".join(f"  {n:16} {m.what}" for n, m in METRICS.items())
        parser.epilog += f"\n\ndefault thresholds: {' '.join(DEFAULTS)}\n{TASKS}"
        parser.epilog += (tasks.__doc__ or "").partition(":\n\n")[2]
        parser.print_help()
        parser.exit()


def add(sub: argparse._SubParsersAction) -> None:
    p = sub.add_parser(
        "compare",
        help="is a KV cache dtype as good, as large and as fast as another, on your model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    p.add_argument("-h", "--help", action=Help, help="show this, the metrics and the tasks' form")
    p.add_argument("model", nargs="?", help="a folder or a hub name, as for vllm serve")
    for title, options in OPTIONS.items():
        group = p.add_argument_group(title)
        for name, how in options:
            group.add_argument(name, **how)
    p.set_defaults(run=main)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is for `s4kv compare`, and what after -- is for `vllm serve`."""
    if argv[:1] != ["compare"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def main(args: argparse.Namespace) -> int:
    from s4kv_ext.compare.whole import compare

    def ended(*_: Any) -> None:
        raise KeyboardInterrupt  # servers are ended and the report is written

    signal.signal(signal.SIGTERM, ended)
    try:
        return compare(args)
    except ValueError as e:
        print(f"s4kv: error: {e}", file=sys.stderr)
        return 2
