"""int4_kivi's metrics, beside vLLM's own in /metrics and with their labels.

The engine core, which has the scheduler, adds a few figures to the stats of each step; vLLM carries
those to one of the API servers, which keeps them for Prometheus. They travel in the field for the
stats of a KV connector: it is passed on unread, and there are no connectors with int4_kivi.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from s4kv_ext.format import BLOCK, FORMAT_VERSION, KV_CACHE_DTYPE
from s4kv_ext.managers import RecentManager, SealedManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

BF16_BYTES = 2
_computed = attrgetter("num_computed_tokens")
GAUGES = {
    "sealed_pages": f"Pages in use that hold {BLOCK} tokens in int4.",
    "recent_pages": "Pages in use that hold first and newest tokens in the model's dtype.",
    "bytes_per_token": "Bytes of one GPU's memory that a sealed token takes, all layers together.",
    "density": "How many times more the cached tokens would take in bf16; NaN without any.",
}
COUNTERS = {
    "seals": f"Pages sealed: blocks of {BLOCK} tokens turned to int4, each in all layers.",
    "page_mismatches": "Requests ended because a page was not theirs any more, as its tag tells.",
}
INFO = "The format of the pages, and the hash of the map of key channels to int4 slots."


class PageStats:
    """Of the pages of one engine core."""

    def __init__(self, scheduler: Scheduler, channel_map: str) -> None:
        self.scheduler, self.channel_map = scheduler, channel_map
        manager = scheduler.kv_cache_manager
        found = {type(m): m for m in manager.coordinator.single_type_managers}
        self.sealed, self.recent = found[SealedManager], found[RecentManager]
        self.pool = manager.block_pool
        self.layers = len(
            manager.kv_cache_config.kv_cache_groups[self.sealed.kv_cache_group_id].layer_names
        )
        self.told = [0, 0]  # of the counters, in stats that were given out

    def take(self) -> dict[str, Any]:
        """The figures now; ``seals`` and ``page_mismatches`` are those since the last call."""
        used = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()  # page 0 is null
        recent = self.recent.pages_in_use
        faults = getattr(self.scheduler, "page_faults", None)
        counts = [self.sealed.num_taken, faults.count if faults else 0]
        seals, mismatches = (now - before for now, before in zip(counts, self.told, strict=True))
        self.told = counts
        return {
            "sealed_pages": used - recent,
            "recent_pages": recent,
            "bytes_per_token": self.layers * self.sealed.kv_cache_spec.page_size_bytes / BLOCK,
            "density": self.density(used, used - recent),
            "seals": seals,
            "page_mismatches": mismatches,
            "channel_map": self.channel_map,
        }

    def density(self, used: int, sealed: int) -> float:
        """A page that requests share counts once, as it would in bf16."""
        if not used:
            return math.nan
        computed = sum(map(_computed, self.scheduler.requests.values()))  # 0 of those that wait
        tokens = computed - BLOCK * (self.sealed.num_held - sealed)
        spec = self.recent.kv_cache_spec
        plain = tokens * 2 * spec.num_kv_heads * spec.head_size * BF16_BYTES
        return plain / (used * spec.page_size_bytes)


def report(core: EngineCore) -> None:
    """Called once an engine core has its scheduler: from now on its stats tell of the pages."""
    from vllm.logger import init_logger
    from vllm.v1.engine import EngineCoreOutputs

    from s4kv_ext import calibrate, map_file

    config, scheduler = core.vllm_config, core.scheduler
    ranks = core.model_executor.collective_rpc(calibrate.maps_on)
    kv_heads = config.model_config.get_total_num_kv_heads()
    channel_map = map_file.digest(map_file.of_all_ranks(ranks, kv_heads))
    attach(scheduler, PageStats(scheduler, channel_map))
    if (stats := scheduler.make_stats()) and hasattr(core, "output_queue"):
        # So that /metrics is complete before the first request.
        core.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))
    init_logger("vllm.s4kv_ext").info_once(
        "int4_kivi: room for %s tokens; channel map %s, format version %d",
        f"{config.cache_config.kv_cache_size_tokens or 0:,}",
        channel_map,
        FORMAT_VERSION,
    )


def attach(scheduler: Scheduler, pages: PageStats) -> None:
    """Have the scheduler's stats carry those of the pages."""
    make_stats = scheduler.make_stats

    def with_pages(*args: Any, **kwargs: Any) -> Any:
        if stats := make_stats(*args, **kwargs):  # there are none with --disable-log-stats
            stats.kv_connector_stats = {KV_CACHE_DTYPE: pages.take()}
        return stats

    scheduler.make_stats = with_pages


class Int4KiviMetrics:
    """What an API server shows. ``make`` has the classes of metrics, which Ray replaces."""

    def __init__(
        self, make: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        def gauge(name: str, text: str, *more: str) -> Any:
            return make._gauge_cls(
                name=f"vllm:{KV_CACHE_DTYPE}_{name}",
                documentation=text,
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, *more],
            )

        self.labels = {i: dict(zip(labelnames, v)) for i, v in per_engine_labelvalues.items()}
        self.gauges = {name: gauge(name, text) for name, text in GAUGES.items()}
        self.info = gauge("info", INFO, "format_version", "channel_map")
        self.counters = {
            name: make._counter_cls(
                name=f"vllm:{KV_CACHE_DTYPE}_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        for labels in self.labels.values():
            for counter in self.counters.values():
                counter.labels(**labels).inc(0)

    def observe(self, stats: dict[str, Any], engine_idx: int = 0) -> None:
        """Of one step of one engine."""
        figures, labels = stats[KV_CACHE_DTYPE], self.labels[engine_idx]
        for name, metric in self.gauges.items():
            metric.labels(**labels).set(figures[name])
        for name, counter in self.counters.items():
            counter.labels(**labels).inc(figures[name])
        about = {"format_version": str(FORMAT_VERSION), "channel_map": figures["channel_map"]}
        self.info.labels(**labels, **about).set(1)
