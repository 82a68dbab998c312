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
from s4kv_ext.context_rounds import Round, rounds
from s4kv_ext.format import BLOCK
from s4kv_ext.impl import Int4KiviImpl

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

# Dequantised keys and values: of 16384 tokens of a 7B model, four times that on the largest GPUs.
WORKSPACE_BYTES = (64 << 20, 256 << 20)


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
    draft = config.speculative_config
    return 1 + (draft.num_speculative_tokens if draft else 0)


def workspace_bytes(total_memory: int) -> int:
    """Of a GPU with so many bytes."""
    least, most = WORKSPACE_BYTES
    return min(max(least, total_memory // 512), most)


def workspace_tokens(num_kv_heads: int, head_size: int, device: torch.device) -> int:
    nbytes = workspace_bytes(torch.cuda.get_device_properties(device).total_memory)
    return nbytes // (2 * 2 * num_kv_heads * head_size) // BLOCK * BLOCK


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
        spec, gpu = self.kv_cache_spec, m.query_start_loc.device
        room = workspace_tokens(spec.num_kv_heads, spec.head_size, gpu)
        relative = start - first_row
        return Prefill(
            first_row,
            relative.to(torch.int32).pin_memory().to(gpu, non_blocking=True),
            int(queries.max()),
            rounds(decodes, relative, computed, room, gpu),
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
        tokens = workspace_tokens(first.num_kv_heads, first.head_size, device)
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
            cuda_ops.decode(self.plan, query, output, pages, self.scale)
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
        _, lse = _flash(
            q, key[rows], value[rows], starts, starts, longest, longest, self.scale, True, out
        )
        k, v = self.workspace
        for r in prefill.rounds:
            t = r.tokens
            cuda_ops.dequant_context(self.plan, pages, r.start, r.rows, k, v)
            more = _flash(
                q[t], k, v, r.query_start_loc, r.keys, r.max_queries, r.max_keys, self.scale, False
            )
            lse[:, t] = _merge(out[t], lse[:, t].contiguous(), *more)

    def causal_attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        n = len(query)
        starts = torch.tensor([0, n], dtype=torch.int32, device=query.device)
        _flash(query, key, value, starts, starts, n, n, self.scale, True, output)

    def profile(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        n = len(query)
        starts = torch.tensor([0, n], dtype=torch.int32, device=query.device)
        _, lse = _flash(query, key, value, starts, starts, n, n, self.scale, True, output)
        _merge(output, lse, *_flash(query, key, value, starts, starts, n, n, self.scale, False))


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


def _merge(out: Tensor, out_lse: Tensor, more: Tensor, more_lse: Tensor) -> Tensor:
    """``out`` becomes the attention over the keys of both parts; returns its log-sum-exp."""
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    lse = torch.empty_like(out_lse)
    merge_attn_states(out, more, more_lse, out, out_lse, output_lse=lse)
    return lse
