"""One engine in this process: how fast it prefills and decodes, and how much its cache holds.

    engine = Engine(model, kv="int4_kivi", dtype="bfloat16", dummy=True, max_model_len=8400)
    engine.warm(32, 8192)
    run = engine.run(32, 8192, tokens=100)
    run.prefill_s, run.steps     # seconds until all have their first token, and of each step after

Prefix caching is off unless asked for: no prompt is to find anything of the one before.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CPU_KV_BYTES = 6 << 30
CHUNK = {True: 2048, False: 8192}  # max_num_batched_tokens, on a CPU and on a GPU
FILL_STEPS = 512
"""Tokens that a request of ``fill`` may decode; more than the prefills of all take steps."""


@dataclass
class Run:
    prefill_s: float
    steps: list[float]


class Engine:
    def __init__(
        self, model: str, kv: str, dtype: str, dummy: bool, max_model_len: int, chunk: int = 0,
        ranks: int = 1, prefix_caching: bool = False,
    ) -> None:  # fmt: skip
        start = time.perf_counter()
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        self.chunk = chunk or CHUNK[on_cpu]
        self.max_num_seqs = 16 if on_cpu else 256
        options: dict[str, Any] = {"gpu_memory_utilization": 0.85}
        if on_cpu:
            options = {"kv_cache_memory_bytes": CPU_KV_BYTES}
        if dummy:
            options["load_format"] = "dummy"
            # With random weights a model may as well be longer than it was trained for.
            known = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
            options["hf_overrides"] = {"max_position_embeddings": max(known, max_model_len)}
        self.engine = LLM(
            model,
            dtype=dtype,
            kv_cache_dtype=kv,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_batched_tokens=self.chunk,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=prefix_caching,
            tensor_parallel_size=ranks,
            **options,
        ).llm_engine
        self.ready_s = time.perf_counter() - start
        self.random = np.random.default_rng(0)
        self.requests = 0

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def kv_tokens(self) -> int:
        return self.engine.vllm_config.cache_config.kv_cache_size_tokens

    def add(self, contexts: list[int], tokens: int) -> list[str]:
        """Requests of new random prompts, ``tokens`` output tokens each; their ids."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompts = [self.random.integers(100, 40_000, n).tolist() for n in contexts]
        names = [str(self.requests + i) for i in range(len(prompts))]
        self.requests += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        return names

    def run(self, batch: int, context: int, tokens: int) -> Run:
        """A step counts if it brings each request a token, and began after all had their first.

        With asynchronous scheduling a call of ``step`` launches a batch and waits for the one
        before, so the time from one return to the next is still that of one step, and the batch
        behind the last first token is a pure decode step too.
        """
        self.add([context] * batch, tokens)
        start = last = time.perf_counter()
        prefill_s: float | None = None
        steps: list[float] = []
        begun: set[str] = set()
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            if prefill_s is not None and len(outputs) == batch:
                steps.append(now - last)
            begun |= {o.request_id for o in outputs}
            if prefill_s is None and len(begun) == batch:
                prefill_s = now - start
            last = now
        assert prefill_s is not None
        return Run(prefill_s, steps)

    def prefill_steps(self, batch: int, context: int) -> int:
        """At most so many steps pass until the last of ``batch`` requests has its first token."""
        return -(-batch * context // (self.chunk - batch)) + 2

    def warm(self, batch: int, context: int) -> None:
        """A cell's shapes, briefly: a kernel or a graph may be made when it is first used."""
        self.run(1, min(context, 2 * self.chunk), 2)
        self.run(batch, min(context, 64), 8)

    def long_prompt(self, context: int, chunk: int, repeats: int, enough_s: float) -> list[float]:
        """Seconds of the prefill of one prompt in chunks that are smaller than the engine's.

        Not repeated if it takes more than ``enough_s``.

        Buffers and graphs are made for max_num_batched_tokens when the engine starts, and the
        scheduler reads its own limit anew in every step: lowering it saves another start.
        """
        assert chunk <= self.chunk
        limit = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_scheduled_tokens = chunk
        self.run(1, min(context, 3 * chunk), 2)
        times = [self.run(1, context, 1).prefill_s]
        while len(times) < repeats and times[0] < enough_s:
            times.append(self.run(1, context, 1).prefill_s)
        self.scheduler.max_num_scheduled_tokens = limit
        return times

    def fill(self, tokens: int, kv_bytes: int) -> dict[str, Any]:
        """Start requests of about ``tokens`` tokens until pages are short: how many ran together.

        The pool is limited to ``kv_bytes`` by taking the pages beyond them, so that every dtype
        has the same memory and the engine need not start anew. Lengths differ by up to 63 tokens,
        so that requests do not all open a page in the same step.
        """
        scheduler = self.scheduler
        config, pool = scheduler.kv_cache_config, scheduler.kv_cache_manager.block_pool
        page = sum(t.size for t in config.kv_cache_tensors) // config.num_blocks
        pages = min(kv_bytes // page, pool.get_num_free_blocks())
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - pages)
        contexts = (tokens - self.random.integers(0, 64, self.max_num_seqs + 1)).tolist()
        names = self.add(contexts, FILL_STEPS)
        limit, before = None, -1
        while limit is None:
            self.engine.step()
            running, waiting = scheduler.running, len(scheduler.waiting)
            prefilling = any(r.num_computed_tokens < r.num_prompt_tokens for r in running)
            if any(r.num_preemptions for r in scheduler.requests.values()):
                limit = "preemption"
            elif len(running) == self.max_num_seqs:
                limit = "max_num_seqs"
            elif waiting and not prefilling and len(running) == before:
                limit = "pages"  # a whole step had room for more tokens, and took no request
            before = -1 if prefilling else len(running)
        held = sum(r.num_computed_tokens for r in running)
        result = {
            "requests": len(running),
            "tokens": held,
            "limit": limit,
            "pool_bytes": pages * page,
            "bytes_per_token": pages * page / held,
            "free_pages": pool.get_num_free_blocks(),
        }
        self.engine.abort_request(names)
        pool.free_blocks(taken)
        return result
