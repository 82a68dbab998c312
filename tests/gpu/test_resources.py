"""Every kernel fits every card it is built for. Needs the library and cuobjdump, but no GPU."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from s4kv_ext.cuda_ops import decode_shape

pytestmark = pytest.mark.needs_no_gpu

SHARED = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024}
THREADS = {"decode": 384, "seal": 512, "dequant": 256, "plan": 1024, "give": 256, "check": 256}
REGISTER_FILE = 16384  # of a quarter of a multiprocessor, for every fourth warp


def tool(name: str) -> str | None:
    spec = find_spec("triton")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / name]
    if spec and spec.origin:
        places.append(Path(spec.origin).parent / "backends/nvidia/bin" / name)
    return shutil.which(name) or next((str(p) for p in places if p.is_file()), None)


def library() -> Path:
    named = os.environ.get("S4KV_CUDA_LIBRARY")
    return Path(named) if named else Path(__file__).parents[2] / "s4kv_ext/libs4kv_cuda.so"


@pytest.fixture(scope="module")
def usage() -> list[tuple[str, str, int, int, int]]:
    """(architecture, kernel, registers, bytes of stack, bytes of static shared memory)"""
    cuobjdump = tool("cuobjdump")
    if not library().is_file() or cuobjdump is None:
        pytest.skip("needs libs4kv_cuda.so and cuobjdump")
    text = subprocess.run(
        [cuobjdump, "--dump-resource-usage", library()], capture_output=True, text=True, check=True
    ).stdout
    found, arch = [], ""
    for line in text.splitlines():
        if m := re.search(r"^arch = (sm_\d+)", line):
            arch = m[1]
        if m := re.search(r"Function (\S+):", line):
            name = m[1]
        if m := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            found.append((arch, name, *map(int, m.groups())))
    return found


def test_all_architectures_and_kernels_are_there(usage) -> None:
    kernels: dict[str, set[str]] = {}
    for arch, name, *_ in usage:
        kernels.setdefault(arch, set()).add(name)
    assert set(kernels) == set(SHARED)
    assert len(set(map(frozenset, kernels.values()))) == 1
    for kind in THREADS:
        assert any(f"{kind}_kernel" in name for name in kernels["sm_80"]), kind


def test_registers_and_static_shared_memory_fit(usage) -> None:
    for arch, name, registers, stack, shared in usage:
        kind = re.search(r"(\w+?)_kernel", re.sub(r"^_ZN4s4kv\d+(_GLOBAL__N__\w+?_)?", "", name))
        threads = next(n for k, n in THREADS.items() if f"{k}_kernel" in name)
        if "decode_kernelILi" in name and "ELi2ELb0E" in name:
            threads = 256
        warps_a_quarter = -(-threads // 128)
        assert -(-registers // 8) * 8 * 32 * warps_a_quarter <= REGISTER_FILE, (
            arch,
            name,
            registers,
            kind,
        )
        assert shared <= 48 * 1024, (arch, name, shared)
        wide = "ELi2ELb1E" in name  # 15 or 16 query heads with 8 tokens: may spill
        assert stack <= (1024 if wide else 64), (arch, name, stack)


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("dim", [64, 128])
def test_decode_shapes_fit(arch: str, dim: int) -> None:
    for group in range(1, 17):
        for queries in range(1, 9):
            rows = group * queries
            if dim == 128 and SHARED[arch] < 100 * 1024 and rows > 96:
                with pytest.raises(ValueError, match="do not fit"):
                    decode_shape(8, group, dim, queries, shared_bytes=SHARED[arch], processors=64)
                continue
            s = decode_shape(8, group, dim, queries, shared_bytes=SHARED[arch], processors=64)
            assert s.shared_bytes <= SHARED[arch]
            assert s.tile_warps * s.tiles * 8 >= rows
            assert s.warps % s.tile_warps == 0 and s.stages >= 2
            assert s.warps + 1 <= (12 if s.tiles == 1 or s.warps > 7 else 8)


def test_errors_reach_python() -> None:
    """An exception of the library passes through torch; it must not end the process."""
    if not library().is_file():
        pytest.skip("needs libs4kv_cuda.so")
    torch.ops.load_library(library())
    with pytest.raises(RuntimeError, match="head_dim must be 64 or 128, got 100"):
        torch.ops.s4kv_cuda.decode_shared_bytes(100, 1, 1, 8, 2, 1)
