#!/usr/bin/env python3
"""How much accuracy the cache costs: KL(fp32 auto || x) and top-1 agreement, teacher forced.

Prompt logits come out of the real engine, which computes each text in chunks of 64 tokens, so
every position attends to a cache in decode condition: all but the newest 64 to 191 tokens and
the sinks are int4. KL in nats, mean over positions.

  bench/fidelity.py --model plain=DIR --model outlier=DIR
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import digest, in_process, parser, serve_child, texts, write

CONFIGURATIONS = {
    "bf16 auto": {"dtype": "bfloat16"},
    "int4_kivi": {"kv": "int4_kivi"},
    "int4_kivi, plain keys": {"kv": "int4_kivi", "keys": "plain"},
}


def logits(
    model: str,
    out: str,
    tokens: int,
    chunk: int,
    dtype: str = "float32",
    kv: str = "auto",
    keys: str = "",
) -> dict[str, Any]:
    """Log-probabilities [texts, tokens - 1, vocabulary] of one configuration, saved to ``out``."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv,
        max_model_len=tokens + 8,
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"int4_kivi": {"keys": keys}} if keys else {},
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    rows: list[torch.Tensor] = []
    compute = runner.model.compute_logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        result = compute(hidden)
        if len(hidden) > 1:  # a chunk of the prompt; a sampled token is one row
            rows.append(result.float().log_softmax(-1))
        return result

    runner.model.compute_logits = record
    tokenizer = llm.get_tokenizer()
    saved = np.lib.format.open_memmap(
        out, mode="w+", dtype=np.float32,
        shape=(len(texts()), tokens - 1, llm.model_config.get_vocab_size()),
    )  # fmt: skip
    for i, text in enumerate(texts().values()):
        rows.clear()
        ids = tokenizer(text)["input_ids"][:tokens]
        assert len(ids) == tokens, f"a text has only {len(ids)} tokens"
        once = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        llm.generate([TokensPrompt(prompt_token_ids=ids)], once, use_tqdm=False)
        saved[i] = torch.cat(rows)[: tokens - 1].numpy()
    saved.flush()
    return {"shape": list(saved.shape)}


def compare(reference: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """KL and top-1 of [tokens, vocabulary] log-probabilities, a slice at a time."""
    import torch

    kl, top = [], []
    for start in range(0, len(reference), 256):
        p, q = (
            torch.from_numpy(np.array(x[start : start + 256])).double() for x in (reference, other)
        )
        kl.append((p.exp() * (p - q)).sum(-1))
        top.append((p.argmax(-1) == q.argmax(-1)).double())
    all_kl = torch.cat(kl)
    return {
        "kl": all_kl.mean().item(),
        "kl_p999": all_kl.quantile(0.999).item(),
        "top1": torch.cat(top).mean().item(),
    }


def main() -> None:
    ap = parser(__doc__, "fidelity.json")
    ap.add_argument("--model", action="append", default=[], metavar="NAME=DIR")
    ap.add_argument("--tokens", type=int, default=2048)
    ap.add_argument("--chunk", type=int, default=64)
    args = ap.parse_args()
    serve_child(args.child, logits)
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (m.split("=", 1) for m in args.model):
            common = {"model": path, "tokens": args.tokens, "chunk": args.chunk}
            base = Path(folder) / "base.npy"
            in_process(common | {"out": str(base)})
            table[name] = {}
            for label, options in CONFIGURATIONS.items():
                out = Path(folder) / "other.npy"
                in_process(common | options | {"out": str(out)})
                a, b = np.load(base, mmap_mode="r"), np.load(out, mmap_mode="r")
                each = [compare(x, y) for x, y in zip(a, b, strict=True)]
                mean = {k: float(np.mean([e[k] for e in each])) for k in each[0]}
                table[name][label] = mean | {"texts": dict(zip(texts(), each, strict=True))}
                print(
                    f"{name:16s} {label:24s} KL {mean['kl']:.5f}  p99.9 {mean['kl_p999']:.3f}  "
                    f"top-1 {mean['top1']:.4f}",
                    flush=True,
                )
    hashes = {name: digest(text) for name, text in texts().items()}
    write(
        args.out,
        {"what": __doc__, "tokens": args.tokens, "chunk": args.chunk, "texts": hashes, "kl": table},
    )


if __name__ == "__main__":
    main()
