"""Random schedules through the real scheduler, their keys and values in pages on the GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

pytest.importorskip("vllm")

import real_pages
import schedules


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_random_schedules(first: int) -> None:
    """Those that `make soak` begins with; a GPU has recent pages of 16 tokens only."""
    happened: Counter[str] = Counter()
    with patch.object(schedules, "Worker", real_pages.CudaKernels):
        for seed in range(first, first + 20):
            schedule = schedules.random_schedule(Random(seed))
            settings = replace(schedule.settings, page_tokens=16)
            happened += schedules.play(replace(schedule, settings=settings)).happened()
    print("0 wrong, 0 leaked:", ", ".join(f"{n:,} {what}" for what, n in sorted(happened.items())))
    assert all(happened[what] for what in ("preemptions", "prefix hits", "sealed pages", "aborts"))
