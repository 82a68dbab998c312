"""The workers' side of page tags: before attention reads or writes a page, its tag is compared
with the one that the request expects.

A request with a wrong page gets a block table of null pages for the step: it neither reads nor
writes what is another's. What it computes is thrown away by the scheduler (``page_faults.py``).
Nothing waits for the device: what was found comes to the host with the step's tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from s4kv_ext import cpu_ops, cuda_ops, settings
from s4kv_ext.page_faults import Mismatch, Mismatches, StepTags, computed_tokens
from s4kv_ext.specs import RecentSpec, SealedSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_worker import Worker

STEPS_AHEAD = 4  # more than are ever launched and not yet delivered
NO_TAG = -2  # what is expected of a page that a request was not given


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
        self.num_pages, self.widths = num_pages, tuple(widths)
        self.page_tokens, self.drafts, self.device, self.group = page_tokens, drafts, device, group
        self._ops: Any = cpu_ops if device.type == "cpu" else cuda_ops
        self._ops.load()
        rows = max_requests + 1
        cells = num_pages + rows * sum(widths)
        self._cells = torch.full((cells,), NO_TAG, dtype=torch.int32, device=device)
        self._cells[:num_pages] = 0
        # Of each row: its number, sealed pages given, most tokens computed, recent pages given.
        # Tokens that were computed may be taken back, pages that were given back are not.
        self._rows = np.zeros((rows, 4), np.int32)
        self._rows[:, 0] = range(rows)
        self._rows[0, 1] = 1  # for requests that are not known: a page that nobody was given
        self._free_rows = list(range(1, rows))
        self._known: dict[str, int] = {}
        self._new: dict[int, int] = {}
        """Cell to tag, since the last comparison."""
        self._tags_came = False
        self._step: SchedulerOutput | None = None
        self._found: _Found | None = None
        self._in_reach: deque[tuple[Tensor, Tensor]] = deque(maxlen=STEPS_AHEAD)

    def begin(self, out: SchedulerOutput) -> None:
        """Take in what a step brings."""
        new: Any = out.kv_connector_metadata
        if new is None and not self._tags_came:  # the runner warms up, without a scheduler
            return
        assert isinstance(new, StepTags), "a step without page tags"
        self._tags_came = True
        self._step = out if out.total_num_scheduled_tokens else None
        for rid in out.finished_req_ids | (out.preempted_req_ids or set()):
            if row := self._known.pop(rid, None):
                self._free_rows.append(row)
        self._new.update(new.given)
        for rid, tags in new.begun.items():
            row = self._known[rid] = self._known.get(rid) or self._new_row()
            self._rows[row, 1:] = 0
            self._expect(row, tags)
        for rid, tags in new.more.items():
            self._expect(self._known[rid], tags)

    def _new_row(self) -> int:
        if not self._free_rows:  # requests that a reset of the prefix cache sent back to wait
            rows = len(self._rows)
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
            self._rows[:, 0] = range(2 * rows)
            expected = self._cells[self.num_pages :]
            self._cells = torch.cat((self._cells, torch.full_like(expected, NO_TAG)))
            self._free_rows += range(rows, 2 * rows)
        return self._free_rows.pop()

    def _expect(self, row: int, tags: list[list[int]]) -> None:
        """A request was given pages of these tags, sealed and recent."""
        first = self.num_pages + row * sum(self.widths)
        for column, width, more in zip((1, 3), self.widths, tags, strict=True):
            held = int(self._rows[row, column])
            end = held + len(more)
            assert end <= width, f"{end} pages in a block table of {width}"
            self._new.update(zip(range(first + held, first + end), more, strict=True))
            self._rows[row, column] = end
            first += width

    def run(self, req_ids: Sequence[str], tables: Sequence[Tensor]) -> None:
        """Before a forward pass; tables: of each group, a row for each request in this order.
        Turns the rows of requests with a wrong page into null pages."""
        if self._step is None:  # a dummy run
            return
        computed = computed_tokens(self._step)
        self._step = None
        rows = self._rows[[self._known.get(rid, 0) for rid in req_ids]]
        tokens = np.array([computed.get(rid, 0) for rid in req_ids], np.int32) - self.drafts
        self._rows[rows[:, 0], 2] = rows[:, 2] = np.maximum(rows[:, 2], tokens)
        new = np.array([*self._new.items()], np.int32)
        self._new.clear()
        step = torch.from_numpy(np.concatenate((rows.ravel(), new.ravel())))
        pinned = self.device.type != "cpu"
        if pinned:  # the kernel reads it there, and writes there what it finds
            step = step.pin_memory()
        wrong = torch.empty((len(rows), 4), dtype=torch.int32, pin_memory=pinned)
        alone = self.group is None
        of_ranks = wrong if alone else torch.empty_like(wrong, device=self.device)
        self._ops.check_pages(
            self._cells, self.num_pages, step, *tables, self.page_tokens, alone, of_ranks
        )
        if not alone:
            torch.distributed.all_reduce(of_ranks, torch.distributed.ReduceOp.MAX, self.group)
            for table in tables:
                table[: len(rows)].masked_fill_(of_ranks[:, :1] != 0, 0)
            wrong.copy_(of_ranks, non_blocking=True)
        self._found = _Found(list(req_ids), wrong, torch.cuda.Event() if pinned else None)
        self._in_reach.append((step, wrong))

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

    def __init__(self, req_ids: list[str], wrong: Tensor, event: torch.cuda.Event | None) -> None:
        self.req_ids, self.wrong, self.event = req_ids, wrong, event
        if event:
            event.record()

    def add_to(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if self.event:
            self.event.synchronize()
        wrong = self.wrong.numpy()
        if wrong.any():
            rows = zip(self.req_ids, wrong.tolist(), strict=True)
            found = {rid: Mismatch(*entry) for rid, (is_wrong, *entry) in rows if is_wrong}
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
