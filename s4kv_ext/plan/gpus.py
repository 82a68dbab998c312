"""GPUs and the AWS instances that have them.

Memory is what the CUDA runtime calls the total, which is what --gpu-memory-utilization is a part
of, and less than nvidia-smi shows and than the name promises. It changes by a few tenths of a
percent with the driver; the smaller of what was found is taken:

A10G       22587 MiB   `torch.cuda.get_device_properties`, CUDA 13, in the torchcodec tutorial
L4         22.03 GiB   torch's out-of-memory message, as many reports of 2026 have it
L40S       44.39 GiB   likewise; older drivers: 44.52
A100       40339 MiB   deviceQuery, a p4d: https://github.com/bottlerocket-os/bottlerocket/pull/3873
A100-80GB  79.15 GiB   https://github.com/vllm-project/vllm/issues/4408
H100       79.11 GiB   https://github.com/vllm-project/vllm/issues/27508; other drivers: 79.18
H200       143156 MiB  `torch.cuda.get_device_properties`, in public logs; the runs in
                       bench/results agree

GPUs of an instance: https://docs.aws.amazon.com/batch/latest/userguide/gpu-jobs.html (g5, g6),
https://github.com/meta-pytorch/torchx/pull/969 (g6e) and AWS's price list of capacity blocks (p4d,
p5, p5e); p4de, p5en and p5.4xlarge as public tables of instance types agree on them. Shared
memory that a thread block may ask for, by compute capability: the technical specifications in
NVIDIA's CUDA C++ Programming Guide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. large: vLLM's defaults for large GPUs hold (A100 is excepted there)."""

    name: str
    memory: int
    capability: tuple[int, int] | None = None
    large: bool = False

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory that one thread block may have, or None if the GPU is not known."""
        kib = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227}
        return kib[self.capability] << 10 if self.capability else None


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A10G", 22587 * MIB, (8, 6)),
        Gpu("L4", int(22.03 * GIB), (8, 9)),
        Gpu("L40S", int(44.39 * GIB), (8, 9)),
        Gpu("A100", 40339 * MIB, (8, 0)),
        Gpu("A100-80GB", int(79.15 * GIB), (8, 0)),
        Gpu("H100", int(79.11 * GIB), (9, 0), large=True),
        Gpu("H200", 143156 * MIB, (9, 0), large=True),
    )
}


@dataclass(frozen=True)
class Machine:
    """So many GPUs of one kind. name: what the user called it, or AWS does."""

    name: str
    gpu: Gpu
    count: int

    def __str__(self) -> str:
        what = f"{self.count} × {self.gpu.name}, {self.gpu.memory / GIB:.1f} GiB each"
        return what if self.name == self.gpu.name or "×" in self.name else f"{self.name}: {what}"


def _family(family: str, gpu: str, sizes: dict[int, str]) -> dict[str, Machine]:
    return {
        f"{family}.{size}": Machine(f"{family}.{size}", GPUS[gpu], count)
        for count, names in sizes.items()
        for size in names.split()
    }


_G = {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}
INSTANCES = {
    **_family("g5", "A10G", _G),
    **_family("g6", "L4", _G),
    **_family("g6e", "L40S", _G),
    **_family("p4d", "A100", {8: "24xlarge"}),
    **_family("p4de", "A100-80GB", {8: "24xlarge"}),
    **_family("p5", "H100", {1: "4xlarge", 8: "48xlarge"}),
    **_family("p5e", "H200", {8: "48xlarge"}),
    **_family("p5en", "H200", {8: "48xlarge"}),
}
"""By name; of the same GPUs, that with the fewest CPUs comes first."""
_FAMILIES = dict.fromkeys(name.split(".")[0] for name in INSTANCES)


def smallest() -> list[Machine]:
    """One instance of each kind and number of GPUs: the first in the table."""
    found: dict[tuple[str, int], Machine] = {}
    for machine in INSTANCES.values():
        found.setdefault((machine.gpu.name, machine.count), machine)
    return list(found.values())


def machine(text: str) -> Machine:
    """The machine that ``--gpu`` names: g6e.xlarge, L40S, or L40Sx2 (L40S×2)."""
    if text.lower() in INSTANCES:
        return INSTANCES[text.lower()]
    match = re.fullmatch(r"(?:NVIDIA )?([\w-]+?)(?:[x×*](\d+))?", text, re.IGNORECASE)
    gpu = GPUS.get(match[1].upper()) if match else None
    count = int(match[2] or 1) if match else 0
    if gpu is None or not count:
        raise ValueError(
            f"--gpu {text} is not known: use an instance of {', '.join(_FAMILIES)}, or "
            f"{', '.join(GPUS)}, as in L40Sx2; for another GPU give --memory"
        )
    return Machine(gpu.name if count == 1 else f"{gpu.name}×{count}", gpu, count)


def memory(text: str) -> Machine:
    """One GPU of so much memory, that ``--memory`` gives: 24GiB, 22587MiB, 80GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG])(i?)B?", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"--memory {text} is no size: use 24GiB, 22587MiB or 24GB")
    power = 2 if match[2].upper() == "M" else 3
    nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    return Machine("a GPU", Gpu("a GPU", nbytes, large=nbytes >= 70 * GIB), 1)
