"""The stock API, from an OpenAI client against a real server process with int4_kivi."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from conftest import gone

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time there was a small village by the sea. " * 60


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def chat(client, **options):
    return client.chat.completions.create(
        model="smollm2", **({"messages": QUESTION, "temperature": 0, "max_tokens": 24} | options)
    )


def test_paris(client):
    answer = chat(client)
    print(answer.choices[0].message.content)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_models_and_health(client, server):
    assert [m.id for m in client.models.list()] == ["smollm2"]
    assert requests.get(f"{server.url}/health", timeout=60).status_code == 200


def test_log_says_what_was_chosen(server):
    log = server.log.read_text()
    assert "int4_kivi: channel maps of 30 layers" in log
    assert "int4_kivi: 30 layers, 7290 bytes a sealed token" in log


def test_metrics_name_the_cache(server):
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    info = next(x for x in text.splitlines() if x.startswith("vllm:cache_config_info"))
    assert 'cache_dtype="int4_kivi"' in info
    assert 'kv_cache_size_tokens="' in info


def test_stream_equals_answer(client):
    pieces = [c.choices[0].delta.content or "" for c in chat(client, stream=True) if c.choices]
    assert len(pieces) > 3
    assert "".join(pieces) == chat(client).choices[0].message.content


def test_completion_and_echo_of_tokens(client):
    c = client.completions.create(
        model="smollm2", prompt=STORY, max_tokens=16, temperature=0, logprobs=3
    )
    assert len(c.choices[0].logprobs.tokens) == 16
    assert c.usage.prompt_tokens > 600
    assert all(p <= 0 for p in c.choices[0].logprobs.token_logprobs)


def test_n(client):
    c = client.completions.create(
        model="smollm2", prompt=STORY, max_tokens=80, temperature=1.0, n=4, seed=1
    )
    texts = [x.text for x in c.choices]
    assert len(texts) == 4 and len(set(texts)) == 4
    best = client.completions.create(
        model="smollm2", prompt=STORY, max_tokens=80, n=3, extra_body={"top_k": 1}
    )
    assert len({x.text for x in best.choices}) == 1


def test_logprobs(client):
    content = chat(client, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    for token in content:
        assert token.logprob == max(t.logprob for t in token.top_logprobs)


def test_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    answer = chat(
        client,
        messages=[{"role": "user", "content": "The capital of France, as JSON."}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"city", "country"}


def test_tool_call(client):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    answer = chat(
        client,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_many_at_once(client, server):
    """Twelve requests of different lengths together: all end, all pages come back."""

    def ask(i: int) -> str:
        prompt = f"{i}. " + STORY[: 60 * (i + 1) * 5]
        c = client.completions.create(model="smollm2", prompt=prompt, max_tokens=40, temperature=0)
        return c.choices[0].finish_reason

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(ask, range(12))) <= {"length", "stop"}
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_abort_gives_pages_back(client, server):
    stream = client.completions.create(
        model="smollm2", prompt=STORY, max_tokens=1000, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for _ in range(3):
        next(iter(stream))
    stream.close()
    chat(client)  # a step later the abort is through
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_prefix_hit_is_counted(client, server):
    before = server.metric("vllm:prefix_cache_hits_total")
    prompt = "Shared system prompt. " + STORY
    for question in ("One?", "Two?"):
        client.completions.create(
            model="smollm2", prompt=prompt + question, max_tokens=4, temperature=0
        )
    assert server.metric("vllm:prefix_cache_hits_total") - before >= 512


def test_too_long_is_an_error_for_that_request_only(client):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smollm2", prompt=STORY * 12, max_tokens=10)
    assert "Paris" in chat(client).choices[0].message.content


def test_sigterm_lets_requests_end(server):
    """The last test with this server. By --shutdown-timeout, whoever was served is served to the
    end; then the process ends."""
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 200, "ignore_eos": True}
    url, everybody = f"{server.url}/v1/completions", server.family()
    with requests.post(url, json=body | {"stream": True}, stream=True, timeout=60) as answer:
        lines = answer.iter_lines(chunk_size=1)
        next(lines)
        server.process.terminate()
        told = [json.loads(x[6:]) for x in lines if x.startswith(b"data: {")]
    assert told[-1]["choices"][0]["finish_reason"] == "length", told[-1]
    assert server.process.wait(60) == 0
    assert not gone(everybody, 10)
