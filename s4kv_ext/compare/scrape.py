"""A server's /metrics, read with Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

CACHE_INFO = "vllm:cache_config_info"
PREEMPTIONS = "vllm:num_preemptions_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
TEXT_TOKENS = "vllm:generation_tokens_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
QUEUE_SUM = "vllm:request_queue_time_seconds_sum"
QUEUE_COUNT = "vllm:request_queue_time_seconds_count"


class Scrape:
    """One reading. A metric that is not there counts as 0, as a counter does before its first."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [s for family in families for s in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all engines and labels."""
        wanted = labels.items()
        return sum(s.value for s in self.samples if s.name == name and wanted <= s.labels.items())

    def cache_info(self) -> dict[str, str]:
        """vLLM's cache configuration; empty where the server tells none."""
        found = (s.labels for s in self.samples if s.name == CACHE_INFO)
        return dict(next(found, {}))

    def engines(self) -> int:
        """Data-parallel ranks, each with a cache of its own."""
        return sum(s.name == CACHE_INFO for s in self.samples) or 1
