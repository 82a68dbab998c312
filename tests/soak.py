"""Play random schedules over the real scheduler and report what was wrong. `schedules.py` says what
is checked. A schedule is its seed, so that one that fails can be played again.

examples:
  tests/soak.py                                 as `make soak`: 10,000 schedules, ten minutes
  tests/soak.py --count 1 --seed 4711 --out /tmp/soak.json
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

signal.signal(signal.SIGINT, signal.SIG_DFL)  # no stack trace while vLLM is imported
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it tells of every engine

from schedules import play, random_schedule, shrink  # noqa: E402
from tqdm import tqdm  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.harness import RESULTS, write  # noqa: E402


def soak(first: int, count: int) -> dict[str, Any]:
    """As many as there is time for until Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    happened: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    played, begun = 0, time.monotonic()
    with tqdm(total=count, unit="schedule", disable=None) as bar:
        try:
            for seed in range(first, first + count):
                schedule = random_schedule(Random(seed))
                try:
                    happened += play(schedule).happened()
                except Exception as error:
                    tqdm.write(f"seed {seed}: {error!r}\n  shortening it …", file=sys.stderr)
                    shortest = f"play({shrink(schedule)})"
                    tqdm.write(f"  shortest: {shortest}", file=sys.stderr)
                    failures.append({"seed": seed, "error": repr(error), "shortest": shortest})
                played += 1
                bar.update()
        except KeyboardInterrupt:
            pass
    leaked = sum("leaked" in failure["error"] for failure in failures)
    return {
        "first_seed": first,
        "schedules": played,
        "wrong": len(failures) - leaked,
        "leaked": leaked,
        "happened": dict(sorted(happened.items())),
        "seconds": round(time.monotonic() - begun),
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="schedules (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json", help="(%(default)s)")
    args = parser.parse_args()
    told = soak(args.seed, args.count)
    print(
        f"{told['schedules']:,} schedules, {told['wrong']} wrong, {told['leaked']} leaked: "
        f"{', '.join(f'{n:,} {what}' for what, n in told['happened'].items())}"
    )
    whole = told["schedules"] == args.count
    if whole:
        write(args.out, told)
    else:
        print(f"interrupted; {args.out} stays as it was")
    return 1 if told["failures"] else 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())
