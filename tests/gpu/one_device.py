"""A worker for test_two_ranks.py: every rank on device 0. NCCL refuses that, so they talk through
gloo."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker


class OneDeviceWorker(Worker):
    def init_device(self) -> None:
        self.local_rank = 0
        type(current_platform).dist_backend = "gloo"
        super().init_device()
