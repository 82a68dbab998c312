"""The workers' side of page tags: before attention reads or writes a page, its tag is compared
with the one that the request expects.

A request with a wrong page gets a block table of null pages for the step: it neither reads nor
writes what is another's. What it computes is thrown away by the scheduler (``page_faults.py``).
Nothing waits for the device: what was found comes to the host with the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from s4kv_ext import settings
from s4kv_ext.format import SINKS, sealed_tokens
from s4kv_ext.page_faults import Mismatch, Mismatches, StepTags, computed_tokens
from s4kv_ext.specs import RecentSpec, SealedSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_worker import Worker

OUTSIDE, NO_TAG = -1, -2  # of a page that is not in the pool; of a request that is not known


def wrong_pages(
    tags: Tensor, expected: Tensor, table: Tensor, first: Tensor, end: Tensor, always: int = 0
) -> Tensor:
    """The first wrong entry of each row of a block table.

    tags [pages] int32: of each page, as they are. expected [R, width] int32: of each entry of the
    table [R, width], of any integer dtype. first, end [R]: the columns that are needed, beside
    the leftmost ``always`` ones.
    Returns [R, 4] int32: 1, page, expected, found; or 0 and whatever. Reads ``tags`` within bounds
    whatever the table holds.
    """
    page = table.long()
    inside = (page >= 0) & (page < len(tags))
    found = torch.where(inside, tags[page.clamp(0, len(tags) - 1)], OUTSIDE)
    column = torch.arange(table.shape[1], device=table.device)
    needed = (column < end[:, None]) & ((column >= first[:, None]) | (column < always))
    wrong = needed & (found != expected)
    at = wrong.int().argmax(1, keepdim=True)
    entry = [wrong.int(), page.int(), expected, found]
    return torch.cat([x.gather(1, at) for x in entry], 1)


@dataclass
class _Known:
    """A request: its row of expected tags, how many pages of each group it was given, and of the
    recent ones, where those begin that it has not given back. Tokens that were computed may be
    taken back, pages are not."""

    row: int
    held: list[int]
    first: int = 0


class PageCheck:
    """Of one worker.

    num_pages: in the pool, with the null page. max_requests: how many run at once. widths: how many
    pages of each group, sealed and recent, a request may have. page_tokens: in a recent page.
    drafts: tokens that a step may take back. group: of the ranks that must agree, if there are any.
    """

    def __init__(
        self,
        num_pages: int,
        max_requests: int,
        widths: Sequence[int],
        page_tokens: int,
        drafts: int,
        device: torch.device,
        group: Any = None,
    ) -> None:
        self.page_tokens, self.drafts, self.device, self.group = page_tokens, drafts, device, group
        self.tags = torch.zeros(num_pages, dtype=torch.int32, device=device)
        # Row 0 is for a request that is not known.
        shape = max_requests + 1
        self.expected = [torch.full((shape, w), NO_TAG, device=device).int() for w in widths]
        self._free_rows = list(range(1, shape))
        self._known: dict[str, _Known] = {}
        self._step: SchedulerOutput | None = None
        self._found: _Found | None = None

    def begin(self, out: SchedulerOutput) -> None:
        """Take in what a step brings."""
        new: Any = out.kv_connector_metadata
        assert isinstance(new, StepTags), "a step without page tags"
        self._step = out if out.total_num_scheduled_tokens else None
        for rid in out.finished_req_ids | (out.preempted_req_ids or set()):
            if request := self._known.pop(rid, None):
                self._free_rows.append(request.row)
        for rid in new.begun:
            row = self._known[rid].row if rid in self._known else self._new_row()
            self._known[rid] = _Known(row, [0, 0])
        if new.given:
            page, tag = self._to_device([list(new.given), list(new.given.values())])
            self.tags[page] = tag.int()
        for group, expected in enumerate(self.expected):
            entries: list[list[int]] = [[], [], []]
            for rid, of_groups in (*new.begun.items(), *new.more.items()):
                request, more = self._known[rid], of_groups[group]
                start = request.held[group]
                request.held[group] += len(more)
                entries[0] += [request.row] * len(more)
                entries[1] += range(start, request.held[group])
                entries[2] += more
            if entries[0]:
                row, column, tag = self._to_device(entries)
                expected[row, column] = tag.int()

    def _new_row(self) -> int:
        if not self._free_rows:  # requests that a reset of the prefix cache sent back to wait
            rows = len(self.expected[0])
            self.expected = [torch.cat([e, torch.full_like(e, NO_TAG)]) for e in self.expected]
            self._free_rows += range(rows, 2 * rows)
        return self._free_rows.pop()

    def _to_device(self, lists: list[list[int]]) -> Tensor:
        t = torch.tensor(lists)
        return t if self.device.type == "cpu" else t.pin_memory().to(self.device, non_blocking=True)

    def run(self, req_ids: Sequence[str], tables: Sequence[Tensor]) -> None:
        """Before a forward pass; tables: of each group, a row for each request in this order.
        Turns the rows of requests with a wrong page into null pages."""
        if self._step is None:  # a dummy run
            return
        computed = computed_tokens(self._step)
        self._step = None
        nobody = _Known(0, [1, 0])
        rows = []
        for rid in req_ids:
            r = self._known.get(rid, nobody)
            first = sealed_tokens(computed.get(rid, 0) - self.drafts) // self.page_tokens
            r.first = max(r.first, first)
            rows.append([r.row, r.held[0], r.first, r.held[1]])
        row, sealed, start, recent = self._to_device([list(x) for x in zip(*rows, strict=True)])
        found = []
        for i, (first, end) in enumerate(((torch.zeros_like(row), sealed), (start, recent))):
            width = max(1, *(x[1 + 2 * i] for x in rows))
            table = tables[i][: len(rows), :width]
            expected = self.expected[i][row, :width]
            sinks = SINKS // self.page_tokens if i else 0
            found.append(wrong_pages(self.tags, expected, table, first, end, sinks))
        wrong = torch.where(found[0][:, :1] != 0, *found)
        if self.group is not None:
            torch.distributed.all_reduce(wrong, torch.distributed.ReduceOp.MAX, self.group)
        for table in tables:
            table[: len(rows)].masked_fill_(wrong[:, :1] != 0, 0)
        self._found = _Found(list(req_ids), wrong)

    def deliver(self, output: Any) -> Any:
        """What a worker returns of a step, with what was found in it."""
        if self._found is None or not isinstance(
            output, ModelRunnerOutput | AsyncModelRunnerOutput
        ):
            return output
        found, self._found = self._found, None
        if isinstance(output, ModelRunnerOutput):
            return found.add_to(output)
        return _AsyncOutput(output, found)


class _Found:
    """On its way to the host."""

    def __init__(self, req_ids: list[str], wrong: Tensor) -> None:
        self.req_ids, self.wrong = req_ids, wrong.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event() if wrong.is_cuda else None
        if self.event:
            self.event.record()

    def add_to(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if self.event:
            self.event.synchronize()
        rows = zip(self.req_ids, self.wrong.tolist(), strict=True)
        if found := {rid: Mismatch(*entry) for rid, (is_wrong, *entry) in rows if is_wrong}:
            output.kv_connector_output = Mismatches(found)
        return output


@dataclass
class _AsyncOutput(AsyncModelRunnerOutput):
    output: AsyncModelRunnerOutput
    found: _Found

    def get_output(self) -> ModelRunnerOutput:
        return self.found.add_to(self.output.get_output())


def install(worker: Worker, kv_cache_config: KVCacheConfig) -> None:
    """Have a worker check the pages of every step, unless the user does not want it."""
    if not settings.page_tags(worker.vllm_config):
        return
    runner: Any = worker.model_runner
    specs = [g.kv_cache_spec for g in kv_cache_config.kv_cache_groups]
    order = [[type(s) for s in specs].index(kind) for kind in (SealedSpec, RecentSpec)]
    recent: Any = specs[order[1]]
    second = worker.use_v2_model_runner  # the two model runners have little in common

    def tables() -> list[Tensor]:
        """Where attention reads them, sealed and recent."""
        if second:
            return [runner.block_tables.input_block_tables[i] for i in order]
        return [runner.input_batch.block_table.block_tables[i].block_table.gpu for i in order]

    check = PageCheck(
        kv_cache_config.num_blocks,
        worker.scheduler_config.max_num_seqs,
        [t.shape[1] for t in tables()],
        recent.block_size,
        recent.speculative_tokens,
        worker.device,
        _ranks(),
    )
    _before(worker, "execute_model", lambda out: check.begin(out))
    for name in ("execute_model", "sample_tokens"):
        _after(worker, name, lambda output, *_: check.deliver(output))
    if second:

        def gathered(result: Any, input_batch: Any) -> Any:
            check.run(input_batch.req_ids, tables())
            return result

        _after(runner, "prepare_attn", gathered)
    else:
        _before(
            runner,
            "_build_attention_metadata",
            lambda *_, **__: check.run(runner.input_batch.req_ids, tables()),
        )


def _ranks() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().device_group if get_tp_group().world_size > 1 else None


def _before(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """``hook`` gets the result and the arguments, and returns what takes the result's place."""
    method = getattr(owner, name)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(method(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, wrapped)
