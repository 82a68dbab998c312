"""int4_kivi inside the real engine: prefix hits, preemption, limits, and how faithful it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from shapes import MISTRAL, QWEN2, QWEN3, model
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from s4kv_ext.plan import cache, sizing

STORY = (
    "The lighthouse keeper wrote the number of every passing ship into his book. "
    "On Monday he saw the Aurora, on Tuesday the Boreas, and on Friday the Calypso. "
)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def text_tokens(llm, tokens: int, skip: int = 0) -> list[int]:
    from pydoc_data.topics import topics

    prose = "\n".join(topics[k] for k in sorted(topics))
    return llm.get_tokenizer()(prose[: (tokens + skip) * 8])["input_ids"][skip : skip + tokens]


def generate(llm, prompts: list[list[int]], params=GREEDY):
    return llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)


def tokens(outputs) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def pool(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


class TestOne:
    """All on one engine."""

    @pytest.fixture(scope="class")
    def llm(self, start_engine):
        return start_engine()

    @pytest.fixture(autouse=True)
    def nothing_leaks(self, llm):
        yield
        assert pool(llm).get_num_free_blocks() == pool(llm).num_gpu_blocks - 1

    @pytest.mark.parametrize(
        "length", [1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 129, 144, 1000]
    )
    def test_lengths(self, llm, length):
        out = generate(llm, [text_tokens(llm, length)])
        assert len(out[0].outputs[0].token_ids) == 48

    def test_the_plan_says_what_fits(self, llm, model_path):
        """`s4kv plan` counts pages and tokens as this engine does."""
        kv = cache.make(sizing.load(Path(model_path()), "float32").config, "int4_kivi")
        memory, length = 256 << 20, 2048  # as start_engine has them
        assert kv.blocks(memory) == pool(llm).num_gpu_blocks
        reported = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        assert kv.reported_tokens(memory, length) == reported

    def test_prefix_hit_ends_before_the_window(self, llm):
        assert llm.reset_prefix_cache()
        prompt = text_tokens(llm, 1000)
        cold = generate(llm, [prompt])
        warm = generate(llm, [prompt])
        assert cold[0].num_cached_tokens == 0
        assert warm[0].num_cached_tokens == (999 - 64) // 64 * 64
        same = sum(a == b for a, b in zip(*tokens(cold + warm), strict=True))
        print(f"tokens equal to the cold run: {same} of 48")
        assert same >= 40  # another chunking of the prompt; equal but for near-ties

    @pytest.mark.parametrize("shared", [64, 128, 192, 512])
    def test_hit_at_every_boundary(self, llm, shared):
        assert llm.reset_prefix_cache()
        prompt = text_tokens(llm, 700)
        generate(llm, [prompt])
        other = prompt[:shared] + text_tokens(llm, 200, skip=3000)
        assert generate(llm, [other])[0].num_cached_tokens == shared

    def test_multi_turn(self, llm):
        assert llm.reset_prefix_cache()
        turn = text_tokens(llm, 300)
        for _ in range(4):
            answer = generate(llm, [turn])
            turn = turn + tokens(answer)[0] + text_tokens(llm, 40, skip=500)
        again = generate(llm, [turn])
        assert again[0].num_cached_tokens >= len(turn) - 40 - 128 - 64

    def test_same_prompt_at_once(self, llm):
        """Requests of one step that hit blocks which another one of that step seals."""
        assert llm.reset_prefix_cache()
        prompt = text_tokens(llm, 420)
        first = tokens(generate(llm, [prompt]))[0]
        assert llm.reset_prefix_cache()
        for got in tokens(generate(llm, [prompt] * 4)):
            assert sum(a == b for a, b in zip(got, first, strict=True)) >= 40

    def test_length_limit(self, llm):
        out = generate(
            llm, [text_tokens(llm, 2000)], SamplingParams(max_tokens=500, ignore_eos=True)
        )
        assert (
            len(out[0].outputs[0].token_ids) == 48 and out[0].outputs[0].finish_reason == "length"
        )

    def test_no_repeated_token(self, llm):
        """Broken attention shows as one token for ever, and raises nothing."""
        ids = tokens(
            generate(llm, [text_tokens(llm, 1500)], SamplingParams(temperature=0, max_tokens=200))
        )
        most = max(ids[0].count(t) for t in set(ids[0]))
        assert most < 0.5 * len(ids[0]), f"one token makes {most} of {len(ids[0])}"

    def test_prompt_logprobs_twice(self, llm):
        """The second call must compute what the prefix cache could have answered."""
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        for length in (31, 33, 64, 65, 200):
            prompt = text_tokens(llm, length)
            a, b = (generate(llm, [prompt], params)[0].prompt_logprobs for _ in range(2))
            assert len(a) == len(b) == length
            for x, y, token in zip(a[1:], b[1:], prompt[1:], strict=True):
                assert abs(x[token].logprob - y[token].logprob) < 1e-4

    def test_alone_or_together(self, llm):
        """What a request gets does not depend on its neighbours."""
        prompts = [text_tokens(llm, n, skip=10 * n) for n in (5, 64, 65, 130, 200, 333, 512, 700)]
        assert llm.reset_prefix_cache()
        alone = [tokens(generate(llm, [p]))[0] for p in prompts]
        assert llm.reset_prefix_cache()
        together = tokens(generate(llm, prompts))
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(alone, together)]
        print(f"tokens equal of 48: {same}")
        assert sum(same) >= 0.9 * 48 * len(prompts)

    @pytest.mark.parametrize("group", [0, 1], ids=["sealed", "recent"])
    def test_a_wrong_page_ends_its_request(self, llm, group, monkeypatch):
        """One of four gets a page of another in its block table: it ends with an error before a
        token of that step leaves, the other three go on, and nobody finds its page again."""
        prompts = [text_tokens(llm, 300, skip=i * 300) for i in range(4)]
        assert llm.reset_prefix_cache()
        right = tokens(generate(llm, prompts))
        assert llm.reset_prefix_cache()
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        build, steps = runner._build_attention_metadata, []

        def spoil(*args, **kwargs):
            steps.append(1)
            if len(steps) == 20:
                table = runner.input_batch.block_table.block_tables[group].block_table.np
                table[1, 0] = table[2, 0]
            return build(*args, **kwargs)

        monkeypatch.setattr(runner, "_build_attention_metadata", spoil)
        before = core.scheduler.page_faults.count
        spoilt = [o.outputs[0] for o in generate(llm, prompts)]
        assert core.scheduler.page_faults.count == before + 1
        (i,) = (i for i, o in enumerate(spoilt) if o.finish_reason == "error")
        assert "not this request's any more" in spoilt[i].stop_reason
        got = [list(o.token_ids) for o in spoilt]
        assert 0 < len(got[i]) < 20 and got[i] == right[i][: len(got[i])]
        del got[i], right[i], prompts[i]
        assert got == right
        monkeypatch.undo()
        assert tokens(generate(llm, prompts)) == right


def test_preemption_and_a_tight_pool(start_engine):
    """Six requests in a pool for two: all end, none is wrong, every page comes back."""
    llm = start_engine(max_model_len=1024, num_gpu_blocks_override=85, max_num_batched_tokens=128)
    prompts = [text_tokens(llm, 500, skip=200 * i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=2)
    together = generate(llm, prompts, params)
    assert pool(llm).get_num_free_blocks() == 84
    assert llm.reset_prefix_cache()
    parted, leads = [], []  # where the texts part, and by how much the token taken led there
    for prompt, other in zip(prompts, tokens(together), strict=True):
        alone = generate(llm, [prompt], params)[0].outputs[0]
        pairs = enumerate(zip(alone.token_ids, other, strict=True))
        if (at := next((i for i, (a, b) in pairs if a != b), None)) is not None:
            best, second = sorted(x.logprob for x in alone.logprobs[at].values())[:-3:-1]
            parted.append(at)
            leads.append(best - second)
    print(f"texts part at {parted} of 120, leads {[f'{x:.2f}' for x in leads]}")
    assert max(leads, default=0) < 0.5


def test_ngram_speculation_changes_nothing(start_engine):
    options = {"max_model_len": 1024, "max_num_batched_tokens": 256}
    llm = start_engine(**options)
    prompts = [llm.get_tokenizer()(STORY * n)["input_ids"] for n in (4, 9, 14)]
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    plain = tokens(generate(llm, prompts, params))
    llm = start_engine(
        **options,
        speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    )
    drafted = tokens(generate(llm, prompts, params))
    assert pool(llm).get_num_free_blocks() == pool(llm).num_gpu_blocks - 1
    same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(plain, drafted)]
    print(f"tokens equal of 150: {same}")
    assert sum(same) >= 0.9 * 150 * len(prompts)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_families_with_dummy_weights(start_engine, tmp_path, family):
    """Other standard-attention families load, answer and give their pages back."""
    config = {"qwen2": QWEN2, "qwen3": QWEN3, "mistral": MISTRAL}[family]
    path = model(tmp_path, config)
    llm = start_engine(path, load_format="dummy", skip_tokenizer_init=True)
    prompts = [[5 + (7 * i) % 900 for i in range(n)] for n in (30, 200, 700)]
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    assert all(len(x) == 80 for x in tokens(generate(llm, prompts, params)))
    assert pool(llm).get_num_free_blocks() == pool(llm).num_gpu_blocks - 1


def nll(llm, prompts: list[list[int]]) -> tuple[list[float], list[int]]:
    """Log-probability of each prompt token, and the most likely one before it."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    logprob, top = [], []
    for out, prompt in zip(generate(llm, prompts, params), prompts, strict=True):
        for entry, token in zip(out.prompt_logprobs[1:], prompt[1:], strict=True):
            logprob.append(entry[token].logprob)
            top.append(next(t for t, x in entry.items() if x.rank == 1))
    return logprob, top


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("smollm2", "float32"), ("smollm2-outlier", "float32"), ("smollm2-d128", "bfloat16")],
)
def test_faithful(start_engine, name, dtype):
    """Teacher forced in chunks of 64, beside a full-precision cache; see bench/fidelity.py."""
    options = {"max_model_len": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 1}
    llm = start_engine(name, kv_cache_dtype="auto", dtype=dtype, **options)
    prompts = [text_tokens(llm, 900, skip=2000 * i) for i in range(2)]
    want, want_top = nll(llm, prompts)
    got, got_top = nll(start_engine(name, dtype=dtype, **options), prompts)
    difference = sum(abs(a - b) for a, b in zip(want, got, strict=True)) / len(want)
    bias = (sum(want) - sum(got)) / len(want)
    agreement = sum(a == b for a, b in zip(want_top, got_top, strict=True)) / len(want)
    print(f"{name} {dtype}: |dlogp| {difference:.4f}, NLL +{bias:.4f}, top-1 {agreement:.4f}")
    assert difference < 0.06 and abs(bias) < 0.01 and agreement >= 0.97
