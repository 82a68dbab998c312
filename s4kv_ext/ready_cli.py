"""The command `s4kv ready`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

URL = "http://127.0.0.1:8000"
DEADLINE = 20.0
KEY = "VLLM_API_KEY"  # as `vllm serve` reads it

EXAMPLES = f"""examples:
  s4kv ready                                         # the server on this machine
  s4kv ready --url http://127.0.0.1:8080 --key-file /etc/s4kv/api-key
  s4kv ready --wait 900 && echo the server answers   # after a start

exit status:
  0 a token came, 1 none came, 2 the command was wrong

The key comes from --key-file or the variable {KEY}, never from the command line, which every
user of the machine can read.
"""


def add(sub: argparse._SubParsersAction) -> None:
    p = sub.add_parser(
        "ready",
        help="does a server answer: one token, within a deadline",
        description="Ask a running server for one token. /health and an open port say that the "
        "front end lives, also while the engine hangs; this says that requests are answered.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--url", default=URL, help=f"of the server, without /v1 ({URL})")
    p.add_argument("--deadline", type=_seconds, metavar="S", help=f"for the token ({DEADLINE:g})")
    p.add_argument(
        "--wait", type=_seconds, default=0.0, metavar="S", help="try again for so long (0)"
    )
    p.add_argument("--key-file", type=Path, metavar="FILE", help="that holds the API key")
    p.add_argument("--model", metavar="NAME", help="the served name (the first that there is)")
    p.add_argument(
        "--notify",
        action="store_true",
        help="run on, and tell systemd: READY at the first token, then the watchdog",
    )
    p.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # argparse says: invalid number of seconds value


def run(args: argparse.Namespace) -> int:
    from s4kv_ext import ready

    if not args.url.startswith(("http://", "https://")):
        return _usage(f"--url {args.url}: use http://HOST:PORT")
    try:
        key = args.key_file.read_text().strip() if args.key_file else os.environ.get(KEY)
    except OSError as e:
        return _usage(f"--key-file {args.key_file}: {e.strerror}")
    if args.key_file and not key:
        return _usage(f"--key-file {args.key_file} is empty")
    server = ready.Server(args.url.rstrip("/").removesuffix("/v1"), key, args.model)
    if args.notify:
        ready.watch(server, args.deadline)
        return 0
    try:
        model, seconds = ready.wait(server, args.deadline or DEADLINE, args.wait)
    except ready.Refused as e:
        print(f"s4kv: not ready: {e}: give it with --key-file or {KEY}", file=sys.stderr)
        return 1
    except ready.NotReady as e:
        print(f"s4kv: not ready: {e}", file=sys.stderr)
        return 1
    print(f"ready: one token of {model} in {seconds:.2f} s")
    return 0


def _usage(problem: str) -> int:
    print(f"s4kv: error: {problem}", file=sys.stderr)
    return 2
