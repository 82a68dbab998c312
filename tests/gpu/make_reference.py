"""Write reference.json: what the project's own models say on a CPU, for test_fixture_text.py.

    PYTHONPATH=. .venv/bin/python tests/gpu/make_reference.py   # six engines, about ten minutes

Prompts are kept as token ids: another Python has other texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import harness

REFERENCE = Path(__file__).with_name("reference.json")
CACHES = ("auto", "int4_kivi")
OPTIONS = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "seed": 0,
}  # the chunks of a prompt have a part in what int4_kivi computes: the same on both sides
GREEDY_TOKENS = 64
PROMPTS = (
    ("reference-1", 0, 100),
    ("argparse.py", 2000, 200),
    ("reference-2", 0, 400),
    ("statistics.py", 9000, 700),
    ("reference-1", 20_000, 1100),
    ("reference-2", 10_000, 1500),
)


def measure(llm: Any, prompts: list[list[int]]) -> list[dict[str, list]]:
    """One prompt after the other: log-probability of every prompt token after the first; then
    greedy tokens, their log-probabilities and their lead over the second best."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=GREEDY_TOKENS,
        temperature=0,
        ignore_eos=True,
        prompt_logprobs=0,
        logprobs=2,
        detokenize=False,
    )
    found = []
    for ids in prompts:
        (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        greedy = list(out.outputs[0].token_ids)
        steps = [
            sorted((x.logprob for x in step.values()), reverse=True)
            for step in out.outputs[0].logprobs
        ]
        found.append(
            {
                "forced": [e[t].logprob for e, t in zip(out.prompt_logprobs[1:], ids[1:])],
                "greedy": greedy,
                "greedy_logprobs": [s[t].logprob for s, t in zip(out.outputs[0].logprobs, greedy)],
                "lead": [best - second for best, second, *_ in steps],
            }
        )
    return found


def run(name: str, **options: Any) -> list[dict[str, list]]:
    from vllm import LLM

    from s4kv_ext.models import models_dir

    llm = LLM(
        str(models_dir() / name),
        **(OPTIONS | {"dtype": "float32", "enforce_eager": True} | options),
        kv_cache_memory_bytes=256 << 20,
    )
    return measure(llm, prompt_ids())


def prompt_ids() -> list[list[int]]:
    from transformers import AutoTokenizer

    from s4kv_ext.models import models_dir

    tokenizer, texts = AutoTokenizer.from_pretrained(models_dir() / "smollm2"), harness.texts()
    found = []
    for text, offset, length in PROMPTS:
        found.append(tokenizer(texts[text][offset : offset + 8 * length])["input_ids"][:length])
        assert len(found[-1]) == length, (text, len(found[-1]))
    return found


def main() -> None:
    args = harness.parser(__doc__, str(REFERENCE)).parse_args()
    harness.serve_child(args.child, run)
    from s4kv_ext.models import VARIANTS

    models = {
        name: {c: harness.in_process({"name": name, "kv_cache_dtype": c}) for c in CACHES}
        for name in VARIANTS
    }
    rounded = json.loads(json.dumps(models), parse_float=lambda x: round(float(x), 4))
    result = {"machine": harness.machine(), "prompts": prompt_ids(), "models": rounded}
    args.out.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
