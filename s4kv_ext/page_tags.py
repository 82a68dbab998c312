"""Page tags: who was given each page last, and which tag a request expects of each of its pages.

A page gets a new tag whenever it is given to a new owner. A request remembers the tags that its
pages had when it got them; of a page out of the prefix cache, the tag with which it went in.
Workers compare the two before attention reads or writes a page (``page_check.py``); who is wrong
is ended (``page_faults.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_TAG = 2**31 - 1
WHAT = "a page of the KV cache is not this request's any more"


class PoolTags:
    """Of one pool's pages, by page number. The null page has the tag 0."""

    def __init__(self, num_pages: int) -> None:
        self.now = [0] * num_pages
        self.cached = [0] * num_pages
        """What ``now`` was when the page went into the prefix cache."""
        self._given: dict[int, int] = {}
        self._last = 0

    def give(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """New tags for pages that get a new owner."""
        tags = []
        for block in blocks:
            if block.is_null:
                tags.append(0)
                continue
            self._last = self._last % MAX_TAG + 1
            self.now[block.block_id] = self._given[block.block_id] = self._last
            tags.append(self._last)
        return tags

    def take_given(self) -> dict[int, int]:
        """Page to tag, of the pages given out since the last call."""
        given, self._given = self._given, {}
        return given


_pools: WeakKeyDictionary[BlockPool, PoolTags] = WeakKeyDictionary()


def of(pool: BlockPool) -> PoolTags:
    """The tags of a pool; the managers of both groups share it."""
    if pool not in _pools:
        _pools[pool] = PoolTags(pool.num_gpu_blocks)
    return _pools[pool]


@dataclass
class Held:
    """A request's pages of one group, and the tag that it expects of each."""

    blocks: Sequence[KVCacheBlock]
    tags: list[int]
    num_hit: int
    """How many of them, from the first, it found in the prefix cache."""


class RequestTags:
    """The tags that one manager's requests expect."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = of(pool)
        self.expected: defaultdict[str, list[int]] = defaultdict(list)
        self._num_hit: dict[str, int] = {}
        self.released: dict[str, Held] = {}
        """Of requests that gave their pages back while a step with them may still run."""
        self._released_before: dict[str, Held] = {}

    def take(self, request_id: str, blocks: Iterable[KVCacheBlock]) -> None:
        """A request gets pages that are its own from now on."""
        self.expected[request_id] += self.pool.give(blocks)

    def hit(self, request_id: str, blocks: Iterable[KVCacheBlock]) -> None:
        """A request gets pages out of the prefix cache."""
        self.expected[request_id] += [self.pool.cached[b.block_id] for b in blocks]
        self._num_hit[request_id] = len(self.expected[request_id])

    def cache(self, request_id: str, blocks: Sequence[KVCacheBlock], first: int, end: int) -> None:
        """Its pages from ``first`` to ``end`` went into the prefix cache."""
        for block, tag in zip(blocks[first:end], self.expected[request_id][first:end]):
            if not block.is_null:
                self.pool.cached[block.block_id] = tag

    def release(
        self, request_id: str, blocks: list[KVCacheBlock], null: KVCacheBlock
    ) -> list[KVCacheBlock]:
        """What a request gives back of its pages: null in place of one that is another's now."""
        tags = self.expected.pop(request_id, [])
        self.released[request_id] = Held(blocks, tags, self._num_hit.pop(request_id, 0))
        return [b if self.owns(b, t) else null for b, t in zip(blocks, tags, strict=True)]

    def forget_released(self) -> None:
        """Called with each step; two may be in flight."""
        self._released_before, self.released = self.released, {}

    def held(self, request_id: str, blocks: Sequence[KVCacheBlock] | None) -> Held:
        """What it holds, or held when it gave its pages back not long ago."""
        if blocks:
            return Held(blocks, self.expected[request_id], self._num_hit.get(request_id, 0))
        nothing = Held([], [], 0)
        return self.released.get(request_id) or self._released_before.get(request_id) or nothing

    def same(self, block: KVCacheBlock, tag: int) -> bool:
        """Nobody else was given the page since."""
        return self.pool.now[block.block_id] == tag

    def owns(self, block: KVCacheBlock, tag: int) -> bool:
        """False also of a page that somebody gave back in its place."""
        return block.is_null or (self.same(block, tag) and block.ref_cnt > 0)
