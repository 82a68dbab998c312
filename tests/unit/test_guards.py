"""What the fixes of vLLM's own faults call; from outside they are tried in e2e/test_faults.py."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock
from unittest.mock import MagicMock, Mock

import orphan
import pytest
import torch
from openai.types.responses import ResponseOutputMessage
from torch._inductor.utils import fresh_cache
from vllm.compilation import caching, decorators
from vllm.entrypoints.openai.engine.protocol import GenerationError
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.entrypoints.serve.utils.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.sample import prompt_logprob as second_runner

from s4kv_ext import page_tags
from s4kv_ext.guards import (
    adapters,
    auth,
    compiling,
    grammar,
    http,
    prompt_logprobs,
    requests,
    shutdown,
    streams,
)


@pytest.mark.parametrize("given", ["trace-7", "a" * 128, "0f8fad5b-d9cb-469f-a165-70867728950e"])
def test_an_ordinary_id_stays(given):
    assert requests.bounded_id(given) == given


def test_any_id_becomes_short_and_printable():
    for given in ("x" * 60_000, "a\n\x1b[31mb", "half \ud83d", "ä" * 200, "", " "):
        bounded = requests.bounded_id(given)
        assert len(bounded) <= 128 and bounded.isascii() and " " not in bounded
        assert not given or bounded.isprintable()
    assert requests.bounded_id("x" * 200 + "a") != requests.bounded_id("x" * 200 + "b")


@pytest.mark.parametrize("body, right", [
    (b"{}", True), (b' \r\n\t{"a": 1}', True), (b"[{}]", False), (b'"{"', False), (b"", False),
    (b"1", False), (b"\xff{", False),
])  # fmt: skip
def test_is_object(body, right):
    assert requests.is_object(body) is right


def test_errors_are_told_without_values():
    one = {"loc": ("body", "n"), "msg": "should be an integer", "input": "x" * 10**6}
    assert requests.describe([one]) == "1 validation error: body.n: should be an integer"
    assert requests.describe(["Only JSON"]) == "1 validation error: Only JSON"
    many = requests.describe([one | {"msg": "m" * 10**6, "loc": ("l" * 10**6,)}] * 1000)
    assert len(many) < 3000 and many.endswith("and 995 more")
    assert len(requests.bounded_text("x" * 10**6)) < 2100


@pytest.mark.parametrize(
    "params, name",
    [
        (SamplingParams(top_k=2**70), "top_k"),
        (SamplingParams(stop_token_ids=[1, 2**64]), "stop_token_ids.1"),
        (SamplingParams(extra_args={"a": [{"b": -(2**63) - 1}]}), "extra_args.a.0.b"),
        (SamplingParams(seed=2**63), None),
    ],
)
def test_a_huge_number_is_found(params, name):
    assert requests.huge_number(params) == name
    told = requests.refused(OverflowError("too large"), params)
    assert isinstance(told, ValueError)
    assert getattr(told, "parameter", None) == name


def test_whatever_goes_wrong_names_the_parameter():
    for wrong in (KeyError("begin"), RecursionError("deep"), ValueError("bad"), RuntimeError()):
        with pytest.raises(VLLMValidationError) as told, requests.naming("structured_outputs"):
            raise wrong
        assert told.value.parameter == "structured_outputs"
        assert str(told.value)


def nested(depth: int) -> dict:
    return {} if depth == 1 else {"items": nested(depth - 1)}


def test_depth():
    for given in (nested(100), '{"a": [1, {"b": "[[[["}]}'):
        grammar.check_size(StructuredOutputsParams(json=given))
    for given in ({"json": nested(102)}, {"structural_tag": "[" * 102 + "]" * 102}):
        with pytest.raises(ValueError, match="100 levels"):
            grammar.check_size(StructuredOutputsParams(**given))


LONG = {
    "choice": ["a" * 40_000, "b" * 40_000],
    "regex": "a" * 70_000,
    "grammar": "a" * 70_000,
    "json": {"properties": {f"name-{i}": {"type": "string"} for i in range(3000)}},
    "structural_tag": json.dumps({"a": "x" * 70_000}),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_grammar_has_a_size(kind, monkeypatch):
    params = StructuredOutputsParams(**{kind: LONG[kind]})
    with pytest.raises(ValueError, match=r"more than the 65536 .*S4KV_MAX_GRAMMAR"):
        grammar.check_size(params)
    monkeypatch.setenv("S4KV_MAX_GRAMMAR", "1000000")
    grammar.check_size(params)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "٣"])
def test_a_bound_is_a_positive_number(value, monkeypatch):
    monkeypatch.setenv("S4KV_MAX_GRAMMAR", value)
    with pytest.raises(ValueError, match="S4KV_MAX_GRAMMAR is no positive number"):
        grammar.check_size(StructuredOutputsParams(regex="a"))
    monkeypatch.setenv("S4KV_MAX_GRAMMAR", "")
    grammar.check_size(StructuredOutputsParams(regex="a"))


def test_a_failed_grammar_asks_nothing_and_refuses_everything():
    failed = grammar.failed(RuntimeError("no such rule"))
    mask = torch.zeros(2, 4, dtype=torch.int32)
    failed.fill_bitmask(mask, 1)
    assert (mask[1] == -1).all() and not mask[0].any()
    assert failed.is_terminated() and not failed.accept_tokens("r", [1])
    assert failed.validate_tokens([1, 2]) == []
    assert grammar.error_of(Mock()) is grammar.error_of(None) is None
    output = SimpleNamespace(finish_reason="error", stop_reason=grammar.error_of(failed))
    with pytest.raises(VLLMValidationError, match="no such rule"):
        grammar.raise_if_failed(SimpleNamespace(outputs=[output]))
    for other in (None, 5, "stop"):
        output.stop_reason = other
        grammar.raise_if_failed(SimpleNamespace(outputs=[output]))
    output.stop_reason = f"{page_tags.WHAT}; send the request again"
    with pytest.raises(InputStreamError, match="send the request again") as raised:
        grammar.raise_if_failed(SimpleNamespace(outputs=[output]))
    assert isinstance(raised.value.cause, GenerationError)


class Allows:
    """A grammar and its backend: how many words of a mask it fills, and guidance's error."""

    def __init__(self, words: int, error: str | None = None, terminated: bool = False) -> None:
        self.words, self.is_terminated = words, lambda: terminated
        if error is not None:
            self.ll_matcher = SimpleNamespace(get_error=lambda: error)

    def allocate_token_bitmask(self, n: int) -> torch.Tensor:
        return torch.full((n, 4), -1, dtype=torch.int32)

    def fill_bitmask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = 0
        mask[row, : self.words] = 1


def test_a_grammar_that_allows_nothing():
    for grammar_ in (Allows(1), Allows(1, ""), Allows(0, terminated=True)):
        assert grammar.sound(grammar_, grammar_) is grammar_
    for grammar_ in (Allows(0), Allows(1, "NoExtensionBias"), Allows(0, "")):
        with pytest.raises(ValueError, match="no text"):
            grammar.sound(grammar_, grammar_)


def test_open_paths(monkeypatch):
    monkeypatch.delenv(auth.VARIABLE, raising=False)
    assert not auth.guarded("/health") and not auth.guarded("/ping")
    for path in ("/health/", "/healthx", "/Health", "//health", "", "/metrics", "/v1/models"):
        assert auth.guarded(path)
    monkeypatch.setenv(auth.VARIABLE, " /metrics, ,/version")
    assert not auth.guarded("/metrics") and not auth.guarded("/metrics/")
    assert not auth.guarded("/version")
    assert auth.guarded("/v1/models") and auth.guarded("") and auth.guarded("/")


def ends(pid: int, seconds: float = 10) -> bool:
    """Whether a process is gone by then; if not, it is killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_process_ends_with_its_parent(method, stubborn):
    ours, theirs = multiprocessing.Pipe()
    p = multiprocessing.get_context(method).Process(
        target=orphan.middle, args=(theirs, method, stubborn)
    )
    p.start()
    assert ours.poll(60)
    pid = ours.recv()
    p.kill()
    p.join()
    assert ends(pid), "the child outlived its parent"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_starts(number, capfd):
    """At once, with what it started, and in one line."""
    ours, theirs = multiprocessing.Pipe()
    p = multiprocessing.get_context("fork").Process(target=orphan.starting, args=(theirs,))
    p.start()
    assert ours.poll(60)
    pid = ours.recv()
    os.kill(p.pid, number)
    p.join(10)
    code = p.exitcode
    p.kill()
    assert ends(pid) and code == -number
    told = capfd.readouterr().err
    assert f"{number.name} before the server was ready" in told and "Traceback" not in told


def test_a_lost_ping_is_noticed(monkeypatch):
    """A reader of the message queue that has been idle waits for a ping, which libzmq may lose."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

    writer = MessageQueue(n_reader=1, n_local_reader=1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join(10)
    reader._spin_condition.busy_loop_s = 0
    monkeypatch.setattr(SpinCondition, "notify", lambda self: None)
    got: list[str] = []
    waiting = threading.Thread(
        target=lambda: got.append(reader.dequeue(indefinite=True)), daemon=True
    )
    waiting.start()
    time.sleep(0.5)  # it waits by now
    writer.enqueue("hello")
    waiting.join(5)
    assert got == ["hello"]


def test_a_grammar_that_other_fields_contradict():
    def request(**fields) -> SimpleNamespace:
        return SimpleNamespace(sampling_params=SamplingParams(**fields))

    told = grammar.why_refused(Mock(), request(allowed_token_ids=[1], min_tokens=2))
    assert told.startswith(grammar.WHAT) and "allowed_token_ids and min_tokens" in told
    assert grammar.why_refused(Mock(), request()) is None  # a fault of ours, and 500
    failed = grammar.failed(RuntimeError("no such rule"))
    assert "no such rule" in grammar.why_refused(failed, request(min_tokens=2))


def test_a_body_is_cut_off_where_it_is_too_long(monkeypatch):
    from fastapi import HTTPException

    async def read(n: int, part: bytes = b"x") -> None:
        async def receive():
            return {"type": "http.request", "body": part * (40 // len(part)), "more_body": True}

        receiving = http.bounded(receive, 100)
        for _ in range(n):
            await receiving()

    asyncio.run(read(2))
    with pytest.raises(HTTPException) as told:
        asyncio.run(read(3))
    assert told.value.status_code == 413 and "S4KV_MAX_BODY" in told.value.detail
    monkeypatch.setattr(http, "MAX_VALUES", 50)
    with pytest.raises(HTTPException) as told:
        asyncio.run(read(2, b"[{},"))
    assert told.value.status_code == 413 and "50 values" in told.value.detail


@pytest.mark.parametrize(
    "tokens, most", [(None, 1_000_000), (1024, 1_000_000), (131_072, 2_097_152)]
)
def test_a_text_has_a_size_before_it_is_tokenized(tokens, most, monkeypatch):
    requests.check_text("x" * most, tokens)
    with pytest.raises(VLLMValidationError, match="S4KV_MAX_TEXT"):
        requests.check_text("x" * (most + 1), tokens)
    monkeypatch.setenv("S4KV_MAX_TEXT", "9000000")
    requests.check_text("x" * (most + 1), tokens)


def test_what_a_validator_did_not_expect_is_the_bodys_fault():
    for wrong in (KeyError("role"), AttributeError("get"), TypeError("int"), RecursionError()):
        with pytest.raises(ValueError), requests.well_typed():
            raise wrong
    with pytest.raises(RuntimeError, match="ours"), requests.well_typed():
        raise RuntimeError("ours")


def test_requests_hear_of_the_shutdown_whoever_notices_the_end_first():
    """The watch over the engine's process may see its end before the shutdown goes on."""
    processor = Mock()
    propagate, client = processor.propagate_error, SimpleNamespace(output_processor=processor)
    server = SimpleNamespace(config=SimpleNamespace(timeout_graceful_shutdown=None))
    shutdown.expect_end(client)
    client.output_processor.propagate_error(EngineDeadError())
    shutdown.end_requests(client, server)
    heard = [str(call.args[0]) for call in propagate.call_args_list]
    assert heard == ["the server is shutting down"] * 2
    assert server.config.timeout_graceful_shutdown == shutdown.GRACE


async def events_of(*before: str, error: Exception) -> list:
    class Serving:
        create_error_response = staticmethod(create_error_response)

        @streams.ends_with_its_error
        async def generate(self):
            for event in before:
                yield event
            raise error

    return [event async for event in Serving().generate()]


@pytest.mark.parametrize(
    "error, code", [(ValueError("no"), "400"), (GenerationError("no"), "500"), (KeyError(), "500")]
)
async def test_a_stream_ends_with_its_error(error, code):
    *before, last = await events_of("created", "in progress", error=error)
    assert before == ["created", "in progress"] and last.sequence_number == 2
    told = json.loads(last.model_dump_json())
    assert told["type"] == "error" and told["code"] == code == str(told["error"]["code"])


async def test_a_background_stream_ends_with_its_error_too():
    """Whoever reads it waits for one more event until one is the last."""
    events = await events_of("created", error=ValueError("no"))
    serving = object.__new__(OpenAIServingResponses)
    serving.event_store = {"a": (events, asyncio.Event())}
    async with asyncio.timeout(5):
        read = [e async for e in serving.responses_background_stream_generator("a")]
    assert read == events


def test_only_a_message_is_taken_for_one():
    assert requests.message_of({"role": "user"}) == {"role": "user"}
    for item in ({"type": "program"}, SimpleNamespace(type="program"), {}, "program"):
        with pytest.raises(VLLMValidationError, match=r"program|None"):
            requests.message_of(item)


def test_a_refusal_is_what_the_assistant_said():
    parts = [{"type": "output_text", "text": "I am sorry.", "annotations": []}]
    refusal = {"type": "refusal", "refusal": "I can't."}
    for content, text in (
        ([refusal], "I can't."),
        ([*parts, refusal], "I am sorry.\nI can't."),
        (parts, "I am sorry."),
        ([], ""),
    ):
        item = ResponseOutputMessage(
            id="a", type="message", role="assistant", status="completed", content=content
        )
        messages = construct_input_messages(request_input=[item])
        assert messages == [{"role": "assistant", "content": text}]
    texts = [{"type": "input_text", "text": word} for word in ("a", "b")]
    mixed = [*texts, {"type": "input_image"}]  # the chat template's, as it is
    for content, shown in ((texts, "a\nb"), (mixed, mixed)):
        item = {"role": "assistant", "content": content}
        messages = construct_input_messages(request_input=[item])
        assert messages == [item | {"content": shown}]


def test_adapters_of_one_name_have_their_own_pages():
    """The first has the name alone, so that other engines' pages can be its own."""

    def loaded(*args, **more) -> tuple[str, ...]:
        return tuple(adapters.hash_keys(adapters.loading(LoRARequest(*args, **more))))

    first = loaded("test", 1, "/a")
    assert first == ("test",)
    assert loaded("test", 1, "/a") == first  # nothing is loaded where it is loaded already
    others = [
        loaded("test", 1, "/a", load_inplace=True),
        loaded("test", 1, "/a", load_inplace=True),
        loaded("test", 1, "/b", load_inplace=True),
        loaded("test", 2, "/a"),
    ]
    assert len({first, *others}) == 5 and loaded("other", 3, "/a") == ("other",)


@pytest.mark.parametrize("served", [True, False])
def test_a_salt_is_no_adapters_name(served, monkeypatch):
    """Where adapters are served; elsewhere it stays as other engines have it."""
    monkeypatch.setattr(adapters, "_served", False)
    adapters.engine_starts(SimpleNamespace(lora_config=object() if served else None))

    def keys(**fields):
        request = SimpleNamespace(lora_request=None, cache_salt=None, mm_features=[])
        vars(request).update(fields, prompt_embeds=None)
        return generate_block_hash_extra_keys(request, 0, 16, 0)[0]

    adapter = LoRARequest("sesame", 7, "/a")
    salted = keys(cache_salt="sesame")
    assert salted == (("sesame", "salt") if served else ("sesame",))
    assert len({salted, keys(cache_salt="salt"), keys(lora_request=adapter)}) == 2 + served
    both = keys(lora_request=adapter, cache_salt="sesame")
    assert both not in (salted, keys(lora_request=adapter)) and both[0] == "sesame"


@pytest.mark.parametrize("has", [True, False])
def test_a_compile_cache_of_any_backend_is_loaded(has, monkeypatch, tmp_path):
    """Of vLLM's own, which has still to be finished, and of inductor's on CPUs."""
    compiled = SimpleNamespace(**{"finalize_loading": Mock()} if has else {})
    cached = Mock(_artifacts=SimpleNamespace(compiled_fn=compiled))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda *_, **__: cached)
    monkeypatch.setattr(decorators, "_verify_source_unchanged", Mock())
    monkeypatch.setattr(decorators, "monitor_torch_compile", lambda *_, **__: nullcontext())
    monkeypatch.setattr(decorators, "set_current_vllm_config", nullcontext)
    (tmp_path / "model").touch()
    model = MagicMock(forward=lambda: None)
    model.vllm_config.compilation_config.use_inductor_graph_partition = False
    assert decorators._try_load_aot_compiled_fn(model, str(tmp_path / "model")) is cached
    assert not has or compiled.finalize_loading.called


@torch._dynamo.config.patch(suppress_errors=False)
@torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent/c++")})
def test_what_cannot_be_compiled_runs_uncompiled():
    """A server without a C++ compiler goes on at the first request that samples."""
    logits = torch.zeros(2, 50)
    logits[0, 7] = logits[1, 9] = 1000
    with fresh_cache():
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            compiled_random_sample(logits)
        CPUWorker.compile_or_warm_up_model(MagicMock(model_config=SimpleNamespace(seed=0)))
        torch._dynamo.reset()
        assert compiled_random_sample(logits).tolist() == [7, 9]
    torch._dynamo.reset()


def test_a_compile_cache_is_of_one_processor(monkeypatch, tmp_path):
    """A home that several machines share, an image that was made on another."""
    config = Mock()
    config.compute_hash.return_value = "a"
    keys = []
    for flags in ("fpu avx2", "fpu avx2 avx512f", "fpu avx2"):
        told = f"processor\t: {len(keys)}\nflags\t\t: {flags}\ncpu MHz\t\t: {len(keys)}\n" * 2
        (tmp_path / "cpuinfo").write_text(told)
        monkeypatch.setattr(compiling, "CPUINFO", tmp_path / "cpuinfo")
        keys.append(caching.aot_compile_hash_factors(config))
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_prompt_logprobs_hold_the_logits_of_few_tokens(tokens):
    """Both model runners; and the same values as from all logits at once."""
    torch.manual_seed(tokens)
    # Whole numbers: the same logits whatever the number of rows.
    weight, hidden = (torch.randint(-3, 4, (n, 16)).float() for n in (500, tokens))
    targets = torch.randint(500, (tokens,))
    rows = []

    def compute_logits(part):
        rows.append(len(part))
        return part @ weight.T

    model = SimpleNamespace(compute_logits=compute_logits)
    runner = SimpleNamespace(max_num_reqs=1, model=model, sampler=Sampler())
    ids, logprobs, ranks = prompt_logprobs.in_slices(runner, hidden, 5, targets)
    whole = (hidden @ weight.T).log_softmax(-1)
    assert max(rows) <= prompt_logprobs.slice_size(1) == 64 and sum(rows) == tokens
    torch.testing.assert_close(logprobs[:, 0], whole.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(logprobs[:, 1:], whole.topk(5).values)
    assert ids[:, 0].tolist() == targets.tolist()
    assert ranks.tolist() == (whole >= whole.gather(1, targets[:, None])).sum(1).tolist()

    rows.clear()
    with mock.patch.object(second_runner, "compute_topk_logprobs", top_logprobs):
        told = second_runner.compute_prompt_logprobs_with_chunking(
            targets, hidden, compute_logits, 5, prompt_logprobs.slice_size(100)
        )
    assert max(rows) <= 100 and sum(rows) == tokens
    torch.testing.assert_close(told[1], logprobs)


def top_logprobs(logits, count, targets):
    """What the second runner's Triton kernels compute."""
    return Sampler.gather_logprobs(logits.log_softmax(-1), count, targets)


def test_as_many_rows_as_a_step_samples():
    assert [prompt_logprobs.slice_size(n) for n in (1, 256, 4096)] == [64, 256, 1024]
