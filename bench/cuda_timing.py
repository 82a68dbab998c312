"""Times of CUDA kernels: inside a graph, over several caches in turn, with their spread.

times = graph_times([functools.partial(run, cache) for cache in caches])
print(spread(times))     # {"us": 14.6, "us_min": 14.5, "us_max": 14.9}
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_times(runs: Sequence[Callable[[], object]], repeats: int = 15) -> list[float]:
    """Microseconds a run, sorted, over replays of a graph that holds all of them."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(runs))
    return sorted(times[2:])


def spread(times: Sequence[float]) -> dict[str, float]:
    return {
        "us": round(statistics.median(times), 2),
        "us_min": round(min(times), 2),
        "us_max": round(max(times), 2),
    }


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, bytes read plus bytes written.

    Not in a graph, where a copy is left to a slower engine.
    """
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * x.nbytes / statistics.median(times) / 1e6


def sets_for(nbytes: int) -> int:
    """How many caches of that size are more than the L2 holds."""
    return max(2, min(16, int(500e6 / nbytes) + 1))
