#!/usr/bin/env python3
"""Greedy text beside fp32 with a full-precision cache: how far it is the same.

50 prompts of 2000 tokens, 512 tokens each, eight at a time. No 4-bit cache makes greedy text
identical, and bf16 arithmetic does not either: its own figure stands beside. So does that of fp32
one at a time, which only adds up in another order.

  bench/greedy.py --model DIR
  bench/greedy.py --model DIR --prompts 14 --tokens 256 --out few.json  # in a quarter of the time
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import in_process, long_texts, parser, save, serve_child

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bf16 auto": {"dtype": "bfloat16"},
    "int4_kivi": {"kv": "int4_kivi"},
    "fp32 auto, one at a time": {"batch": 1},
}
STEP = 1500  # tokens between the starts of two prompts of one text


def generate(
    model: str,
    prompts: int,
    prompt_tokens: int,
    tokens: int,
    batch: int,
    dtype: str = "float32",
    kv: str = "auto",
) -> list[list[int]]:
    """Greedy token ids of each prompt."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv,
        max_model_len=prompt_tokens + tokens + 8,
        max_num_batched_tokens=512,
        max_num_seqs=batch,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
    )
    tokenizer = llm.get_tokenizer()
    streams = [tokenizer(text)["input_ids"] for text in long_texts().values()]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    inputs = []
    for i in range(prompts):
        stream = streams[i % len(streams)]
        start = i // len(streams) * STEP
        ids = stream[start : start + prompt_tokens]
        assert len(ids) == prompt_tokens, "the texts are too short for so many prompts"
        inputs.append(TokensPrompt(prompt_token_ids=ids))
    return [list(out.outputs[0].token_ids) for out in llm.generate(inputs, params)]


def main() -> None:
    ap = parser(__doc__, "greedy.json")
    ap.add_argument("--model")
    ap.add_argument("--prompts", type=int, default=50)
    ap.add_argument("--prompt-tokens", type=int, default=2000)
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--batch", type=int, default=8, help="prompts at a time (default: 8)")
    ap.add_argument("--only", nargs="+", choices=CONFIGURATIONS, metavar="CONFIGURATION")
    args = ap.parse_args()
    serve_child(args.child, generate)
    common = {"model": args.model, "prompts": args.prompts, "prompt_tokens": args.prompt_tokens}
    common |= {"tokens": args.tokens, "batch": args.batch}
    what = {"what": __doc__, **common, "model": Path(args.model).name}
    base = in_process(common)
    table: dict[str, Any] = {}
    for label in args.only or CONFIGURATIONS:
        other = in_process(common | CONFIGURATIONS[label])
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
            f"{label:24s} equal up to first divergence "
            f"{table[label]['tokens_equal_up_to_first_divergence']:.3f}, whole texts "
            f"{table[label]['whole_texts_equal']:.3f}",
            flush=True,
        )
        save(args.out, what | {"greedy": table})  # what a later engine loses is its own
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
