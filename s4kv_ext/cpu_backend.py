"""int4_kivi on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder

from s4kv_ext import cpu_ops
from s4kv_ext.impl import Int4KiviImpl
from s4kv_ext.reference import Step

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class Metadata:
    """One group's share of a ``reference.Step``."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


class Builder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        m = common_attn_metadata
        return Metadata(m.query_start_loc, m.seq_lens, m.block_table_tensor)


RecentBuilder = Builder


class Impl(Int4KiviImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cpu_ops.load()

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
        step = Step(m.query_start_loc, m.seq_lens, m.block_table, recent_table)
        channels = self.slot_channel
        assert channels is not None
        cpu_ops.store_and_seal(key, value, sealed, recent, step, channels)
        cpu_ops.attend(query, key, value, sealed, recent, step, channels, self.scale, output)

    def causal_attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        cpu_ops.causal_attend(query, key, value, self.scale, output)
