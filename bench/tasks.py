#!/usr/bin/env python3
"""Does the cache lose what a long context says: needles, verbatim quotes, JSON, at 1k to 8k tokens.

A document of the reference text has facts strewn in at all depths. After it comes one question
each, answered greedily:

needle   the number that a sentence of the document gives to a place
quote    the next 20 tokens of a passage, after the 24 before them; score: the share up to the
         first wrong one
json     a person's record out of a sentence, under a JSON schema; score: the share of right fields

Questions about one document share it through the prefix cache, so all of it but the newest tokens
is read from sealed pages. A score means something only beside that of the same model in fp32 and in
bf16, for a small model is not good at this.

  bench/tasks.py --model DIR
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import in_process, parser, save, serve_child, texts

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32 auto": {},
    "bf16 auto": {"dtype": "bfloat16"},
    "int4_kivi": {"kv": "int4_kivi"},
    "int4_kivi, plain keys": {"kv": "int4_kivi", "settings": {"keys": "plain"}},
    "fp8": {"kv": "fp8"},
}
PLACES = (
    "Oslo Lima Cairo Delhi Paris Tokyo Quito Rome Accra Perth Malmo Turin Busan Osaka Lagos Bonn"
)
NAMES = (
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Louis Maria Niels Olga Peter"
)
JOBS = "baker doctor farmer lawyer painter pilot sailor singer tailor teacher writer miner"
QUOTE_GIVEN, QUOTE_ASKED = 24, 20
ANSWER_ROOM = 160  # tokens of a question and its answer
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "job": {"type": "string"},
        "city": {"type": "string"},
        "age": {"type": "integer"},
    },
    "required": ["name", "job", "city", "age"],
    "additionalProperties": False,
}


@dataclass
class Task:
    kind: str
    prompt: list[int]
    answer: Any
    tokens: int


def score(task: Task, text: str, ids: list[int]) -> float:
    """Between 0 and 1."""
    if task.kind == "needle":
        return float(text.strip().startswith(task.answer))
    if task.kind == "quote":
        pairs = enumerate(zip(ids, task.answer, strict=False))
        return next((i for i, (a, b) in pairs if a != b), len(ids)) / QUOTE_ASKED
    try:
        value = json.loads(text)
    except ValueError:
        return 0.0
    return sum(value.get(k) == v for k, v in task.answer.items()) / len(task.answer)


def tasks(tokenizer: Any, context: int, seed: int, each: int) -> list[Task]:
    """``each`` questions of every kind about one document of almost ``context`` tokens."""
    rng = random.Random(1000 * context + seed)
    text = "\n".join(list(texts().values())[:2])
    filler = tokenizer(text[rng.randrange(len(text) // 4) :])["input_ids"]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    numbers = {
        place: str(rng.randrange(10_000, 99_999)) for place in rng.sample(PLACES.split(), each)
    }
    people = [
        {
            "name": name,
            "job": rng.choice(JOBS.split()),
            "city": rng.choice(PLACES.split()),
            "age": rng.randrange(20, 80),
        }
        for name in rng.sample(NAMES.split(), each)
    ]
    facts = [f"\n\nThe secret number of {p} is {n}.\n\n" for p, n in numbers.items()]
    facts += [
        "\n\n{name} is a {job}, lives in {city} and is {age} years old.\n\n".format(**p)
        for p in people
    ]
    rng.shuffle(facts)
    strewn = [encode(f) for f in facts]
    length = context - ANSWER_ROOM - sum(map(len, strewn))
    document, quotes = [], []
    part = length // len(strewn)
    for i, fact in enumerate(strewn):
        piece = filler[i * part : (i + 1) * part]
        if i < each:
            at = rng.randrange(max(1, len(piece) - QUOTE_GIVEN - QUOTE_ASKED))
            quotes.append(piece[at : at + QUOTE_GIVEN + QUOTE_ASKED])
        document += piece + fact
    made = [
        Task(
            "needle",
            document + encode(f"\n\nQuestion: What is the secret number of {p}?\nAnswer: "
                              f"The secret number of {p} is "),
            n, 8,
        )
        for p, n in numbers.items()
    ]  # fmt: skip
    lead = encode("\n\n")
    made += [
        Task("quote", document + lead + q[:QUOTE_GIVEN], q[QUOTE_GIVEN:], QUOTE_ASKED)
        for q in quotes
    ]
    made += [
        Task(
            "json",
            document + encode(f"\n\nQuestion: Who is {p['name']}? Give name, job, city and age as "
                              "JSON.\nAnswer: "),
            p, 60,
        )
        for p in people
    ]  # fmt: skip
    return made


def run(
    model: str,
    contexts: list[int],
    documents: int,
    each: int,
    dtype: str = "float32",
    kv: str = "auto",
    settings: dict[str, str] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Scores of every question, by kind and context."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv,
        max_model_len=max(contexts),
        max_num_batched_tokens=512,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
        additional_config={"int4_kivi": settings} if settings else {},
    )
    tokenizer = llm.get_tokenizer()
    result: dict[str, dict[str, list[float]]] = {}
    for context in contexts:
        for seed in range(documents):
            made = tasks(tokenizer, context, seed, each)
            params = [
                SamplingParams(
                    temperature=0,
                    max_tokens=t.tokens,
                    structured_outputs=StructuredOutputsParams(
                        json=SCHEMA, disable_any_whitespace=True
                    )
                    if t.kind == "json"
                    else None,
                )
                for t in made
            ]
            prompts = [TokensPrompt(prompt_token_ids=t.prompt) for t in made]
            llm.generate(prompts[:1], params[:1], use_tqdm=False)  # the document, for all
            for task, out in zip(made, llm.generate(prompts, params, use_tqdm=False), strict=True):
                answer = out.outputs[0]
                value = score(task, answer.text, list(answer.token_ids))
                result.setdefault(task.kind, {}).setdefault(str(context), []).append(value)
    return result


def main() -> None:
    ap = parser(__doc__, "tasks.json")
    ap.add_argument("--model")
    ap.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    ap.add_argument("--documents", type=int, default=2, help="of each context (default: 2)")
    ap.add_argument("--each", type=int, default=8, help="questions of a kind (default: 8)")
    ap.add_argument("--only", nargs="+", choices=CONFIGURATIONS, metavar="CONFIGURATION")
    args = ap.parse_args()
    serve_child(args.child, run)
    common = {"contexts": args.contexts, "documents": args.documents, "each": args.each}
    table: dict[str, Any] = {}
    for label in args.only or CONFIGURATIONS:
        scores = in_process(common | {"model": args.model} | CONFIGURATIONS[label])
        table[label] = scores
        for kind, by_context in scores.items():
            parts = [f"{c} {sum(x) / len(x):.3f}" for c, x in by_context.items()]
            every = [x for xs in by_context.values() for x in xs]
            same = [x for xs in next(iter(table.values()))[kind].values() for x in xs]
            equal = sum(a == b for a, b in zip(every, same, strict=True)) / len(every)
            print(
                f"{label:24s} {kind:8s} {sum(every) / len(every):.3f}   {'  '.join(parts)}   "
                f"as the first: {equal:.3f}",
                flush=True,
            )
        save(args.out, {"what": __doc__, "model": Path(args.model).name, **common, "scores": table})
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
