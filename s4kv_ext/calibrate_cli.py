"""The command `s4kv calibrate`: choose the key channels from text of the user's own.

The model runs in the engine, as it does at start-up, with the text's tokens in place of the
pseudo-random ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s4kv_ext.map_file import MapFile

TOKENS = 8192
LENGTH = 2048
CHARACTERS = 16
"""Of a text are read for each token that is wanted: more than any tokeniser puts into one."""

EXAMPLES = """examples:
  s4kv calibrate /models/Qwen2.5-7B-Instruct --text chats.txt -o map.safetensors
  s4kv calibrate /models/Llama-3.1-70B --text a.txt b.txt -o map.safetensors \\
      --engine '{"tensor_parallel_size": 4}'

then:
  vllm serve /models/Qwen2.5-7B-Instruct --kv-cache-dtype int4_kivi \\
      --additional-config '{"int4_kivi": {"map": "map.safetensors"}}'
"""


def add(sub: argparse._SubParsersAction) -> None:
    p = sub.add_parser(
        "calibrate",
        help="choose the key channels of int4_kivi from text of yours, into a file",
        description="Run a model over text like that which it will serve, and write the channel "
        "map that suits it. Without a map the server chooses by pseudo-random tokens; how much a "
        "map of yours gains is in docs/calibrate.md.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("model", metavar="MODEL", help="a folder or a hub name, as for vllm serve")
    p.add_argument(
        "--text", nargs="+", type=Path, required=True, metavar="FILE", help="plain text, UTF-8"
    )
    p.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FILE", help="the map, .safetensors"
    )
    p.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"of text, shared by the files ({TOKENS})"
    )
    p.add_argument(
        "--length", type=int, default=LENGTH, help=f"tokens of one sequence, at most ({LENGTH})"
    )
    p.add_argument("--dtype", default="auto", help="of the model, as for vllm serve (auto)")
    p.add_argument(
        "--engine", type=json_object, default={}, metavar="JSON", help="more options of the engine"
    )
    p.set_defaults(run=run)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"this is no JSON: {e}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('this is no JSON object, such as {"revision": "main"}')
    return value


def run(args: argparse.Namespace) -> int:
    for value, flag in ((args.tokens, "--tokens"), (args.length, "--length")):
        if value < 1:
            raise ValueError(f"{flag} {value}: use 1 or more")
    if args.model.startswith(("/", ".", "~")) and not Path(args.model).exists():
        raise ValueError(f"there is no model {args.model}: give a folder or a hub name")
    if not args.out.parent.is_dir():
        raise ValueError(f"there is no folder {args.out.parent}: make it, or give another -o")
    texts = read_texts(args.text, CHARACTERS * args.tokens)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the pass is a call into the engine
    say(f"loading {args.model}")
    file = calibrated(
        args.model, texts, args.tokens, args.length, {"dtype": args.dtype} | args.engine
    )
    from s4kv_ext import map_file

    map_file.write(args.out, file)
    print(f"{args.out}: {file.shape}, {file.tokens} tokens, hash {file.hash}")
    return 0


def read_texts(paths: list[Path], characters: int) -> list[str]:
    """The beginning of each file; raises ValueError for one that is not text."""
    texts = []
    for path in paths:
        try:
            with path.open(encoding="utf-8") as f:
                text = f.read(characters)
        except OSError as e:
            raise ValueError(f"{path}: {e.strerror}; --text takes files") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text: --text takes plain text") from None
        if not text.strip():
            raise ValueError(f"{path} is empty: --text takes text like what will be served")
        texts.append(text)
    return texts


def calibrated(
    model: str, texts: list[str], tokens: int, length: int, options: dict[str, Any]
) -> MapFile:
    """Start an engine, run the texts through it, and choose."""
    import torch
    from tqdm import tqdm
    from vllm import LLM

    from s4kv_ext import calibrate, channel_map, map_file
    from s4kv_ext.format import KV_CACHE_DTYPE
    from s4kv_ext.identity import Identity

    defaults = {
        "kv_cache_dtype": KV_CACHE_DTYPE,
        "additional_config": {KV_CACHE_DTYPE: {"keys": "plain"}},  # spares the pass at start-up
        "max_model_len": length,
        "max_num_batched_tokens": length,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": 1 << 30,  # of no use here, and may not be nothing
        "enforce_eager": True,
    }
    llm = LLM(model, **(defaults | options))
    config = llm.llm_engine.vllm_config
    tokenizer = llm.get_tokenizer()
    sequences = [
        sequence
        for text in texts
        for sequence in cut(tokenizer(text)["input_ids"], tokens // len(texts) or 1, length)
    ]
    kv_heads = config.model_config.get_total_num_kv_heads()
    used = sum(map(len, sequences))
    total: list[torch.Tensor] = []
    for ids in tqdm(sequences, desc=f"{used} tokens", unit="sequence", leave=False):
        ranks = llm.collective_rpc(calibrate.weigh_on, args=([ids],))
        seen = of_all_heads(ranks, kv_heads)
        total = [a + b for a, b in zip(total, seen, strict=True)] if total else seen
    shape = map_file.shape_of(config.model_config)
    if [len(weight) for weight in total] != [shape.kv_heads] * shape.layers:
        raise ValueError(f"{model}: its layers differ in their KV heads, no map can hold them")
    chosen = torch.stack([channel_map.allocate(weight) for weight in total])
    return map_file.MapFile(
        chosen,
        shape.head_dim,
        Identity.of(config.model_config, Path(model).name if Path(model).exists() else model),
        used,
    )


def cut(ids: list[int], tokens: int, length: int) -> list[list[int]]:
    """The first ``tokens`` ids, in sequences of at most ``length``."""
    ids = ids[:tokens]
    return [ids[i : i + length] for i in range(0, len(ids), length)]


def of_all_heads(ranks: list[list[Any]], kv_heads: int) -> list[Any]:
    """Weights [kv_heads, D] of each layer from those of each rank's own heads.

    A head that several ranks hold has its queries spread over them, in equal parts.
    """
    import torch

    layers = []
    for parts in zip(*ranks, strict=True):
        whole = torch.cat(parts)
        layers.append(whole.unflatten(0, (kv_heads, -1)).mean(1))
    return layers


def say(text: str) -> None:
    print(f"s4kv: {text}", file=sys.stderr, flush=True)
