"""Bodies that nobody should send: for each route a valid one with many fields, and one to three of
its values replaced. The same seed gives the same bodies."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

MODEL = "smollm2"
USER = [{"role": "user", "content": "Hi"}]
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": OBJECT}
NAMED = {"name": "x", "schema": OBJECT}
TOOL = {"type": "function", "function": FUNCTION}
SAMPLING = {
    "temperature": 0, "n": 1, "stop": ["x"], "seed": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1,
    "stop_token_ids": [3], "bad_words": ["b"], "logit_bias": {"5": 1}, "min_tokens": 0,
    "allowed_token_ids": [1, 2, 3], "prompt_logprobs": 1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
}  # fmt: skip
COMMON = {
    "priority": 0, "request_id": "a", "cache_salt": "s", "vllm_xargs": {"a": 1}, "user": "u",
    "truncate_prompt_tokens": 5, "kv_transfer_params": None, "return_token_ids": True,
    "stream_options": None,
}  # fmt: skip
# The fields before the bar are in every body, of the others about one in eight.
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/completions": (
        {"model": MODEL, "prompt": "Once", "max_tokens": 3},
        SAMPLING | COMMON | {
            "logprobs": 1, "echo": False, "suffix": None, "use_beam_search": False,
            "response_format": {"type": "json_object"}, "length_penalty": 1.0,
            "add_special_tokens": True, "structured_outputs": {"choice": ["a", "b"]},
            "prompt_embeds": None,
        },
    ),
    "/v1/chat/completions": (
        {"model": MODEL, "messages": USER, "max_tokens": 3},
        SAMPLING | COMMON | {
            "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": NAMED},
            "chat_template": "{{messages[0]['content']}}", "chat_template_kwargs": {"a": 1},
            "documents": [{"title": "a", "text": "b"}], "mm_processor_kwargs": {"a": 1},
            "add_generation_prompt": True, "continue_final_message": False, "echo": False,
            "parallel_tool_calls": True, "reasoning_effort": "low", "include_reasoning": True,
            "media_io_kwargs": {"image": {"a": 1}}, "structured_outputs": {"regex": "a+"},
            "max_completion_tokens": 3,
        },
    ),
    "/v1/responses": (
        {"model": MODEL, "input": "Hi", "max_output_tokens": 3},
        COMMON | {
            "instructions": "i", "tools": [{"type": "function"} | FUNCTION], "tool_choice": "auto",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": OBJECT}},
            "store": False, "background": False, "metadata": {"a": "b"}, "include": [],
            "reasoning": {"effort": "low"}, "previous_response_id": None, "truncation": "auto",
            "top_logprobs": 1, "parallel_tool_calls": True, "max_tool_calls": 1, "prompt": None,
            "service_tier": "auto", "previous_input_messages": None, "top_k": 3, "stop": ["x"],
        },
    ),
    "/v1/messages": (
        {"model": MODEL, "messages": USER, "max_tokens": 3},
        {
            "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "temperature": 0,
            "tools": [{"name": "f", "input_schema": OBJECT}], "tool_choice": {"type": "auto"},
            "metadata": {"user_id": "u"}, "top_k": 1, "top_p": 0.5,
        },
    ),
    "/v1/messages/count_tokens": (
        {"model": MODEL, "messages": USER},
        {
            "system": "s", "tools": [{"name": "f", "input_schema": OBJECT}],
            "tool_choice": {"type": "any"},
        },
    ),
    "/tokenize": (
        {"model": MODEL, "messages": USER},
        {
            "prompt": "Hi", "add_special_tokens": True, "return_token_strs": True, "tools": [TOOL],
            "add_generation_prompt": True, "chat_template": "{{messages}}",
            "chat_template_kwargs": {"a": 1}, "continue_final_message": False,
        },
    ),
    "/detokenize": ({"model": MODEL, "tokens": [1, 2, 3]}, {}),
    "/v1/chat/completions/batch": (
        {"model": MODEL, "messages": [USER, USER], "max_tokens": 3}, SAMPLING,
    ),
    "/v1/chat/completions/render": ({"model": MODEL, "messages": USER, "max_tokens": 3}, SAMPLING),
    "/v1/completions/render": ({"model": MODEL, "prompt": "a", "max_tokens": 3}, SAMPLING),
    "/v1/chat/completions/derender": ({"model": MODEL, "messages": USER}, {}),
    "/v1/completions/derender": ({"model": MODEL}, {}),
    "/invocations": ({"model": MODEL, "prompt": "x", "max_tokens": 3}, {"messages": USER}),
    "/generative_scoring": (
        {"model": MODEL, "query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]},
        {"item_first": False, "apply_softmax": True, "add_special_tokens": True},
    ),
    "/inference/v1/generate": (
        {"model": MODEL, "token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
        {
            "sampling_params": SAMPLING | {
                "max_tokens": 3, "logprobs": 1, "detokenize": True, "extra_args": {"a": 1},
                "output_kind": 1, "structured_outputs": {"json": OBJECT},
            },
            "features": None, "cache_salt": "x", "priority": 0, "request_id": "d",
            "kv_transfer_params": None,
        },
    ),
    "/scale_elastic_ep": ({"new_data_parallel_size": 2}, {"drain_timeout": 1}),
    "/is_scaling_elastic_ep": ({}, {}),
}  # fmt: skip

HALF = "\ud83d"


def deep(levels: int, bracket: str) -> str:
    """Stands for JSON that is nested so deeply that json.dumps would not write it."""
    return f"@@DEEP{levels}{bracket}@@"


def dumps(body: Any) -> bytes:
    def nest(m: re.Match[str]) -> str:
        n = int(m[1])
        return "[" * n + "]" * n if m[2] == "[" else '{"a":' * n + "1" + "}" * n

    return re.sub(r'"@@DEEP(\d+)([\[{])@@"', nest, json.dumps(body)).encode()


NUMBERS = [
    *(0, 1, -1, 2, -2, 0.5, -0.0, 1e308, -1e308, 1e-320, 2**31, 2**31 - 1, 2**32, 2**53, 2**63),
    *(2**63 - 1, -(2**63), 2**64, 2**64 - 1, 2**70, 10**40, 10**400),
    *(float("nan"), float("inf"), float("-inf"), True, False, None),
]
TEXTS = [
    *("", "a", "\0", "a\0b", HALF, "\udc00x", "\x1b[31m", "\r\nX: y", "\u202e", "\ufeff", "😀" * 5),
    *("x" * 5000, "1", "-1", "nan", "true", "[]", "{}", "null", "auto", "none", "required", "any"),
    *("../../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "%s%n", "(a+)+$"),
    *("data:image/png;base64,AAAA", "{{ 7*7 }}", "{{ ''.__class__.__mro__ }}", "{{"),
    "{% for i in range(10) %}x{% endfor %}",
]
LISTS: list[Any] = [
    *([], [[]], [[[]]], [None], [0], [-1], ["a"], [""], [HALF], ["\0"], [1.5], [True], [{}]),
    *([2**31], [2**63], [2**70], [[1, 2], [3]], ["a"] * 500, [1] * 500, [[1]] * 100),
]
OBJECTS: list[Any] = [
    *({}, {"": ""}, {"a": None}, {"a": {"b": {"c": [1]}}}, {"-1": 1}, {"999999999": 1}, {"a": 1}),
    *({"5": 10**400}, {"5": float("nan")}, {"5": 2**70}, {"include_usage": True}),
    *({"type": t} for t in ("nope", "function", "json_object", "json_schema", "text")),
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}},
]
MESSAGES: list[Any] = [
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
    [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    *([{"type": "text"}], [{"type": "text", "text": None}], [{"type": "refusal", "refusal": "x"}]),
    [{"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": FUNCTION}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    *([{"role": "tool", "content": "x"}], [{"role": "nope", "content": "x"}], [{"role": "user"}]),
    *([{"role": "user", "content": []}], [{"role": "assistant", "content": None}], USER * 50),
    [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "x"}],
    [{"type": "function_call_output", "call_id": "x", "output": "y"}],
    [{"type": "reasoning", "id": "x", "summary": []}],
    *([{"type": t} for t in ("custom", "web_search_preview", "mcp", "code_interpreter")]),
]  # fmt: skip
GRAMMARS: list[Any] = [
    *({"regex": r} for r in ("(", "(a|b|c){1,9999}", "a{100000}", "(a+)+$")),
    *({"choice": c} for c in ([], [""], [1], ["a" * 70_000])),
    *({"grammar": g} for g in ("", "root ::= ", 'root ::= root "a"')),
    *({"json": s} for s in ("{", True, {"$ref": "http://127.0.0.1:1/x"}, {"enum": []})),
    {"json": {"type": "string", "pattern": "(a+)+$"}},
    {"json": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}},
    {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**6 + 1}},
    {"json": {"enum": list(range(2000))}},
    *({"structural_tag": "{}"}, {"json_object": True}, {"regex": "a", "choice": ["b"]}),
]
DEEP = [deep(n, b) for n in (50, 200, 900, 10_000) for b in "[{"]
VALUES = [*NUMBERS, *TEXTS, *LISTS, *OBJECTS, *MESSAGES, *GRAMMARS, *DEEP]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, child in enumerate(value) if isinstance(value, list) else items:
        yield from places(child, (*path, key))


def spoil(body: dict[str, Any], random: random.Random) -> None:
    """Replace one value somewhere in the body, or leave its field out."""
    *way, last = random.choice(list(places(body)))
    inner: Any = body
    for key in way:
        inner = inner[key]
    if random.random() < 0.1:
        del inner[last]
    else:
        inner[last] = copy.deepcopy(random.choice(VALUES))


def bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """Routes and what to post to them, without end."""
    rng = random.Random(seed)
    while True:
        path = rng.choice(list(ROUTES))
        always, sometimes = copy.deepcopy(ROUTES[path])
        body = always | {k: v for k, v in sometimes.items() if rng.random() < 0.12}
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if sometimes and rng.random() < 0.25:
                name = rng.choice(list(sometimes))
                body[name] = copy.deepcopy(rng.choice(VALUES))
            elif body:
                spoil(body, rng)
        if rng.random() < 0.1:
            body["stream"] = True
        yield path, dumps(body)
