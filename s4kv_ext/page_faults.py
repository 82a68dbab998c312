"""The scheduler's side of page tags: each step tells the workers what is new, and the requests of
which a worker finds a wrong page are ended before a token leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from s4kv_ext import page_tags, settings
from s4kv_ext.format import SINKS, sealed_tokens
from s4kv_ext.managers import RecentManager, SealedManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput


@dataclass
class StepTags:
    """What a step brings that is new; travels to the workers with the step."""

    given: dict[int, int]
    """Page to tag, of pages given out since the step before."""
    begun: dict[str, list[list[int]]]
    """By request, of those that begin or resume: the tags of all its pages, sealed and recent."""
    more: dict[str, list[list[int]]]
    """By request, of those that go on: the tags of the pages that are new to it."""


@dataclass
class Mismatch:
    page: int
    expected: int
    found: int


@dataclass
class Mismatches:
    """The first wrong page of each request that has one; travels back with the step's tokens."""

    by_request: dict[str, Mismatch]


def computed_tokens(out: SchedulerOutput) -> dict[str, int]:
    """Of each request of a step, before it."""
    cached = out.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}


def watch(core: EngineCore) -> None:
    """Called once an engine core has its scheduler."""
    if settings.page_tags(core.vllm_config):
        core.scheduler.page_faults = PageFaults(core.scheduler)


class PageFaults:
    """Of one scheduler. Tags and findings travel in the fields of a KV connector: they are passed
    on unread, and there are no connectors with int4_kivi."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        manager = scheduler.kv_cache_manager
        by_type: dict[Any, Any] = {type(m): m for m in manager.coordinator.single_type_managers}
        self.sealed: SealedManager = by_type[SealedManager]
        self.recent: RecentManager = by_type[RecentManager]
        self.managers = (self.sealed, self.recent)
        self.pool = manager.block_pool
        self.tags = page_tags.of(self.pool)
        self.count = 0
        """Requests ended so far."""
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        scheduler.schedule = self.schedule
        scheduler.update_from_output = self.update

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for manager in self.managers:
            manager.tags.forget_released()
        out = self._schedule(*args, **kwargs)
        out.kv_connector_metadata = self.step_tags(out)
        return out

    def step_tags(self, out: SchedulerOutput) -> StepTags:
        cached = out.scheduled_cached_reqs
        begun = {new.req_id for new in out.scheduled_new_reqs} | cached.resumed_req_ids
        more = {}
        for rid, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is not None and rid not in begun:
                expected = [m.tags.expected[rid] for m in self.managers]
                counts = [len(new[m.kv_cache_group_id]) for m in self.managers]
                more[rid] = [e[len(e) - n :] for e, n in zip(expected, counts, strict=True)]
        return StepTags(
            self.tags.take_given(),
            {rid: [list(m.tags.expected[rid]) for m in self.managers] for rid in begun},
            more,
        )

    def update(
        self, out: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        found: Any = result.kv_connector_output
        if not isinstance(found, Mismatches):
            return self._update(out, result)
        from vllm.v1.engine import EngineCoreOutputs

        result.kv_connector_output = None
        concerned, unwritten = self.concerned(out, found.by_request)
        self.count += len(self.scheduler.requests.keys() & concerned)
        for rid in concerned:
            if (i := result.req_id_to_index.get(rid)) is not None and result.sampled_token_ids:
                result.sampled_token_ids[i] = []
            result.prompt_logprobs_dict.pop(rid, None)
        outputs = self._update(out, result)
        self.pool.evict_blocks(unwritten)
        for rid, mismatch in concerned.items():
            if request := self.scheduler.requests.get(rid):
                of_client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
                of_client.outputs.append(self.end(rid, mismatch))
        return outputs

    def end(self, rid: str, mismatch: Mismatch) -> EngineCoreOutput:
        """End a request, with an error to its client."""
        from vllm.logger import init_logger
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.request import RequestStatus

        init_logger("vllm.s4kv_ext").error(
            "%s: request %s, page %d, expected tag %d, found %d; the request is ended",
            *(page_tags.WHAT, rid, mismatch.page, mismatch.expected, mismatch.found),
        )
        request = self.scheduler.requests[rid]
        self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ERROR)
        return EngineCoreOutput(
            request_id=rid,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=f"{page_tags.WHAT}; send the request again",
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )

    def concerned(
        self, out: SchedulerOutput, found: dict[str, Mismatch]
    ) -> tuple[dict[str, Mismatch], set[int]]:
        """The requests to end: those that were found, and those that share a page which such a one
        was to write in this step; and the pages that must leave the prefix cache."""
        computed = computed_tokens(out)
        # A worker that runs a request which is long finished names one that is not in the step.
        todo = [(rid, computed[rid], found[rid]) for rid in found if rid in computed]
        result: dict[str, Mismatch] = {}
        pages = {m.page for m in found.values() if 0 < m.page < self.pool.num_gpu_blocks}
        while todo:
            rid, tokens, mismatch = todo.pop()
            if rid in result:
                continue
            result[rid] = mismatch
            unwritten = self.written_from(rid, tokens)
            pages |= unwritten
            for manager in self.managers:
                for other, blocks in manager.req_to_blocks.items():
                    for i, block in enumerate(blocks):
                        if block.block_id in unwritten:
                            page = Mismatch(block.block_id, mismatch.expected, mismatch.found)
                            todo.append((other, i * manager.block_size, page))
                            break
        return result, pages

    def written_from(self, rid: str, computed: int) -> set[int]:
        """The request's own pages that are written in a step which begins with so many computed
        tokens, or later; a few of them perhaps before."""
        computed -= self.recent.kv_cache_spec.speculative_tokens  # may turn out to be rejected
        sealed = sealed_tokens(computed)
        recent = max(0, computed) if computed < SINKS else sealed
        pages: set[int] = set()
        for manager, begin in ((self.sealed, sealed), (self.recent, recent)):
            held = manager.tags.held(rid, manager.req_to_blocks.get(rid))
            first = max(begin // manager.block_size, held.num_hit)
            pages |= {
                block.block_id
                for block, tag in list(zip(held.blocks, held.tags))[first:]
                if not block.is_null and manager.tags.same(block, tag)
            }
        return pages
