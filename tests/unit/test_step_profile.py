"""How bench/step_profile.py adds up what the profiler saw; it runs itself in `make gpu-bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from torch.autograd import DeviceType

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import step_profile


def kernel(name: str, start: float, end: float, device=DeviceType.CUDA) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, device_type=device, time_range=span, self_cpu_time_total=7.0)


EVENTS = [
    kernel("void s4kv::decode_kernel<128, __nv_bfloat16>(Args)", 0, 10),
    kernel("void s4kv::decode_kernel<128, __nv_bfloat16>(Args)", 20, 34),
    kernel("gemm", 30, 36),
    kernel("aten::mm", 0, 100, DeviceType.CPU),
]


def test_kernels_of_the_gpu_by_step():
    rows = step_profile.table(EVENTS, 2, on_gpu=True)
    assert rows == {
        "s4kv::decode_kernel<128, __nv_bfloat16>": {"us": 12.0, "calls": 1.0},
        "gemm": {"us": 3.0, "calls": 0.5},
    }
    assert step_profile.busy(EVENTS) == 10 + 16  # what overlaps counts once


def test_operators_of_the_cpu_without_what_they_call():
    assert step_profile.table(EVENTS, 1, on_gpu=False) == {"aten::mm": {"us": 7.0, "calls": 1.0}}
