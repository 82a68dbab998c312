#!/usr/bin/env python3
"""How much accuracy the cache costs: KL(fp32 auto || x) and top-1 agreement, teacher forced.

Prompt logits come out of the real engine, which computes each text in chunks of 64 tokens, so
every position attends to a cache in decode condition: all but the newest 64 to 191 tokens and
the sinks are int4. KL in nats, mean over positions, and by the length of their context; not over
positions where x is no number, whose share stands beside. The calibrated map is chosen by 512
tokens of texts that are not measured.

  bench/fidelity.py --model plain=DIR --model outlier=DIR
  bench/fidelity.py --model plain=DIR --tokens 8191 --only "bf16 auto" int4_kivi --out 8k.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from harness import digest, in_process, other_texts, parser, save, serve_child, texts

CALIBRATED = "int4_kivi, calibrated"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bf16 auto": {"dtype": "bfloat16"},
    "int4_kivi": {"kv": "int4_kivi"},
    CALIBRATED: {"kv": "int4_kivi"},
    "int4_kivi, plain keys": {"kv": "int4_kivi", "settings": {"keys": "plain"}},
    "fp8": {"kv": "fp8"},
    "fp8_e5m2": {"kv": "fp8_e5m2"},
}
CALIBRATION_TOKENS = 512
CONTEXTS = (0, 1024, 2048, 4096, 8192)


def measure(
    model: str,
    base: str,
    tokens: int,
    chunk: int,
    dtype: str = "float32",
    kv: str = "auto",
    settings: dict[str, str] | None = None,
) -> dict[str, dict[str, Any]] | None:
    """Compare one configuration with the log-probabilities [texts, tokens - 1, vocabulary] that
    ``base`` has; if there is no such file, write it."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv,
        max_model_len=tokens + 1,
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"int4_kivi": settings} if settings else {},
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    shape = (len(texts()), tokens - 1, llm.model_config.get_vocab_size())
    fresh = not Path(base).exists()
    reference = np.lib.format.open_memmap(
        base, mode="w+" if fresh else "r", dtype=np.float32, shape=shape
    )
    compute = runner.model.compute_logits
    rows: list[torch.Tensor] = []  # of this text: KL and whether top-1 agrees, [2, positions]
    text = position = 0

    def record(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal position
        result = compute(hidden)
        if len(hidden) > 1:  # a chunk of the prompt; a sampled token is one row
            q = result.float().log_softmax(-1).cpu()[: tokens - 1 - position]
            where = slice(position, position + len(q))
            if fresh:
                reference[text, where] = q.numpy()
            else:
                p = torch.from_numpy(np.array(reference[text, where])).double()
                kl = (p.exp() * (p - q.double())).sum(-1)
                rows.append(torch.stack((kl, (p.argmax(-1) == q.argmax(-1)).double())))
            position += len(q)
        return result

    runner.model.compute_logits = record
    tokenizer = llm.get_tokenizer()
    result = {}
    for text, (name, content) in enumerate(texts().items()):  # noqa: B007 - `record` reads it
        rows.clear()
        position = 0
        ids = tokenizer(content)["input_ids"][:tokens]
        assert len(ids) == tokens, f"{name} has only {len(ids)} tokens"
        once = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        llm.generate([TokensPrompt(prompt_token_ids=ids)], once, use_tqdm=False)
        if not fresh:
            result[name] = summary(torch.cat(rows, 1))
    reference.flush()
    return result or None


def summary(rows: Any) -> dict[str, Any]:
    """Of KL and agreement [2, positions] of one text; KL is that of the positions that have one."""
    kl, top = rows
    real = kl[~kl.isnan()]
    spans = {f"{a}-{b}": kl[a:b] for a, b in pairwise(CONTEXTS) if len(kl) > a}
    return {
        "kl": real.mean().item(),
        "kl_p999": real.quantile(0.999).item(),
        "top1": top.mean().item(),
        "not_a_number": 1 - len(real) / len(kl),
        "by_context": {k: x[~x.isnan()].mean().item() for k, x in spans.items()},
    }


def mean(rows: list[Any]) -> Any:
    """Of numbers, and of tables of them entry by entry."""
    if isinstance(rows[0], dict):
        return {k: mean([r[k] for r in rows]) for k in rows[0]}
    return float(np.mean(rows))


def calibrate(model: str, folder: Path) -> str:
    """The map that ``s4kv calibrate`` chooses by the texts that are not measured."""
    files = []
    for name, text in other_texts().items():
        files.append(folder / name)
        files[-1].write_text(text)
    out = folder / "map.safetensors"
    command = [sys.executable, "-m", "s4kv_ext.cli", "calibrate", model, "--text", *files]
    command += ["-o", out, "--tokens", CALIBRATION_TOKENS, "--dtype", "float32"]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    return str(out)


def show(name: str, label: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{name:20s} {label:24s} {row['error']}", flush=True)
        return
    broken = f", NaN at {row['not_a_number']:.1%}" if row["not_a_number"] else ""
    contexts = "  ".join(f"{k} {v:.5f}" for k, v in row["by_context"].items())
    print(
        f"{name:20s} {label:24s} KL {row['kl']:.5f}  p99.9 {row['kl_p999']:.3f}  "
        f"top-1 {row['top1']:.4f}{broken}   {contexts}",
        flush=True,
    )


def compare(model: str, labels: list[str], common: dict[str, Any], table: dict, done: Any) -> None:
    """Add a row to ``table`` for each configuration, and call ``done`` after each."""
    with tempfile.TemporaryDirectory() as folder:
        common = common | {"model": model, "base": f"{folder}/base.npy"}
        in_process(common)
        for label in labels:
            options = dict(CONFIGURATIONS[label])
            if label == CALIBRATED:
                options["settings"] = {"map": calibrate(model, Path(folder))}
            try:
                each = in_process(common | options)
                table[label] = mean(list(each.values())) | {"texts": each}
            except SystemExit as e:  # a cache that this platform does not have
                table[label] = {"error": f"{e}".strip().splitlines()[-1][:200]}
            done(label)


def main() -> None:
    ap = parser(__doc__, "fidelity.json")
    ap.add_argument("--model", action="append", default=[], metavar="NAME=DIR")
    ap.add_argument("--tokens", type=int, default=2048, help="of each text (default: 2048)")
    ap.add_argument("--chunk", type=int, default=64)
    ap.add_argument("--only", nargs="+", choices=CONFIGURATIONS, metavar="CONFIGURATION")
    ap.add_argument("--keep", action="store_true", help="measure only what --out does not have")
    args = ap.parse_args()
    serve_child(args.child, measure)
    common = {"tokens": args.tokens, "chunk": args.chunk}
    hashes = {name: digest(text) for name, text in (texts() | other_texts()).items()}
    what = {"what": __doc__, **common, "texts": hashes}
    table: dict[str, dict[str, Any]] = {}
    if args.keep and args.out.exists():
        old = json.loads(args.out.read_text())
        if {k: old.get(k) for k in (*common, "texts")} != common | {"texts": hashes}:
            raise SystemExit(f"{args.out} was measured with other texts or lengths: leave --keep")
        table = old["kl"]
    for name, path in (m.split("=", 1) for m in args.model):
        rows = table.setdefault(name, {})
        labels = [x for x in args.only or CONFIGURATIONS if x not in rows]

        def done(label: str, name: str = name) -> None:
            show(name, label, table[name][label])
            save(args.out, what | {"kl": table})  # what a later engine loses is its own

        if labels:
            compare(path, labels, common, rows, done)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
