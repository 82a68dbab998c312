"""What an engine on a GPU offers beside plain serving, each with int4_kivi.

Two judges: the log-probabilities of a prompt beside those of a full-precision cache, and those of
decoded tokens beside what the same engine says of them as part of a prompt. Engines are small and,
where a test is not about graphs, not compiled: a start is a few seconds.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.checkpoints import CYCLE, MODULES, cycle, write_adapter, write_echo, write_quantised
from tests.gpu.engines import (
    LIMIT,
    VOCABULARY,
    config,
    forced,
    leads,
    pages_are_back,
    prompt_logprobs,
    prompts,
    weights,
    write,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytest.importorskip("vllm")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

CHUNK = 256
LEAN = {
    "max_model_len": 4096,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 29,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "async_scheduling": True,
}
AUTO = LEAN | {"kv_cache_dtype": "auto"}
LENGTHS = (1, 15, 65, 129, 700, 2001)
DECODED = 0.25  # on the CPU in float32 up to 0.17, after a prompt in one chunk


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def model(folder):
    return write(folder / "base", config(), weights())


@pytest.fixture(scope="module")
def want(model, start):
    return forced(start(model, **AUTO), prompts(LENGTHS))


def compare(name: str, got: torch.Tensor, want: torch.Tensor, limit: float = LIMIT[CHUNK]) -> None:
    error = ((got - want).abs().mean() / want.std()).item()
    print(f"{name}: |dlogp| {error:.4f} of the spread, limit {limit}")
    assert error < limit


def sample(llm, asked, tokens: int, lora_request=None, **options):
    """Generate, with the log-probability of each token."""
    from vllm import SamplingParams

    options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 0} | options
    params = SamplingParams(max_tokens=tokens, **options)
    return llm.generate(asked, params, use_tqdm=False, lora_request=lora_request)


def tokens(outs) -> list[list[int]]:
    return [list(c.token_ids) for out in outs for c in out.outputs]


def judge_decoding(name: str, llm, outs, spread: float, lora_request=None) -> None:
    """The same tokens, once decoded and once as part of a prompt, on the same engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    pairs = [(out, c) for out in outs for c in out.outputs]
    asked = [{"prompt_token_ids": [*out.prompt_token_ids, *c.token_ids]} for out, c in pairs]
    again = llm.generate(asked, params, use_tqdm=False, lora_request=lora_request)
    got = [x[t].logprob for _, c in pairs for x, t in zip(c.logprobs, c.token_ids)]
    judge = [x for (_, c), o in zip(pairs, again) for x in prompt_logprobs(o)[-len(c.token_ids) :]]
    error = (torch.tensor(got) - torch.tensor(judge)).abs().mean().item() / spread
    print(f"{name}: decoded and as a prompt |dlogp| {error:.4f} of the spread")
    assert error < DECODED


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_model_runners_and_schedulers(model, start, want, v2, asynchronous, monkeypatch):
    """Prompts in chunks while others decode."""
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", v2)
    start.stop()
    llm = start(model, **LEAN | {"async_scheduling": asynchronous})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.use_v2_model_runner is v2
    assert ("Async" in type(scheduler).__name__) is asynchronous
    compare("chunks and decodes", forced(llm, prompts(LENGTHS), tokens=64), want)
    judge_decoding("greedy", llm, sample(llm, prompts(LENGTHS, seed=1), 150), want.std().item())
    assert pages_are_back(llm)
    if not v2:
        start.stop()


@pytest.fixture
def llm(model, start, want):
    llm = start(model, **LEAN)
    assert llm.reset_prefix_cache()
    yield llm
    assert pages_are_back(llm)


def test_n(llm, want):
    """Four samples of one prompt, and again."""
    runs = []
    for _ in range(2):
        assert llm.reset_prefix_cache()
        runs.append(sample(llm, prompts([300]), 150, n=4, seed=7, temperature=1))
        assert pages_are_back(llm)
    first, again = map(tokens, runs)
    same = [sum(a == b for a, b in zip(x, y)) for x, y in zip(first, again)]
    print(f"tokens equal of 150, run again: {same}")
    assert len(first) == 4 and len({tuple(x) for x in first}) == 4
    assert first == again
    judge_decoding("n = 4", llm, runs[0], want.std().item())


def test_prefix_hits(llm, want):
    """A hit ends before the window; what follows it is as good as without one."""
    asked = prompts([1000])
    cold, warm = sample(llm, asked, 150), sample(llm, asked, 150)
    assert cold[0].num_cached_tokens == 0
    assert warm[0].num_cached_tokens == (999 - 64) // 64 * 64
    same = sum(a == b for a, b in zip(*tokens(cold + warm)))
    print(f"tokens equal of 150, with and without a hit: {same}")
    for name, outs in (("cold", cold), ("warm", warm)):
        judge_decoding(name, llm, outs, want.std().item())
    ids, other = asked[0]["prompt_token_ids"], prompts([200], seed=2)[0]["prompt_token_ids"]
    for shared in (64, 128, 512):
        outs = sample(llm, [{"prompt_token_ids": ids[:shared] + other}], 60)
        assert outs[0].num_cached_tokens == shared
        judge_decoding(f"{shared} shared", llm, outs, want.std().item())


def test_abort(llm):
    """Of four requests two are aborted, one of them while its prompt is computed."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, detokenize=False)
    engine, asked = llm.llm_engine, prompts([100, 200, 300, 3000])
    for i, prompt in enumerate(asked):
        engine.add_request(str(i), prompt, params)
    for _ in range(6):
        engine.step()
    engine.abort_request(["1", "3"])
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {o.request_id: len(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    print("tokens of the requests that ended:", ended)
    assert {k: n for k, n in ended.items() if k in "02"} == {"0": 100, "2": 100}
    assert ended.keys() <= set("0123") and max(ended.get(k, 0) for k in "13") < 100


def test_the_workspace_counts(llm):
    """It is there before memory is profiled, so it must be part of what the weights take."""
    from s4kv_ext.calibrate import layers

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    workspace = layers(runner.vllm_config)[0].workspace.nbytes
    weights = sum(p.nbytes for p in runner.get_model().parameters())
    counted = runner.model_memory_usage
    print(f"weights {weights >> 20}, workspace {workspace >> 20}, counted {counted >> 20} MiB")
    assert workspace >= 64 << 20 and counted >= weights + workspace


@pytest.mark.parametrize("drafts", [3, 7])
def test_ngram_speculation(folder, start, want, drafts):
    """Full graphs of 1 + drafts tokens a request; with 3, in an engine compiled as it is served."""
    model = write_echo(folder / "echo")
    asked = [
        {"prompt_token_ids": cycle(CYCLE * 7 * (i + 1), n)}
        for i, n in enumerate((40, 90, 300, 700))
    ]
    assert max(max(x["prompt_token_ids"]) for x in asked) < VOCABULARY
    plain = sample(start(model, **LEAN), asked, 200, logprobs=2)
    options = LEAN | {
        "cudagraph_capture_sizes": [(1 + drafts) * n for n in (1, 2, 4, 8)],
        "async_scheduling": False,
        "disable_log_stats": False,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 4,
        },
    }
    if drafts == 3:
        del options["compilation_config"]
    llm = start(model, **options)
    assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    drafted = sample(llm, asked, 200)
    metrics = {m.name: m.value for m in llm.get_metrics() if "spec_decode_num" in m.name
               and hasattr(m, "value")}  # fmt: skip
    offered, accepted = (metrics[f"vllm:spec_decode_num_{x}_tokens"] for x in ("draft", "accepted"))
    same = [sum(a == b for a, b in zip(x, y)) for x, y in zip(tokens(plain), tokens(drafted))]
    print(f"{drafts} drafts: {accepted:.0f} of {offered:.0f} accepted, tokens equal of 200: {same}")
    assert 0 < accepted <= offered
    judge_decoding("drafted", llm, drafted, want.std().item())
    assert max(leads(plain, drafted), default=0) < 1.5
    assert pages_are_back(llm)


def test_lora(folder, model, start, want):
    """Requests of an adapter and of the base model in one batch."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, write_adapter(folder / "adapter"))
    asked = [x for x in prompts(LENGTHS) for _ in range(2)]
    use = [None, adapter] * len(LENGTHS)
    rows = torch.tensor([r for n in LENGTHS for r in [False] * (n - 1) + [True] * (n - 1)])
    # Not on lm_head: there vLLM applies to the rows of a prompt the adapters of a step's samples.
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "lora_target_modules": MODULES}
    full = forced(start(model, **AUTO | lora), asked, lora_request=use)
    llm = start(model, **LEAN | lora)
    got = forced(llm, asked, tokens=64, lora_request=use)
    base, adapted = full[~rows], full[rows]
    change = ((adapted - base).abs().mean() / base.std()).item()
    print(f"the adapter changes log-probabilities by {change:.3f} of the spread")
    assert len(base) == len(adapted) and change > 0.3
    compare("base, in an engine with an adapter and in one without", base, want, limit=0.05)
    compare("base in a batch with an adapter", got[~rows], base)
    # On the CPU in float32 0.20: the channel maps were chosen for the weights without the adapter.
    compare("adapter", got[rows], adapted, limit=0.26)
    outs = sample(llm, asked, 100, use)
    judge_decoding("both in a batch", llm, outs, want.std().item(), use)
    assert pages_are_back(llm)


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_quantised_weights(folder, model, start, want, method):
    """Beside a full-precision cache with the same weights; those resemble the model's own."""
    path = model if method == "fp8" else write_quantised(folder / method, method)
    options = {"quantization": "fp8"} if method == "fp8" else {}
    full = forced(start(path, **AUTO | options), prompts(LENGTHS))
    correlation = torch.corrcoef(torch.stack((full, want)))[0, 1].item()
    print(f"{method}: correlation with the log-probabilities of bf16 weights {correlation:.3f}")
    assert correlation > 0.6  # four bits rounded to nearest: 0.83
    llm = start(path, **LEAN | options)
    compare(method, forced(llm, prompts(LENGTHS), tokens=64), full)
    judge_decoding(method, llm, sample(llm, prompts(LENGTHS), 100), full.std().item())
    assert pages_are_back(llm)


def test_float16(model, start):
    full = forced(start(model, **AUTO | {"dtype": "float16"}), prompts(LENGTHS))
    llm = start(model, **LEAN | {"dtype": "float16"})
    compare("float16", forced(llm, prompts(LENGTHS), tokens=64), full)
    judge_decoding("float16", llm, sample(llm, prompts(LENGTHS), 100), full.std().item())
    assert pages_are_back(llm)


def test_sleep(model, start, want):
    """Level 1 keeps the weights, level 2 discards them; the cache is lost either way."""
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    if not cumem.cumem_available:
        pytest.skip("this vLLM has no allocator that can sleep")
    llm = start(model, **LEAN | {"enable_sleep_mode": True})
    asked = prompts([200, 700, 1500])
    before = tokens(sample(llm, asked, 100))
    for level in (1, 2):
        free = torch.cuda.mem_get_info()[0]
        llm.sleep(level=level)
        torch.cuda.synchronize()
        freed = torch.cuda.mem_get_info()[0] - free
        assert freed > LEAN["kv_cache_memory_bytes"]
        # Whoever has the memory meanwhile leaves something else in it.
        torch.full((freed // 2,), 0xA5, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        outs = sample(llm, asked, 100)
        same = [sum(a == b for a, b in zip(x, y)) for x, y in zip(before, tokens(outs))]
        print(f"level {level}: {freed >> 20} MiB freed, tokens equal of 100 after it: {same}")
        assert [out.num_cached_tokens for out in outs] == [0, 0, 0]
        compare(f"after level {level}", forced(llm, prompts(LENGTHS), tokens=64), want)
        assert tokens(outs) == before
        assert pages_are_back(llm)
