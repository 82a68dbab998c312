"""The real scheduler with int4_kivi, a worker that only tracks tokens, and random schedules.

The worker does with tags what ``reference.py`` does with keys and values, in the same order: store,
seal, attend. A tag names a token and everything before it, so a page that holds the wrong token,
another request's token or none is seen when it is read. Pages are poisoned as they change hands,
and a block table's entries past its own are garbage.

``soak.py`` runs many of them, ``unit/test_schedules.py`` a few hundred.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from s4kv_ext.format import BLOCK, KV_CACHE_DTYPE, SINKS, head_page_bytes, sealed_tokens
from s4kv_ext.metrics import PageStats
from s4kv_ext.reference import sealed_before
from s4kv_ext.specs import prefill_peak_pages, recent_spec, sealed_spec

POISON = -1
VOCAB = 50
DTYPES = {16: torch.bfloat16, 8: torch.float32}  # by tokens in a recent page, head_dim 128


@dataclass(frozen=True)
class Settings:
    """Of an engine; ``pages`` does not count the null page, 0 means what one request may need."""

    page_tokens: int = 16
    max_model_len: int = 512
    pages: int = 0
    max_num_batched_tokens: int = 128
    max_num_seqs: int = 4
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = True
    drafts: int = 0
    asynchronous: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"

    @property
    def pool(self) -> int:
        return self.pages or prefill_peak_pages(self.max_model_len, self.page_tokens, self.drafts)


@functools.cache
def _model_dir() -> tempfile.TemporaryDirectory[str]:
    """Of a config; removed at exit."""
    directory = tempfile.TemporaryDirectory(prefix="s4kv-schedules-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1 << 20,
    }
    Path(directory.name, "config.json").write_text(json.dumps(config))
    return directory


@functools.cache
def _base_config(drafts: int) -> VllmConfig:
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
        )
    return VllmConfig(
        model_config=ModelConfig(
            model=_model_dir().name, skip_tokenizer_init=True, dtype="bfloat16"
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=1 << 20, is_encoder_decoder=False, async_scheduling=False
        ),
        cache_config=CacheConfig(cache_dtype=KV_CACHE_DTYPE, enable_prefix_caching=True),
        speculative_config=speculative,
    )


def make_config(s: Settings) -> VllmConfig:
    config = copy.copy(_base_config(s.drafts))
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = s.max_model_len
    config.scheduler_config = replace(
        config.scheduler_config,
        max_model_len=s.max_model_len,
        is_encoder_decoder=False,
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_num_scheduled_tokens=None,  # vLLM has put in that of the base
        max_num_seqs=s.max_num_seqs,
        long_prefill_token_threshold=s.long_prefill_token_threshold,
        async_scheduling=s.asynchronous,
        policy=s.policy,
        watermark=0.0,
    )
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.enable_prefix_caching = s.prefix_caching
    config.cache_config.num_gpu_blocks_override = s.pool + 1
    config.cache_config.num_gpu_blocks = s.pool + 1
    return config


def make_kv_cache_config(config: VllmConfig, s: Settings) -> KVCacheConfig:
    """Through vLLM's own grouping and memory check."""
    specs = {
        "layer": sealed_spec(1, 128),
        "layer.recent": recent_spec(1, 128, DTYPES[s.page_tokens], s.drafts),
    }
    return get_kv_cache_configs(config, [specs], [1 << 40])[0]


@dataclass
class Sequence:
    """A request as the worker knows it."""

    row: int
    salt: int
    tokens: list[int]
    """Prompt and accepted tokens."""
    computed: int
    drafts: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)

    def tag(self, tokens: list[int]) -> np.ndarray:
        """Tags of all of ``tokens``, which begin with what was tagged before."""
        last = self.tags[-1] if self.tags else self.salt
        for token in tokens[len(self.tags) :]:
            last = hash((last, token))
            self.tags.append(last)
        return np.array(self.tags)


def next_token(rid: str, salt: int, tokens: list[int]) -> int:
    return hash((int(rid), salt, len(tokens), tokens[-1])) % VOCAB


class Worker:
    def __init__(self, s: Settings, rng: Random) -> None:
        self.s, self.rng = s, rng
        self.sealed = np.full((s.pool + 1, BLOCK), POISON)
        self.recent = np.full((s.pool + 1, s.page_tokens), POISON)
        garbage = np.random.default_rng(0).integers(
            0, s.pool + 1, (2, 2 * s.max_num_seqs + 2, 4096), np.int32
        )
        self.sealed_table, self.recent_table = garbage
        self.sinks: set[int] = set()  # pages of sinks that others may hit
        self.seals = 0
        self.row_pages: dict[int, list[int]] = {}
        self.sequences: dict[str, Sequence] = {}

    def poison(self, pages: Any) -> None:
        self.sealed[pages] = POISON
        self.recent[pages] = POISON
        self.sinks -= set(np.arange(len(self.sealed))[pages].tolist())

    def update(self, out: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Bring the block tables up to date, as vLLM's model runners do."""
        for rid in out.finished_req_ids | (out.preempted_req_ids or set()):
            self.sequences.pop(rid, None)
        for new in out.scheduled_new_reqs:
            self._begin(requests[new.req_id], new.block_ids, new.num_computed_tokens)
        cached = out.scheduled_cached_reqs
        for rid, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if rid in cached.resumed_req_ids:
                assert ids is not None
                self._begin(requests[rid], ids, computed)
                continue
            sequence = self.sequences[rid]
            late = len(sequence.drafts) if self.s.asynchronous else 0  # rejections not known yet
            assert sequence.computed <= computed <= sequence.computed + late, "computed tokens"
            if ids is not None:
                self._append(sequence.row, ids)

    def _begin(self, request: Request, ids: tuple[list[int], ...], computed: int) -> None:
        used = {q.row for q in self.sequences.values()}
        row = next(r for r in range(len(self.sealed_table)) if r not in used)
        salt = hash(int(request.cache_salt or 0))
        self.sequences[request.request_id] = Sequence(
            row, salt, list(request.all_token_ids), computed
        )
        self.row_pages[row] = [0, 0]
        hit = (computed // BLOCK, SINKS // self.s.page_tokens if computed else 0)
        self._append(row, ids, hit)

    def _append(self, row: int, ids: tuple[list[int], ...], hit: tuple[int, int] = (0, 0)) -> None:
        for group, table in enumerate((self.sealed_table, self.recent_table)):
            start = self.row_pages[row][group]
            table[row, start : start + len(ids[group])] = ids[group]
            self.row_pages[row][group] += len(ids[group])
            self.poison([page for page in ids[group][hit[group] :] if page])

    def hittable(self, q: Sequence, pages: np.ndarray) -> int:
        """Leading tokens that lie sealed in some of these pages, as far as a hit may go."""
        tags, size = q.tag(q.tokens), self.s.page_tokens
        sinks = self.recent[[page for page in pages if page in self.sinks], -1]
        if not np.isin(tags[size - 1 : SINKS : size], sinks).all():
            return 0
        ends = tags[BLOCK - 1 : sealed_tokens(len(tags) - 1) : BLOCK]
        return BLOCK * int(np.argmin(np.append(np.isin(ends, self.sealed[pages, -1]), False)))

    def execute(self, out: SchedulerOutput) -> ModelRunnerOutput:
        step = []
        order = list(out.num_scheduled_tokens.items())
        self.rng.shuffle(order)
        for rid, n in order:
            q = self.sequences[rid]
            # A prompt of one token is padded with drafts that nobody made.
            padding = [VOCAB] * len(out.scheduled_spec_decode_tokens.get(rid, ()))
            tokens = [*q.tokens, *q.drafts, *padding][: q.computed + n]
            assert len(tokens) == q.computed + n, f"request {rid} has too few tokens"
            q.drafts = tokens[len(q.tokens) :]
            del q.tags[q.computed :]
            step.append((rid, q, q.computed, tokens, q.tag(tokens)))
        self.writers: dict[int, str] = {}
        self.run([(rid, q.row, c, len(tokens), tags) for rid, q, c, tokens, tags in step])
        sampled = [self._sample(rid, q, len(tokens)) for rid, q, c, tokens, _ in step]
        ids = [rid for rid, *_ in step]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def run(self, requests: list[tuple[str, int, int, int, np.ndarray]]) -> None:
        """All store and seal before any attends."""
        for part in (self._store, self._seal, self._attend):
            for request in requests:
                part(*request)

    def _store(self, rid: str, row: int, c: int, t: int, tags: np.ndarray) -> None:
        size = self.s.page_tokens
        for p in range(c, t):
            if p < SINKS or p >= sealed_tokens(t):
                page = self.recent_table[row, p // size]
                assert page, f"request {rid} writes token {p} to the null page"
                assert self.writers.setdefault(page, rid) == rid, f"two requests write page {page}"
                self.recent[page, p % size] = tags[p]
                self.sealed[page] = POISON
        if t >= BLOCK:
            self.sinks.update(self.recent_table[row, : SINKS // size].tolist())

    def _seal(self, rid: str, row: int, c: int, t: int, tags: np.ndarray) -> None:
        size = self.s.page_tokens
        for start in range(sealed_before(c, self.recent_table[row], size), sealed_tokens(t), BLOCK):
            block = np.full(BLOCK, POISON)
            if start < c:
                pages = self.recent_table[row, start // size : -(-min(c, start + BLOCK) // size)]
                old = self.recent[pages].ravel()[: c - start]
                block[: len(old)] = old
            block[max(c - start, 0) :] = tags[max(start, c) : start + BLOCK]
            assert (block == tags[start : start + BLOCK]).all(), f"request {rid} seals wrong tokens"
            if start == 0:
                block[:SINKS] = block[SINKS]
            self.seals += 1
            page = self.sealed_table[row, start // BLOCK]
            assert page, f"request {rid} seals into the null page"
            assert self.writers.setdefault(page, rid) == rid, f"two requests write page {page}"
            before = self.sealed[page]
            assert (before == POISON).all() or (before == block).all(), "a sealed page changes"
            self.sealed[page] = block
            self.recent[page] = POISON

    def _attend(self, rid: str, row: int, c: int, t: int, tags: np.ndarray) -> None:
        """The context as in ``reference.context``; the step's own tokens are at hand."""
        size, recent = self.s.page_tokens, self.recent_table[row]
        end = sealed_before(c, recent, size)
        seen = np.full(c, POISON)
        seen[:end] = self.sealed[self.sealed_table[row, : end // BLOCK]].ravel()
        if end:
            seen[:SINKS] = self.recent[recent[: SINKS // size]].ravel()
        seen[end:] = self.recent[recent[end // size : -(-c // size)]].ravel()[: c - end]
        wrong = np.flatnonzero(seen != tags[:c]).tolist()
        assert not wrong, f"request {rid} with {c} tokens reads {len(wrong)} wrong: {wrong[:9]}"

    def _sample(self, rid: str, q: Sequence, t: int) -> list[int]:
        """Accept the right drafts, sample one token, draft anew."""
        known = len(q.tokens)
        q.computed = min(t, known)
        if t < known:
            return []
        sampled = []
        for draft in [*q.drafts, POISON]:
            token = next_token(rid, q.salt, q.tokens)
            q.tokens.append(token)
            sampled.append(token)
            if token != draft:
                break
            q.computed += 1
        right, ahead = self.rng.randint(0, self.s.drafts), list(q.tokens)
        for i in range(self.s.drafts):
            ahead.append(next_token(rid, q.salt, ahead) if i < right else VOCAB)
        q.drafts = ahead[len(q.tokens) :]
        return sampled


class Engine:
    """Scheduler and worker, in step or, if asynchronous, with the scheduler one step ahead."""

    def __init__(self, s: Settings, seed: int = 0) -> None:
        self.s = s
        config = make_config(s)
        self.kv_cache_config = make_kv_cache_config(config, s)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(self.kv_cache_config, config)
        init_none_hash(sha256)
        self.hasher = (
            get_request_block_hasher(hash_block_size, sha256) if s.prefix_caching else None
        )
        self.scheduler = (AsyncScheduler if s.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        self.stats = PageStats(self.scheduler, "")
        self.seals = 0
        self.worker = Worker(s, Random(seed))
        self.done: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}
        self.preemptions = 0
        self.counts: Counter[str] = Counter()
        self.peak: dict[str, int] = defaultdict(int)
        self._model: dict[str, set[int]] = {}
        self._sealed: dict[str, int] = {}
        self._pending: tuple[SchedulerOutput, ModelRunnerOutput] | None = None

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        salt: int = 0,
        logprobs: bool = False,
        priority: int = 0,
    ) -> str:
        """``logprobs``: of the prompt, for which vLLM reads no prefix from the cache."""
        rid = str(self.counts["requests"])
        self.counts["requests"] += 1
        params = SamplingParams(
            max_tokens=min(max_tokens, self.s.max_model_len - len(prompt)),
            ignore_eos=True,
            prompt_logprobs=1 if logprobs else None,
        )
        request = Request(
            request_id=rid,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            cache_salt=str(salt) if salt else None,
            block_hasher=self.hasher,
            arrival_time=float(rid),
            priority=priority,
        )
        self.scheduler.add_request(request)
        return rid

    @property
    def unfinished(self) -> list[str]:
        return list(self.scheduler.requests)

    def step(self) -> bool:
        """True if anything was scheduled or finished."""
        before = {rid: r.num_computed_tokens for rid, r in self.scheduler.requests.items()}
        out = self.scheduler.schedule()
        self.counts["steps"] += 1
        first = {d.req_id: d.num_computed_tokens for d in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        first |= {rid: computed[rid] for rid in cached.resumed_req_ids}
        self._check_pages(out, before, first)
        self.worker.update(out, self.scheduler.requests)
        self._check_hits(first)
        self.preemptions += len(out.preempted_req_ids or ())
        result = self.worker.execute(out) if out.total_num_scheduled_tokens else None
        ready = self._pending if self.s.asynchronous else None
        if result is not None:
            if self.s.asynchronous:
                self._pending = (out, result)
            else:
                ready = (out, result)
        elif self.s.asynchronous:
            self._pending = None
        if ready:
            self._finish_step(*ready)
        return bool(ready or result)

    def _finish_step(self, out: SchedulerOutput, result: ModelRunnerOutput) -> None:
        requests = dict(self.scheduler.requests)
        self.scheduler.update_from_output(out, result)
        if self.s.drafts and not self.s.asynchronous:
            sequences = self.worker.sequences
            ids = [rid for rid in out.num_scheduled_tokens if rid in sequences]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(ids, [list(sequences[rid].drafts) for rid in ids])
            )
        for rid, request in requests.items():
            if request.is_finished():
                self.done[rid] = list(request.all_token_ids)

    def abort(self, rid: str) -> None:
        if request := self.scheduler.requests.get(rid):
            self.counts["aborts"] += 1
            self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
            self.done[rid] = list(request.all_token_ids)

    def reset(self, running: bool = False) -> bool:
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        if done:
            self.counts["resets"] += 1
            self.worker.poison(slice(None))
        return done

    def happened(self) -> Counter[str]:
        """How much of what a schedule is made of came about."""
        told = {
            "preemptions": self.preemptions,
            "prefix hits": sum(hit > 0 for hit in self.hits.values()),
            "sealed pages": self.worker.seals,
        }
        return self.counts + Counter(told)

    def run(self, *ids: str) -> None:
        """Until these requests, or all, are done."""
        idle, limit = (
            0,
            100
            + 20
            * sum(r.num_prompt_tokens + r.max_tokens for r in self.scheduler.requests.values()),
        )
        while any(rid in self.scheduler.requests for rid in ids or self.unfinished):
            idle = 0 if self.step() else idle + 1
            limit -= 1
            assert idle < 3, "nothing is scheduled"
            assert limit, "no progress"

    def pages(self, rid: str) -> int:
        return sum(
            not block.is_null for m in self.managers for block in m.req_to_blocks.get(rid, ())
        )

    def leaked(self) -> int:
        """Pages missing from the pool once nothing runs."""
        return self.s.pool - self.block_pool.get_num_free_blocks()

    # The model of who owns which page: which tokens must have one, said in tokens.

    def _check_pages(
        self, out: SchedulerOutput, before: dict[str, int], first: dict[str, int]
    ) -> None:
        """``before``: computed tokens of each request; ``first``: hits of those that begin."""
        size, s = self.s.page_tokens, self.s
        for rid, n in out.num_scheduled_tokens.items():
            request = self.scheduler.requests[rid]
            c = first[rid] if rid in first else before[rid]
            t = c + n
            if rid in first:
                assert c % BLOCK == 0 and (not c or request.num_tokens - c > BLOCK), "hit"
                self.hits.setdefault(rid, c)
                self._sealed[rid] = c
                self._model[rid] = set(range(SINKS // size)) if c else set()
            held = self._model[rid]
            given_back = range(SINKS // size, sealed_tokens(c - s.drafts) // size)
            held.difference_update(given_back)
            held |= {p // size for p in range(c, t) if p < SINKS or p >= sealed_tokens(t)}
            self._sealed[rid] = max(self._sealed[rid], sealed_tokens(t))
            if not s.drafts:
                row = np.array([b.block_id for b in self.managers[1].req_to_blocks[rid]])
                end = sealed_before(c, row, size)
                window = {p // size for p in range(end, t) if p < c or p >= sealed_tokens(t)}
                sinks = set(range(min(SINKS, t) // size if t > SINKS else -(-t // size)))
                assert held == window | sinks, (c, t, held, window)
            sealed, recent = (m.req_to_blocks[rid] for m in self.managers)
            assert len(sealed) == self._sealed[rid] // BLOCK, "sealed pages"
            assert not any(b.is_null for b in sealed), "a sealed page is null"
            assert {i for i, b in enumerate(recent) if not b.is_null} == held, "recent pages"
            self.peak[rid] = max(self.peak[rid], self.pages(rid))
        owners: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for group, manager in enumerate(self.managers):
            for rid, blocks in manager.req_to_blocks.items():
                assert rid in self.scheduler.requests or not blocks, f"request {rid} is gone"
                for i, block in enumerate(blocks):
                    if not block.is_null:
                        owners[block.block_id].append((group, i, rid))
        for page, holders in owners.items():
            block = self.block_pool.blocks[page]
            assert block.ref_cnt == len(holders), f"page {page}: {block.ref_cnt} != {holders}"
            if len(holders) > 1:
                (group, i), *other = {h[:2] for h in holders}
                shared = block.block_hash is not None and (group == 0 or i < SINKS // size)
                assert shared and not other, f"page {page} is held by {holders}"
        assert len(owners) + self.block_pool.get_num_free_blocks() == s.pool, "pages in the pool"
        if not s.drafts:  # a draft that is rejected may leave a page to seal later, or never
            assert self.seals == self.worker.seals, "sealed pages in the metrics"
        told = self.stats.take()
        self.seals += told["seals"]
        of_group = [sum(holders[0][0] == g for holders in owners.values()) for g in (0, 1)]
        assert [told["sealed_pages"], told["recent_pages"]] == of_group, "pages in the metrics"
        if owners:
            tokens = BLOCK * of_group[0]
            for rid, blocks in self.managers[0].req_to_blocks.items():
                if rid in self.scheduler.requests:
                    computed = self.scheduler.requests[rid].num_computed_tokens
                    tokens += computed - BLOCK * len(blocks)
            assert np.isclose(
                told["density"] * sum(of_group) * head_page_bytes(128), tokens * 2 * 128 * 2
            ), "density in the metrics"

    def _check_hits(self, first: dict[str, int]) -> None:
        """A hit is no shorter than what lies in the pool; asynchronous, what a preempted request
        sealed in its last step lies there without a hash."""
        blocks = self.block_pool.blocks
        pages = np.array(
            [b.block_id for b in blocks if b.block_hash is not None or not self.s.asynchronous], int
        )
        for rid, hit in first.items():
            if not self.s.prefix_caching or self.scheduler.requests[rid].skip_reading_prefix_cache:
                assert not hit, "hit"
            elif not self.s.drafts:  # what drafts sealed is hashed one step later
                least = self.worker.hittable(self.worker.sequences[rid], pages)
                assert hit >= least, f"request {rid}: hit of {hit} tokens, {least} are there"


# Random schedules.


@dataclass(frozen=True)
class Schedule:
    settings: Settings
    ops: tuple[tuple, ...]
    """(name, *numbers); each is valid after any others, so a schedule can be cut short anywhere."""


def random_settings(rng: Random) -> Settings:
    """Pools from what one request may need, no page more, to five times that."""
    page_tokens = rng.choice((8, 16))
    max_model_len = rng.choice((40, 65, 130, 200, 256, 320, 450, 640))
    drafts = rng.choice((0, 0, 0, 1, 3, 5, 63))
    need = prefill_peak_pages(max_model_len, page_tokens, drafts)
    return Settings(
        page_tokens=page_tokens,
        max_model_len=max_model_len,
        pages=need + rng.choice((0, 0, 1, rng.randint(0, need), rng.randint(0, 4 * need))),
        max_num_batched_tokens=rng.choice((64, 65, 100, 128, 200, 256, 512)),
        max_num_seqs=rng.choice((1, 2, 3, 4, 8)),
        long_prefill_token_threshold=rng.choice((0, 0, 0, 17, 64, 90)),
        prefix_caching=rng.random() < 0.85,
        drafts=drafts,
        asynchronous=rng.random() < 0.4,
        policy=rng.choice(("fcfs", "fcfs", "priority")),
    )


def random_schedule(rng: Random) -> Schedule:
    settings = random_settings(rng)
    limit = settings.max_model_len
    ops: list[tuple] = []
    for _ in range(rng.randint(4, 40)):
        match rng.randrange(10):
            case 0 | 1 | 2:  # the arguments of Player.add
                ops.append((
                    "add", rng.randrange(3), rng.randint(1, limit - 1),
                    rng.choice((0, 0, 1, 30, 100)), rng.choice((1, 20, 70, 200, limit)),
                    rng.choice((1, 1, 1, 2, 3)), rng.choice((0, 0, 0, 1)),
                    rng.random() < 0.05, rng.randrange(3),
                ))  # fmt: skip
            case 3:
                ops.append(
                    ("next_turn", rng.randrange(8), rng.randint(1, 150), rng.randint(1, 150))
                )
            case 4:
                ops.append(("abort", rng.randrange(8)))
            case 5 if rng.random() < 0.3:
                ops.append(("reset", rng.random() < 0.5))
            case 6 if rng.random() < 0.3:
                ops.append(("run",))
            case _:
                ops.append(("step", rng.choice((1, 1, 2, 5, 20, 70, 130))))
    return Schedule(settings, tuple(ops))


class Player:
    """Plays the operations of a schedule; each raises if a page is wrong."""

    def __init__(self, settings: Settings) -> None:
        self.engine = Engine(settings)
        self.limit = settings.max_model_len
        self.salts: dict[str, int] = {}

    def add(
        self,
        number: int,
        family: int,
        length: int,
        tail: int,
        max_tokens: int,
        copies: int,
        salt: int,
        logprobs: bool,
        priority: int,
    ) -> None:
        """A prompt that begins as others of its family do and ends in a tail of its own. Copies are
        what vLLM makes of a request with n > 1."""
        shared = Random(family).choices(range(VOCAB), k=self.limit)[: max(length - tail, 0)]
        prompt = shared + tokens_of(number, length - len(shared))
        for _ in range(copies):
            self.salts[self.engine.add(prompt, max_tokens, salt, logprobs, priority)] = salt

    def next_turn(self, number: int, which: int, length: int, max_tokens: int) -> None:
        """A prompt that goes on after another's answer."""
        done = self.engine.done
        if done:
            before = list(done)[which % len(done)]
            prompt, salt = done[before] + tokens_of(number, length), self.salts[before]
            if len(prompt) < self.limit:
                self.salts[self.engine.add(prompt, max_tokens, salt)] = salt

    def abort(self, number: int, which: int) -> None:
        if rids := self.engine.unfinished:
            self.engine.abort(rids[which % len(rids)])

    def reset(self, number: int, running: bool) -> None:
        """The prefix cache; upstream miscounts drafts in flight if running requests lose theirs."""
        s = self.engine.s
        self.engine.reset(running and not (s.drafts and s.asynchronous))

    def run(self, number: int) -> None:
        self.engine.run()

    def step(self, number: int, times: int) -> None:
        for _ in range(times):
            if not self.engine.unfinished:
                break
            self.engine.step()

    def end(self) -> Engine:
        """Raises if a page leaks."""
        self.engine.run()
        self.engine.step()
        assert not self.engine.leaked(), f"{self.engine.leaked()} pages leaked"
        return self.engine


def tokens_of(number: int, count: int) -> list[int]:
    """Of an operation, which no other has."""
    return Random(number + 10).choices(range(VOCAB), k=count)


def play(schedule: Schedule) -> Engine:
    """Raises if a page is wrong or leaks."""
    player = Player(schedule.settings)
    for number, (name, *args) in enumerate(schedule.ops):
        getattr(player, name)(number, *args)
    return player.end()


def failure(schedule: Schedule) -> str:
    try:
        play(schedule)
    except Exception as error:
        return repr(error)
    return ""


def shrink(schedule: Schedule) -> Schedule:
    """Drop what this kind of failure does not need."""

    def kind(schedule: Schedule) -> str:
        return re.sub(r"\d+", "", failure(schedule))

    size, same = len(schedule.ops), kind(schedule)
    while size:
        i = 0
        while i < len(schedule.ops):
            less = replace(schedule, ops=schedule.ops[:i] + schedule.ops[i + size :])
            if kind(less) == same:
                schedule = less
            else:
                i += size
        size //= 2
    return schedule
