"""Who owns which page: the scheduler's side of the two groups.

The sealed group holds blocks for sealed tokens only. The recent group holds the sink pages for
the life of a request, and pages for the tokens from the sealed boundary on; a page whose tokens
are sealed by the very step that brings them is never taken: its entry is the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from s4kv_ext.format import sealed_tokens
from s4kv_ext.page_tags import RequestTags

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

    from s4kv_ext.specs import RecentSpec


class SealedManager(FullAttentionManager):
    """A full-attention manager that is told the sealed length instead of the computed one."""

    num_taken = 0
    """Pages ever taken to be sealed; one that was found in the prefix cache was sealed before."""
    num_held = 0
    """Pages that requests hold, a shared one counted for each."""

    def __init__(self, kv_cache_spec: KVCacheSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.tags = RequestTags(self.block_pool)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        return super().get_num_blocks_to_allocate(
            request_id, sealed_tokens(num_tokens), *args, **kwargs
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        new = super().allocate_new_blocks(
            request_id, sealed_tokens(num_tokens), num_tokens_main_model
        )
        if new:  # one step in BLOCK
            self.num_taken += len(new)
            self.num_held += len(new)
            self.tags.take(request_id, new)
        return new

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any
    ) -> None:
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args)
        self.num_held += len(new_computed_blocks)
        self.tags.hit(request_id, new_computed_blocks)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        self.num_held -= len(blocks)
        return self.tags.release(request_id, blocks, self._null_block)

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        rid = request.request_id
        before = self.num_cached_block.get(rid, 0)
        super().cache_blocks(request, sealed_tokens(num_tokens), retention_interval)
        after = self.num_cached_block.get(rid, 0)
        if after > before:
            self.tags.cache(rid, self.req_to_blocks[rid], before, after)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: BlockHashList, max_length: int, *args: Any, **kwargs: Any
    ) -> tuple[list[KVCacheBlock], ...]:
        # A hit leaves the window to be computed anew: nobody's recent pages are shared.
        return super().find_longest_cache_hit(
            block_hashes, sealed_tokens(max_length), *args, **kwargs
        )


class RecentManager(SlidingWindowManager):
    kv_cache_spec: RecentSpec

    pages_in_use = 0
    """Pages that requests hold, a shared one counted once."""

    def __init__(self, kv_cache_spec: RecentSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        # Pages at the front of each request that were given back: null gaps can lie to the left
        # of real pages, so the first null page does not tell.
        self._num_returned: dict[str, int] = {}
        self.tags = RequestTags(self.block_pool)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return sealed_tokens(num_computed_tokens - self.kv_cache_spec.speculative_tokens)

    def _never_taken(self, held: int, num_tokens: int) -> range:
        """Of the pages after the first ``held``, those that the step which ends at ``num_tokens``
        seals straight from the activations."""
        return range(
            max(held, self.kv_cache_spec.sink_pages), sealed_tokens(num_tokens) // self.block_size
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *counts: int,
        apply_admission_cap: bool = False,
    ) -> int:
        num_tokens_main_model = counts[-1]  # vLLM's releases differ in those before it
        held = len(new_computed_blocks) + len(self.req_to_blocks.get(request_id, ()))
        new = max(-(-num_tokens // self.block_size) - held, 0)
        if apply_admission_cap:  # of all steps to come, which may begin and end anywhere
            assert self._max_admission_blocks_per_request is not None
            sinks = sum(not b.is_null for b in new_computed_blocks)
            new = min(new, self._max_admission_blocks_per_request - sinks)
        else:
            new -= len(self._never_taken(held, num_tokens_main_model))
        return new + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        held, end = len(blocks), -(-num_tokens // self.block_size)
        if end <= held:
            return []
        null = self._never_taken(held, num_tokens_main_model)
        fresh = self.block_pool.get_new_blocks(end - held - len(null))
        self.pages_in_use += len(fresh)
        taken = iter(fresh)
        new = [self._null_block if i in null else next(taken) for i in range(held, end)]
        blocks.extend(new)
        self.tags.take(request_id, new)
        return new

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        assert num_external_computed_tokens == 0, "int4_kivi does not work with KV connectors"
        blocks = self.req_to_blocks[request_id]
        assert not blocks
        if self.enable_caching:
            sinks = [b for b in new_computed_blocks if not b.is_null]
            self.pages_in_use += sum(not b.ref_cnt for b in sinks)
            self.block_pool.touch(sinks)
        blocks.extend(new_computed_blocks)
        self.tags.hit(request_id, new_computed_blocks)
        self.num_cached_block[request_id] = len(blocks)

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        first = max(self._num_returned.get(request_id, 0), self.kv_cache_spec.sink_pages)
        last = min(
            self.get_num_skipped_tokens(total_computed_tokens) // self.block_size, len(blocks)
        )
        if last <= first:
            return
        pages = zip(blocks[first:last], self.tags.expected[request_id][first:last], strict=True)
        returned = [(b, tag) for b, tag in pages if not b.is_null]
        blocks[first:last] = [self._null_block] * (last - first)
        self._num_returned[request_id] = last
        self.pages_in_use -= len(returned)  # they are no sinks, and so nobody else's
        self.block_pool.free_blocks([b for b, tag in returned if self.tags.owns(b, tag)])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._num_returned.pop(request_id, None)
        blocks = super().pop_blocks_for_free(request_id)
        self.pages_in_use -= sum(b.ref_cnt == 1 for b in blocks if not b.is_null)
        return self.tags.release(request_id, blocks, self._null_block)

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Only sink pages are cached: a hit recomputes everything else that is not sealed."""
        cached = self.num_cached_block.get(request.request_id, 0)
        full = min(num_tokens // self.block_size, self.kv_cache_spec.sink_pages)
        if cached >= full:
            return
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=cached,
            num_full_blocks=full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.tags.cache(request.request_id, self.req_to_blocks[request.request_id], cached, full)
        self.num_cached_block[request.request_id] = full

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """The sink pages and nulls up to ``max_length``, or nothing if a sink page is gone."""
        sinks = kv_cache_spec.sink_pages
        pages = max_length // alignment_tokens * alignment_tokens // kv_cache_spec.block_size
        nothing: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        if pages < sinks:
            return nothing
        hit = [
            block_pool.get_cached_block(block_hashes[i], kv_cache_group_ids) for i in range(sinks)
        ]
        if not all(hit):
            return nothing
        rest = [block_pool.null_block] * (pages - sinks)
        return tuple(
            [page[g] for page in hit if page] + rest for g in range(len(kv_cache_group_ids))
        )
