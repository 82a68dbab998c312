"""What one request or one signal did to vLLM 0.25.1, tried from outside; docs/faults.md lists it.

The tests share a server, in this order, until one ends it; the next takes its place.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from conftest import Server, gone, process_name, served
from safetensors.torch import save_file

from s4kv_ext import ready

KEY = {"Authorization": "Bearer sesame"}
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
PROMPT = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
HALF = "half an emoji \ud83d"
POST = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"),
    *("/v1/messages/count_tokens", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
    *("/v1/completions/render", "/detokenize", "/invocations", "/generative_scoring"),
    *("/inference/v1/generate", "/scale_elastic_ep", "/v1/chat/completions/derender"),
)


@pytest.fixture(scope="module")
def start(model_path, tmp_path_factory):
    def start(*options: str) -> Server:
        return Server(
            model_path(),
            tmp_path_factory.mktemp("faults") / "log",
            *("--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager"),
            *("--kv-cache-dtype", "int4_kivi", "--max-model-len", "4096"),
            *("--kv-cache-memory-bytes", str(256 << 20), "--api-key", "sesame", *options),
        )

    return start


@pytest.fixture(scope="module")
def target(start) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as env:
        here = Path(__file__).parent
        env.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, here / "wrong_page"))))
        s = start(
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--enable-request-id-headers", "--middleware", "failing_middleware.fail"),
        )
    yield from served(s)


def post(server: Server, path: str, body: Any, **headers: str) -> requests.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(
        server.url + path,
        data=data,
        headers=KEY | {"Content-Type": "application/json"} | headers,
        timeout=120,
    )


def error(r: requests.Response) -> dict[str, Any]:
    """The error object of an answer."""
    assert r.status_code == 400, r.text[:500]
    e = r.json()["error"]
    assert e["message"]
    return e


def memory(server: Server) -> int:
    """Bytes that the API server holds."""
    return psutil.Process(server.process.pid).memory_info().rss


def schema(value: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    }


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


def doubling(levels: int) -> dict[str, Any]:
    """What outlines would make a text of that doubles with each level."""
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value, "b": {"type": "null"}}}
    return value | {"patternProperties": {"^x": {"type": "integer"}}}


def wide(n: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(n)}} | more


CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
REFUSED = {
    "self-reference": schema({"$ref": "#"}),
    "circle": schema(CIRCLE),
    "self-reference in an alternative": schema({"anyOf": [{"$ref": "#"}]}),
    "left recursion": {"structured_outputs": {"grammar": 'root ::= root "a"'}},
    "unknown type": schema({"type": "nope", "required": ["a"]}),
    "unknown reference": schema({"$ref": "#/nowhere"}),
    "a bound of 41 digits": schema({"type": "integer", "maximum": 10**40}),
    "bad pattern": schema({"type": "string", "pattern": "("}),
    "too deep": schema(nested(200)),
    "bad regex": {"structured_outputs": {"regex": "("}},
    "bad grammar": {"structured_outputs": {"grammar": "root ::= nope"}},
    "incomplete tag": {
        "structured_outputs": {"structural_tag": '{"structures": [{}], "triggers": ["a"]}'}
    },
    "a long choice": {"structured_outputs": {"choice": ["a" * 200_000]}},
    "many choices": {"structured_outputs": {"choice": [f"choice {i}" for i in range(20_000)]}},
    "a wide schema": schema(wide(10_000)),
    "bad pattern of a property": schema({"type": "object", "patternProperties": {"(": {}}}),
    "other fields allow nothing of it": {
        "structured_outputs": {"choice": ["yes", "no"]},
        "allowed_token_ids": [1, 2],
    },
    "deep text": {"structured_outputs": {"json": '{"items":' * 5000 + "{}" + "}" * 5000}},
}
SERVED = {  # by guidance, where xgrammar cannot
    "NUL in a choice": {"structured_outputs": {"choice": ["a\0b"]}},
    "NUL in a regex": {"structured_outputs": {"regex": "a\0b"}},
    "a quote in a choice": {"structured_outputs": {"choice": ['"', "\n"]}},
    "a schema that doubles": schema(doubling(40)),
    "patterns beside many properties": schema(wide(400, patternProperties={"^x": {}})),
    "a rule twice": {"structured_outputs": {"grammar": 'root ::= "a"\nroot ::= "b"'}},
    "empty alternative": {"structured_outputs": {"regex": "^(|.*)$"}},
}


def test_a_grammar_ends_its_own_request(target):
    """After a good one has chosen xgrammar, while eight others stream."""
    good = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert post(target, "/v1/chat/completions", CHAT | good).status_code == 200
    alone = post(target, "/v1/completions", PROMPT | {"max_tokens": 150}).json()
    with ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(post, target, "/v1/completions", PROMPT | {"max_tokens": 150})
            for _ in range(8)
        ]
        for name, body in REFUSED.items():
            answer = post(target, "/v1/chat/completions", CHAT | body)
            assert answer.status_code == 400, (name, answer.text[:300])
            assert error(answer)["message"], name
        for name, body in SERVED.items():
            answer = post(target, "/v1/chat/completions", CHAT | body)
            assert answer.status_code == 200, (name, answer.text[:300])
        texts = [o.result().json()["choices"][0] for o in others]
    assert {t["finish_reason"] for t in texts} == {"length"}
    # Near-ties may differ with the batch, whole texts may not.
    assert all(t["text"][:20] == alone["choices"][0]["text"][:20] for t in texts)


def test_a_stream_tells_that_its_grammar_failed(target):
    answer = post(target, "/v1/chat/completions", CHAT | schema(CIRCLE) | {"stream": True})
    events = [x for x in answer.text.splitlines() if x.startswith("data: {")]
    assert answer.status_code == 400 or json.loads(events[-1][6:])["error"]["code"] == 400


@pytest.mark.parametrize("value", [CIRCLE, wide(1, required=0)], ids=["late", "early"])
def test_a_stream_of_responses_tells_it_too(target, value):
    """As the Responses API has it, and as client libraries expect it of any stream."""
    form = {"type": "json_schema", "name": "x", "schema": value}
    body = {"model": "smollm2", "input": "Hi", "stream": True, "text": {"format": form}}
    *before, last = [
        json.loads(x[6:])
        for x in post(target, "/v1/responses", body).text.splitlines()
        if x.startswith("data: ")
    ]
    assert last["type"] == "error" and last["error"]["code"] == 400, last
    assert last["message"] == last["error"]["message"] != ""
    assert last["sequence_number"] == len(before)


@pytest.mark.parametrize(
    "body", [b"[]", b'"x"', b"123", b"true", b"null", b"NaN", b"", b"{", b"\xff"]
)
def test_a_body_that_is_no_object(target, body):
    for path in POST:
        assert post(target, path, body).status_code in (400, 415, 422), path


@pytest.mark.parametrize(
    "body", [b'{"a":' * 5000 + b"1" + b"}" * 5000, b"[" * 10_000, b'{"a":' + b"[" * 10_000]
)
def test_a_body_that_is_nested_too_deeply(target, body):
    for path in POST:
        assert post(target, path, body).status_code in (400, 422), path


@pytest.mark.parametrize("value", [[1], [[]], "a", 5, True])
def test_a_field_of_another_type(target, value):
    fields = ("structured_outputs", "response_format", "stream_options", "tools", "tool_choice")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        for name in fields:
            body = {"model": "smollm2", "prompt": "a", "messages": OTHER, "input": "a"}
            answer = post(target, path, body | {name: value, "max_tokens": 1})
            assert answer.status_code in (200, 400), (path, name, answer.text[:300])


def smallest(schema: dict[str, Any], named: dict[str, Any]) -> Any:
    """A value that fits a JSON schema, with what is required and `type` alone."""
    if "$ref" in schema:
        return smallest(named[schema["$ref"].rsplit("/", 1)[1]], named)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return smallest(schema[key][0], named)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    wanted = {*schema.get("required", ()), "type"}
    if schema.get("type") == "object" or "properties" in schema:
        fields = schema.get("properties", {}).items()
        return {k: smallest(v, named) for k, v in fields if k in wanted}
    kinds = {"string": "a", "integer": 1, "number": 1, "boolean": True, "array": []}
    return kinds.get(schema.get("type", ""))


def alternatives(schema: dict[str, Any], named: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a union is of, unions in it too."""
    if "$ref" in schema:
        schema = named[schema["$ref"].rsplit("/", 1)[1]]
    inner = schema.get("anyOf") or schema.get("oneOf")
    if not inner:
        yield schema
    for one in inner or ():
        yield from alternatives(one, named)


TEXT = {"type": "output_text", "text": "No, I will not.", "annotations": []}
REFUSAL = {"type": "refusal", "refusal": "No, I will not."}
PYTHON = re.compile(r"object has no|NoneType|Traceback|not iterable|subscriptable|\w+Error:")


def assistant(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """An output message of those parts."""
    return {"type": "message", "role": "assistant", "id": "a", "status": "completed"} | {
        "content": parts
    }


def test_items_of_every_kind(target):
    """All that the server says an input may hold: it is answered, or refused as the client's."""
    described = requests.get(f"{target.url}/openapi.json", headers=KEY, timeout=60).json()
    named = described["components"]["schemas"]
    _, many = named["ResponsesRequest"]["properties"]["input"]["anyOf"]
    items = [smallest(x, named) for x in alternatives(many["items"], named)]
    items += map(assistant, ([], [REFUSAL], [TEXT, REFUSAL]))
    assert len(items) > 30 and {"computer_call", "message"} <= {x.get("type") for x in items}
    for item in [*items, {"id": "a"}, {"type": "item_reference", "id": "a"}]:
        body = {"model": "smollm2", "input": [item], "max_output_tokens": 1}
        answer = post(target, "/v1/responses", body)
        if answer.status_code == 200:
            continue
        told = error(answer)["message"]
        assert not PYTHON.search(told), (item, told)
        if "role" not in item and "arguments" not in item:  # those are refused for what they hold
            assert str(item.get("type")) in told, (item, told)


def test_a_refusal_is_shown_to_the_model(target):
    """As the same words in a text are."""

    def tokens(*parts: dict[str, Any]) -> int:
        body = {"model": "smollm2", "input": [assistant([*parts])], "max_output_tokens": 1}
        answer = post(target, "/v1/responses", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["input_tokens"]

    assert tokens(TEXT) == tokens(REFUSAL) > tokens()
    assert tokens(TEXT, REFUSAL) == tokens(REFUSAL, TEXT) > tokens(TEXT)


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "nope", "required": ["a"]}},
}
CLIENT_ERRORS = {
    "top_k": ("/v1/chat/completions", CHAT | {"top_k": 2**70}),
    "stop_token_ids": ("/v1/completions", PROMPT | {"stop_token_ids": [2**70]}),
    "vllm_xargs": ("/v1/completions", PROMPT | {"vllm_xargs": {"a": 2**70}}),
    "repetition_detection": (
        "/v1/completions",
        PROMPT | {"repetition_detection": {"max_pattern_size": 5, "min_count": 2**70}},
    ),
    "bad_words": ("/v1/chat/completions", CHAT | {"bad_words": ["\ud83d"]}),
    "tool": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
    "responses": ("/v1/responses", {"model": "smollm2", "input": "Hi", "top_k": 2**70}),
    "generate": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"max_tokens": 2, "top_k": 2**70}},
    ),
}


@pytest.mark.parametrize("name", CLIENT_ERRORS)
def test_the_client_is_told_which_field(target, name):
    answer = error(post(target, *CLIENT_ERRORS[name]))
    told = f"{answer['param']} {answer['message']}"
    if name in CLIENT_ERRORS[name][1]:
        field = {"vllm_xargs": "extra_args", "bad_words": "input"}.get(name, name)
        assert field in told.lower(), told


USER = [{"role": "user", "content": HALF}]
OTHER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/messages", {"max_tokens": 3, "messages": USER}),
        ("/v1/messages", {"max_tokens": 3, "messages": USER, "stream": True}),
        ("/v1/messages", {"max_tokens": 3, "messages": OTHER, "system": HALF}),
        ("/v1/messages", {"max_tokens": 3, "messages": []}),
        ("/v1/messages", {"max_tokens": 3, "messages": OTHER, "top_k": 2**70}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": HALF}),
        ("/v1/completions/render", {"prompt": HALF}),
        ("/v1/responses", {"input": HALF}),
        ("/tokenize", {"prompt": HALF}),
    ],
)
def test_half_an_emoji_and_its_kin(target, path, body):
    answer = post(target, path, {"model": "smollm2"} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_errors_do_not_grow(target):
    """Neither with the number of alternatives nor with what was sent."""
    body = {"model": "smollm2", "max_output_tokens": 3, "input": [{}]}
    assert len(post(target, "/v1/responses", body).content) < 4096
    body["input"] = [{"role": 1, "content": "x" * 1_000_000}]
    assert len(post(target, "/v1/responses", body).content) < 4096
    assert (
        len(post(target, "/v1/chat/completions", CHAT | {"model": "m" * 1_000_000}).content) < 4096
    )
    before = target.log.stat().st_size
    assert post(target, "/v1/chat/completions", CHAT | {"stop": [1] * 100_000}).status_code == 400
    assert target.log.stat().st_size - before < 4096


@pytest.mark.parametrize(
    "item", [{}, {"role": "user", "content": [{}] * 50}], ids=["flat", "inner"]
)
def test_many_wrong_items(target, item):
    """Each costs what a right one does, not an error for each thing that it might have been."""
    before = memory(target)
    for path in POST:
        for name in ("input", "messages", "prompt", "tools", "items", "token_ids", "tokens"):
            began = time.monotonic()
            body = {"model": "smollm2", "max_tokens": 1, name: [item] * (20_000 // len(str(item)))}
            answer = post(target, path, body)
            assert answer.status_code < 500 or answer.status_code == 501, (path, name, answer.text)
            assert len(answer.content) < 4096 and time.monotonic() - began < 5, (path, name)
    assert memory(target) - before < 300 << 20


def test_request_ids_are_bounded(target):
    long = "id-" + "x" * 60_000
    for headers, body in (
        ({"X-Request-Id": long}, {}),
        ({}, {"request_id": long}),
        ({}, {"request_id": "a\n\x1b[31mb\ud83d"}),
    ):
        before = target.log.stat().st_size
        answer = post(target, "/v1/chat/completions", CHAT | body | {"stream": True}, **headers)
        assert answer.status_code == 200
        assert len(answer.content) + sum(map(len, answer.headers.values())) < 4096
        assert "\x1b" not in target.log.read_text()[before:]
        assert target.log.stat().st_size - before < 4096
        body = {"model": "smollm2", "input": "Hi", "max_output_tokens": 1} | body
        assert len(post(target, "/v1/responses", body, **headers).json()["id"]) < 150
    answer = post(target, "/v1/chat/completions", CHAT, **{"X-Request-Id": "trace-7"})
    assert answer.json()["id"] == "chatcmpl-trace-7"
    assert answer.headers["X-Request-Id"] == "trace-7"


def test_the_connection_outlives_an_unexpected_error(target):
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
    for _ in range(3):
        connection.request("GET", "/v1/models", headers=KEY | {"X-Fail": "1"})
        socket = connection.sock
        failed = connection.getresponse()
        assert failed.status == 500
        assert json.loads(failed.read())["error"]["message"] == "as asked"
        connection.request("GET", "/v1/models", headers=KEY)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        assert connection.sock is socket
    connection.close()


def test_every_path_asks_for_the_key(target):
    paths = requests.get(f"{target.url}/openapi.json", headers=KEY, timeout=60).json()["paths"]
    assert {"/invocations", "/tokenize", "/v1/completions", "/version"} <= set(paths)
    also = ("/docs", "/redoc", "/openapi.json", "/metrics", "/metrics/", "/v1/", "//v1/models")
    for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        for path in (
            *paths,
            *also,
            *map(str.upper, paths),
            "/health/",
            "/healthx",
            "/health/../docs",
        ):
            if path in ("/health", "/ping"):
                continue
            for method in ("GET", "POST"):
                r = requests.request(
                    method, target.url + path, headers=key, allow_redirects=False, timeout=30
                )
                assert r.status_code == 401, (method, path, key)
    assert requests.get(f"{target.url}/health", timeout=60).status_code == 200
    assert requests.get(f"{target.url}/ping", timeout=60).status_code == 200
    assert requests.get(f"{target.url}/metrics", headers=KEY, timeout=60).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_page_is_said_to_its_client_alone(target, stream):
    """One of two requests gets a page of another after nine steps."""
    body = PROMPT | {"max_tokens": 30, "stream": stream}
    with ThreadPoolExecutor(2) as pool:
        wrong, good = pool.map(
            lambda rid: post(target, "/v1/completions", body, **{"X-Request-Id": rid}),
            (f"wrong-page-{stream}", f"good-{stream}"),
        )
    text = wrong.text
    assert "a page of the KV cache is not this request's any more; send the request again" in text
    assert wrong.status_code == (200 if stream else 500)
    if stream:
        assert 0 < text.count('"text"') < 10 and '"code": 500' in text.replace('":500', '": 500')
    assert good.ok and "not this request's" not in good.text
    if not stream:
        assert good.json()["usage"]["completion_tokens"] == 30
    told = requests.get(f"{target.url}/metrics", headers=KEY, timeout=60).text
    (count,) = re.findall(r"^vllm:int4_kivi_page_mismatches_total{.*} (\S+)$", told, re.M)
    assert float(count) == 1 + stream
    assert f"request cmpl-wrong-page-{stream}" in target.log.read_text()


def test_the_operators_routes(target):
    """A server that cannot be scaled says so at once; its counters, and its memory, stay."""
    before = requests.get(f"{target.url}/metrics", headers=KEY, timeout=60).text
    for size in (2, 10**9, 10**40):
        began = time.monotonic()
        answer = post(target, "/scale_elastic_ep", {"new_data_parallel_size": size})
        assert answer.status_code == 501 and "--enable-elastic-ep" in answer.text
        assert time.monotonic() - began < 5
    after = requests.get(f"{target.url}/metrics", headers=KEY, timeout=60).text
    count = [x for x in before.splitlines() if x.startswith("vllm:prompt_tokens_total{")]
    assert count and float(count[0].split()[-1]) > 0 and count[0] in after.splitlines()
    for path in ("/sleep", "/start_profile", "/collective_rpc", "/v1/load_lora_adapter"):
        assert post(target, path, {}).status_code == 404, path


def test_nothing_is_left_of_all_that(target):
    """No request, no page, no stack trace but the one of the error that nobody expected."""
    text = requests.get(f"{target.url}/metrics", headers=KEY, timeout=60).text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        values = [float(x.split()[-1]) for x in text.splitlines() if x.startswith(f"vllm:{name}{{")]
        assert values and not any(values), name
    traces = target.log.read_text().count("Traceback (most recent call last)")
    # Three as asked, and vLLM's own of a conversation without messages and of the stream.
    assert traces <= 5, traces


@pytest.mark.parametrize("part", ["EngineCore", "Worker"])
def test_an_engine_that_hangs_is_not_ready(target, part):
    """/health goes on saying 200; `s4kv ready`, which deploy/ asks, does not."""
    asked = ready.Server(target.url, "sesame")
    hung = next(p for p in target.family() if part in process_name(p))
    hung.suspend()
    try:
        assert requests.get(f"{target.url}/health", timeout=60).status_code == 200
        with pytest.raises(ready.NotReady, match="no token"):
            ready.probe(asked, 3)
    finally:
        hung.resume()
    ready.wait(asked, 20, 60)


def open_stream(server: Server) -> Iterator[bytes]:
    """The lines of a long answer."""
    stream = requests.post(
        f"{server.url}/v1/completions",
        json=PROMPT | {"max_tokens": 3000, "stream": True},
        headers=KEY,
        stream=True,
        timeout=60,
    )
    return stream.iter_lines(chunk_size=1)


def events(stream: Iterator[bytes]) -> list[str]:
    return [x.decode() for x in stream if x]


def test_sigkill_of_the_engine_ends_all(target):
    """While it streams: the client is told, nothing keeps memory, the log says what happened."""
    stream = open_stream(target)
    next(stream)
    everybody = target.family()
    began = time.monotonic()
    next(p for p in everybody if "EngineCore" in process_name(p)).kill()
    *_, event, last = events(stream)
    assert last == "data: [DONE]"
    assert json.loads(event.removeprefix("data: "))["error"]["message"], event
    target.process.wait(60)
    assert not gone(everybody, 10)
    assert time.monotonic() - began < 60
    assert "EngineDeadError" in target.log.read_text()[-20_000:]


@pytest.fixture(scope="module")
def next_server(target, start) -> Iterator[Server]:
    """On the port of the one that was killed."""
    assert target.process.poll() is not None
    with pytest.MonkeyPatch.context() as env:
        env.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        s = start("--port", str(target.port), "--enable-lora", "--max-lora-rank", "8")
    yield from served(s)


def test_a_restart_serves(next_server):
    assert post(next_server, "/v1/chat/completions", CHAT).status_code == 200


def write_adapter(folder: Path, seed: int) -> None:
    """Of SmolLM2; strong enough that no page of another fits."""
    g = torch.Generator().manual_seed(seed)
    parts = {
        f"base_model.model.model.layers.{i}.self_attn.o_proj.lora_{x}.weight": torch.randn(
            (8, 576) if x == "A" else (576, 8), generator=g
        )
        * 0.1
        for i in range(30)
        for x in "AB"
    }
    save_file(parts, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def test_an_adapter_that_is_loaded_again_under_its_name(next_server, tmp_path):
    """In place from where the first lay, and after it was unloaded: other weights, other pages."""

    def hits() -> float:
        told = requests.get(f"{next_server.url}/metrics", headers=KEY, timeout=60).text
        found = re.findall(r"^vllm:prefix_cache_hits_total{.*} (\S+)$", told, re.M)
        return sum(map(float, found))

    def ask() -> float:
        """The tokens of the prompt that came out of the cache."""
        before = hits()
        body = PROMPT | {"model": "again", "prompt": list(range(100, 400)), "max_tokens": 2}
        answer = post(next_server, "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return hits() - before

    for seed, how in enumerate(["first", "in place", "in place", "unloaded"]):
        write_adapter(tmp_path, seed)
        body = {"lora_name": "again", "lora_path": str(tmp_path)}
        if how == "unloaded":
            assert post(next_server, "/v1/unload_lora_adapter", body).status_code == 200
        body["load_inplace"] = how == "in place"
        assert post(next_server, "/v1/load_lora_adapter", body).status_code == 200
        assert ask() == 0, how
        assert ask() > 0, how


def test_sigterm_ends_streams_and_process(next_server):
    """Ten open streams, and an eleventh client that does not read."""
    target = next_server

    def read() -> str:
        return events(open_stream(target))[-1]

    deaf = http.client.HTTPConnection("127.0.0.1", target.port)
    deaf.request(
        "POST", "/v1/completions", json.dumps(PROMPT | {"max_tokens": 3000, "stream": True}),
        KEY | {"Content-Type": "application/json"},
    )  # fmt: skip
    everybody = target.family()
    with ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(read) for _ in range(10)]
        time.sleep(3)
        began = time.monotonic()
        target.process.send_signal(signal.SIGTERM)
        last = [s.result(30) for s in streams]
    assert set(last) == {"data: [DONE]"}
    assert "the server is shutting down" in deaf.getresponse().read().decode()
    assert target.process.wait(30) == 0
    assert not gone(everybody, 10)
    assert time.monotonic() - began < 30


def test_sigkill_while_the_model_loads(start):
    """Of the API server, in the widest window: nothing has its handlers yet."""
    s = start()
    try:
        end = time.monotonic() + 900
        while not any("Worker" in process_name(p) for p in s.family()):
            assert s.process.poll() is None and time.monotonic() < end, s.log.read_text()[-2000:]
            time.sleep(0.2)
        everybody = s.family()
        assert len(everybody) >= 3
        s.process.kill()
        assert not gone(everybody, 15)
    finally:
        if s.process.poll() is None:
            os.killpg(s.process.pid, signal.SIGKILL)
