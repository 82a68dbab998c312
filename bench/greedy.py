#!/usr/bin/env python3
"""Greedy text beside fp32 with a full-precision cache: how far it is the same.

14 prompts of about 2000 tokens, 256 tokens each, one at a time. No 4-bit cache makes greedy text
identical, and bf16 arithmetic does not either: its own figure stands beside.

  bench/greedy.py --model DIR
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import in_process, parser, serve_child, texts, write

CONFIGURATIONS = {
    "bf16 auto": {"dtype": "bfloat16"},
    "int4_kivi": {"kv": "int4_kivi"},
}


def generate(
    model: str,
    prompts: int,
    prompt_tokens: int,
    tokens: int,
    dtype: str = "float32",
    kv: str = "auto",
) -> list[list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv,
        max_model_len=prompt_tokens + tokens + 8,
        max_num_batched_tokens=512,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
    )
    tokenizer = llm.get_tokenizer()
    streams = [tokenizer(text)["input_ids"] for text in texts().values()]
    result = []
    for i in range(prompts):
        stream = streams[i % len(streams)]
        start = i // len(streams) * 1500
        ids = stream[start : start + prompt_tokens]
        assert len(ids) == prompt_tokens
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        out = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
        result.append(list(out[0].outputs[0].token_ids))
    return result


def main() -> None:
    ap = parser(__doc__, "greedy.json")
    ap.add_argument("--model")
    ap.add_argument("--prompts", type=int, default=14)
    ap.add_argument("--prompt-tokens", type=int, default=2000)
    ap.add_argument("--tokens", type=int, default=256)
    args = ap.parse_args()
    serve_child(args.child, generate)
    common = {"model": args.model, "prompts": args.prompts, "prompt_tokens": args.prompt_tokens}
    common["tokens"] = args.tokens
    base = in_process(common)
    table: dict[str, Any] = {}
    for label, options in CONFIGURATIONS.items():
        other = in_process(common | options)
        same = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), args.tokens)
            for a, b in zip(base, other, strict=True)
        ]
        table[label] = {
            "tokens_equal_up_to_first_divergence": sum(same) / (args.prompts * args.tokens),
            "whole_texts_equal": sum(n == args.tokens for n in same) / args.prompts,
            "first_divergence": same,
        }
        print(
            f"{label:12s} equal up to first divergence "
            f"{table[label]['tokens_equal_up_to_first_divergence']:.3f}, whole texts "
            f"{table[label]['whole_texts_equal']:.3f}",
            flush=True,
        )
    write(args.out, {"what": __doc__, "model": Path(args.model).name, "greedy": table})


if __name__ == "__main__":
    main()
