#!/usr/bin/env python3
"""Build, install, make the model and serve: from nothing to an answer.

What is there already is not done again. Arguments for `vllm serve` come last, or in the
environment variable ARGS.

examples:
  build/serve.py
  build/serve.py --port 8001 --kv auto --max-model-len 4096
  build/serve.py --model /models/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import env
import native
from common import Stop, main, pins, say
from fetch import fetch

OWN = ("smollm2", "smollm2-d128", "smollm2-outlier")
# Stock vLLM would take 92 % of a CPU host's memory for the KV cache.
CPU_KV_BYTES = 2 << 30


def need_port(port: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as e:
            raise Stop(f"port {port}: {e.strerror}; choose another: make serve PORT=...") from e


def need_model(model: str) -> None:
    """A path that is not there; a name without a leading dot or slash may be one of a hub."""
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise Stop(f"no folder {model}: MODEL= is a folder, a hub name, or {', '.join(OWN)}")


def need_libraries(variant: str) -> None:
    try:
        if variant == "cpu":
            ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise Stop(
            "vLLM's CPU binaries need libnuma.so.1 (Debian, Ubuntu: apt-get install libnuma1; "
            "Fedora: dnf install numactl-libs)"
        ) from None


def own_model(name: str) -> str:
    """The folder of a model that is made here."""
    source = fetch(pins().files["model"])
    command = [env.VENV / "bin" / "s4kv", "make-model", "--from", source, name]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Stop(f"could not make the model {name}")
    return done.stdout.strip().splitlines()[-1]


def arguments(args: argparse.Namespace, variant: str) -> list[str]:
    """For `vllm serve`; what the user gives comes last, and so wins."""
    out = ["--port", str(args.port), "--kv-cache-dtype", args.kv]
    if args.model in OWN:
        out = [own_model(args.model), "--served-model-name", args.model, *out]
        if variant == "cpu":
            out += ["--dtype", "float32"]
    else:
        out = [args.model, *out]
    if variant == "cpu":
        out += ["--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
    return out + shlex.split(os.environ.get("ARGS", ""))


def run() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--model", default=OWN[0], help=f"a folder, a hub name, or {', '.join(OWN)}")
    ap.add_argument("--port", type=int, default=8000)
    ap.add_argument("--kv", default="int4_kivi", metavar="DTYPE", help="the KV cache dtype")
    ap.add_argument("--variant", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    args, rest = ap.parse_known_args()
    variant = args.variant or env.default_variant()
    need_port(args.port)
    need_model(args.model)
    need_libraries(variant)
    native.compiler()  # torch compiles the model with it
    env.install(variant)
    command = [str(env.VENV / "bin" / "vllm"), "serve", *arguments(args, variant), *rest]
    say(" ".join(map(shlex.quote, command)))
    say(
        "starting: one to five minutes, the longest the first time, for the model is compiled in "
        f"silence; it serves port {args.port} once the log says that startup is complete"
    )
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # this is not upstream's build
    os.environ["PATH"] = f"{env.VENV / 'bin'}:{os.environ['PATH']}"  # torch compiles with its ninja
    sys.stderr.flush()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(run)
