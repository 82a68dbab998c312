"""int4_kivi on NVIDIA GPUs.

Requests of few new tokens are decoded by our kernel, inside full CUDA graphs. Longer ones attend
to their own tokens through FlashAttention and to their context, dequantised piece by piece into
a workspace of fixed size, the same way; the parts are merged by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from s4kv_ext import cuda_ops
from s4kv_ext.format import BLOCK
from s4kv_ext.impl import Int4KiviImpl

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

WORKSPACE_BYTES = 64 << 20  # keys and values of 16384 tokens of a 7B model


@dataclass
class Round:
    """One filling of the workspace: tokens start[i] … of request i go to rows rows[i] … rows[i+1].

    start [R], rows [R + 1], int32 on the device; keys: rows of the prefill requests alone, [P + 1].
    """

    start: Tensor
    rows: Tensor
    keys: Tensor
    max_keys: int


@dataclass
class Prefill:
    """The requests with many new tokens; they come last in a batch."""

    first_row: int
    query_start_loc: Tensor
    max_queries: int
    rounds: list[Round]


@dataclass
class Metadata:
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_tokens: int
    num_decodes: int
    prefill: Prefill | None


@dataclass
class RecentMetadata:
    block_table: Tensor


def max_decode_queries(config: VllmConfig) -> int:
    """New tokens a request may have and still be decoded: one, and the drafts."""
    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    return min(1 + drafts, cuda_ops.MAX_QUERIES)


def workspace_tokens(num_kv_heads: int, head_size: int) -> int:
    return WORKSPACE_BYTES // (2 * 2 * num_kv_heads * head_size) // BLOCK * BLOCK


def fill(computed: list[int], room: int) -> list[list[tuple[int, int]]]:
    """Cut contexts of ``computed`` tokens into rounds of at most ``room`` tokens.

    A round has (start, tokens) of every request; starts are multiples of BLOCK.
    """
    done = [0] * len(computed)
    rounds = []
    while done != computed:
        left, this = room, []
        for i, total in enumerate(computed):
            take = min(total - done[i], left)
            if take < total - done[i]:
                take = take // BLOCK * BLOCK
            this.append((done[i], take))
            done[i] += take
            left -= take
        rounds.append(this)
    return rounds


class _Builder(AttentionMetadataBuilder[Any]):
    """What both groups must agree on: which graphs there are, and what counts as a decode."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reorder_batch_threshold = max_decode_queries(self.vllm_config)


class Builder(_Builder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        from vllm.v1.attention.backends.utils import split_decodes_and_prefills

        m = common_attn_metadata
        assert self.reorder_batch_threshold is not None
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
            m, self.reorder_batch_threshold
        )
        prefill = self._prefill(m, decodes, decode_tokens) if prefills else None
        return Metadata(
            m.query_start_loc,
            m.seq_lens,
            m.block_table_tensor,
            m.num_actual_tokens,
            decodes,
            prefill,
        )

    def _prefill(self, m: CommonAttentionMetadata, decodes: int, first_row: int) -> Prefill:
        start = m.query_start_loc_cpu[decodes : m.num_reqs + 1]
        queries = start.diff()
        assert m.seq_lens_cpu_upper_bound is not None  # exact for a request that is prefilling
        computed = (m.seq_lens_cpu_upper_bound[decodes : m.num_reqs] - queries).tolist()
        room = workspace_tokens(self.kv_cache_spec.num_kv_heads, self.kv_cache_spec.head_size)
        rounds = fill(computed, room)
        n = m.num_reqs
        host = torch.zeros(1 + len(rounds), 2 * n + 1, dtype=torch.int32, pin_memory=True)
        host[0, : len(start)] = start - first_row
        for row, this in zip(host[1:], rounds, strict=True):
            for i, (at, take) in enumerate(this):
                row[decodes + i] = at
                row[n + decodes + i + 1] = take
            row[n:] = row[n:].cumsum(0)
        device = host.to(m.query_start_loc.device, non_blocking=True)
        return Prefill(
            first_row,
            device[0, : len(start)],
            int(queries.max()),
            [
                Round(row[:n], row[n:], row[n + decodes :], max(take for _, take in this))
                for row, this in zip(device[1:], rounds, strict=True)
            ],
        )


class RecentBuilder(_Builder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RecentMetadata:
        return RecentMetadata(common_attn_metadata.block_table_tensor)


class Impl(Int4KiviImpl):
    plan: cuda_ops.StepPlan
    plans_step: bool
    decode_queries: int
    workspace: Tensor

    @classmethod
    def prepare(cls, impls: list[Int4KiviImpl], config: VllmConfig, device: torch.device) -> None:
        cuda_ops.load()
        first = impls[0]
        shape = cuda_ops.decode_shape_for(
            device,
            first.num_kv_heads,
            first.num_heads // first.num_kv_heads,
            first.head_size,
            max_decode_queries(config),
        )
        scheduler = config.scheduler_config
        plan = cuda_ops.StepPlan(
            shape, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, device
        )
        tokens = workspace_tokens(first.num_kv_heads, first.head_size)
        workspace = torch.empty(
            (2, tokens, first.num_kv_heads, first.head_size),
            dtype=config.model_config.dtype,
            device=device,
        )
        for impl in impls:
            assert isinstance(impl, Impl)
            # The first layer plans for all. It does so in the forward pass, so that a full graph
            # plans anew, from the lengths and tables on the device, each time it is replayed.
            impl.plan, impl.workspace, impl.plans_step = plan, workspace, impl is first
            impl.decode_queries = max_decode_queries(config)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sealed: Tensor,
        recent: Tensor,
        metadata: Metadata,
        recent_table: Tensor,
        output: Tensor,
    ) -> None:
        m = metadata
        assert self.slot_channel is not None
        if self.plans_step:
            tables = (m.query_start_loc, m.seq_lens, m.block_table, recent_table)
            self.plan.update(*tables, m.num_tokens, self.decode_queries)
        pages = cuda_ops.Pages(sealed, recent, self.slot_channel)
        cuda_ops.store_and_seal(self.plan, key, value, pages)
        if m.num_decodes:
            cuda_ops.decode(self.plan, query, output, pages, self.scale, overlap=True)
        if m.prefill:
            self._prefill(query, key, value, pages, m.prefill, m.num_tokens, output)

    def _prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: cuda_ops.Pages,
        prefill: Prefill,
        num_tokens: int,
        output: Tensor,
    ) -> None:
        rows = slice(prefill.first_row, num_tokens)
        q, out = query[rows], output[rows]
        starts, longest = prefill.query_start_loc, prefill.max_queries
        if not prefill.rounds:
            _flash(
                q, key[rows], value[rows], starts, starts, longest, longest, self.scale, True, out
            )
            return
        part, lse = _flash(
            q, key[rows], value[rows], starts, starts, longest, longest, self.scale, True
        )
        k, v = self.workspace
        for i, r in enumerate(prefill.rounds):
            cuda_ops.dequant_context(self.plan, pages, r.start, r.rows, k, v)
            more, more_lse = _flash(q, k, v, starts, r.keys, longest, r.max_keys, self.scale, False)
            last = i == len(prefill.rounds) - 1
            part, lse = _merge(part, lse, more, more_lse, out if last else None)

    def causal_attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        n = len(query)
        starts = torch.tensor([0, n], dtype=torch.int32, device=query.device)
        _flash(query, key, value, starts, starts, n, n, self.scale, True, output)

    def profile(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        n = len(query)
        starts = torch.tensor([0, n], dtype=torch.int32, device=query.device)
        a = _flash(query, key, value, starts, starts, n, n, self.scale, True)
        b = _flash(query, key, value, starts, starts, n, n, self.scale, False)
        _merge(*a, *b, output)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention over packed sequences: output [T, heads, D], log-sum-exp [heads, T]."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    return flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=max_q,
        cu_seqlens_q=q_starts,
        max_seqlen_k=max_k,
        cu_seqlens_k=k_starts,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        out=out,
        fa_version=get_flash_attn_version(),
    )


def _merge(
    a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both parts; into ``out`` if given."""
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    out = torch.empty_like(a) if out is None else out
    lse = torch.empty_like(a_lse)
    merge_attn_states(out, b, b_lse, a, a_lse, output_lse=lse)
    return out, lse
