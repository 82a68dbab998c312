"""int4_kivi's metrics: what the engine core counts, and what an API server shows of it."""

from __future__ import annotations

import copy
import math

import prometheus_client
import pytest
import torch
from schedules import Engine, Settings, make_config
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from s4kv_ext import map_file
from s4kv_ext.channel_map import one_slot_each
from s4kv_ext.metrics import PageStats, attach

PAGE = 9536  # bytes, one KV head of 128
PLAIN = 2 * 128 * 2  # bytes of a token in bf16


@pytest.fixture
def config():
    yield make_config(Settings())
    unregister_vllm_metrics()


def shown() -> dict[str, float]:
    return {
        f"{s.name}{sorted(s.labels.items())}": s.value
        for family in prometheus_client.REGISTRY.collect()
        for s in family.samples
        if "int4_kivi" in s.name
    }


def test_figures_of_one_request():
    """Of 700 tokens: 9 blocks are sealed, the sinks and what is behind the window are not."""
    engine = Engine(Settings(16, max_model_len=1024, max_num_batched_tokens=1024))
    stats = PageStats(engine.scheduler, "abc")
    assert math.isnan(stats.take()["density"])
    engine.add([1] * 700, max_tokens=2)
    engine.step()
    told = stats.take()
    assert (told["sealed_pages"], told["seals"]) == (9, 9)
    assert told["recent_pages"] == 1 + -(-(700 - 576) // 16)
    assert told["bytes_per_token"] == PAGE / 64
    pages = told["sealed_pages"] + told["recent_pages"]
    assert told["density"] == pytest.approx(700 * PLAIN / (pages * PAGE))
    assert stats.take()["seals"] == 0  # since the last time
    engine.run()
    told = stats.take()
    assert (told["sealed_pages"], told["recent_pages"]) == (0, 0)
    assert math.isnan(told["density"])


def test_shared_pages_count_once():
    engine = Engine(Settings(16, 1024, 400, 1024))
    stats = PageStats(engine.scheduler, "")
    engine.run(engine.add([1] * 700, max_tokens=1))
    stats.take()
    for _ in range(2):
        engine.add([1] * 700, max_tokens=9)
    engine.step()
    told = stats.take()
    assert told["sealed_pages"] == 9 and told["seals"] == 0
    window = -(-(700 - 576) // 16)
    assert told["recent_pages"] == 1 + 2 * window
    pages = told["sealed_pages"] + told["recent_pages"]
    assert told["density"] == pytest.approx((576 + 2 * 124) * PLAIN / (pages * PAGE))


def test_the_way_to_an_api_server(config):
    """Through the encoder between the processes, for two engines, and past the log."""
    engine = Engine(Settings(16, 1024, max_num_batched_tokens=1024))
    attach(engine.scheduler, PageStats(engine.scheduler, "abc"))
    engine.add([1] * 700, max_tokens=2)
    engine.step()
    engine.step()
    log, shows = LoggingStatLogger(config), PrometheusStatLogger(config, [0, 1])
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=engine.scheduler.make_stats()))
    stats = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    stats.kv_connector_stats["int4_kivi"] |= {"seals": 9, "page_mismatches": 2}  # an earlier step's
    for _ in range(2):
        for logger in (log, shows):
            logger.record(stats, None, engine_idx=1)
    log.log()
    name = config.model_config.served_model_name
    labels = f"[('engine', '1'), ('model_name', '{name}')]"
    told = shown()
    assert told[f"vllm:int4_kivi_seals_total{labels}"] == 18
    assert told[f"vllm:int4_kivi_seals_total{labels.replace('1', '0', 1)}"] == 0
    assert told[f"vllm:int4_kivi_page_mismatches_total{labels}"] == 4
    assert told[f"vllm:int4_kivi_sealed_pages{labels}"] == 0  # the request ended
    about = {"channel_map": "abc", "engine": "1", "format_version": "1", "model_name": name}
    assert told[f"vllm:int4_kivi_info{sorted(about.items())}"] == 1


def test_other_caches_have_none_of_them(config):
    config = copy.copy(config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.cache_dtype = "auto"
    PrometheusStatLogger(config, [0]).record(SchedulerStats(), None)
    assert not shown()


def test_without_stats_there_is_nothing_to_carry():
    engine = Engine(Settings())
    engine.scheduler.log_stats = False
    attach(engine.scheduler, PageStats(engine.scheduler, ""))
    assert engine.scheduler.make_stats() is None


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_the_map_of_all_ranks_has_the_hash_of_its_file(ranks):
    maps = torch.stack([one_slot_each(8, 64), one_slot_each(8, 64).roll(1, 0)])
    maps += torch.arange(8, dtype=torch.int16)[:, None]  # heads differ
    parts = [
        [layer[map_file.heads_of_rank(8, rank, ranks)] for layer in maps] for rank in range(ranks)
    ]
    whole = map_file.of_all_ranks(parts, 8)
    assert map_file.digest(whole) == map_file.digest(maps)


def test_ranks_that_hold_other_maps_of_one_head_are_seen():
    maps = one_slot_each(1, 64)
    same, other = [[maps], [maps]], [[maps], [maps.flip(1)]]
    assert len({map_file.digest(map_file.of_all_ranks(r, 1)) for r in (same, other)}) == 2
