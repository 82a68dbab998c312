"""The C++ operators of ``csrc/``, under the meaning that ``reference.py`` gives them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from s4kv_ext.reference import Step

LIBRARY = Path(__file__).with_name("libs4kv_cpu.so")


def load(library: Path = LIBRARY) -> None:
    """Load the operators; again does nothing."""
    if not library.is_file():
        raise RuntimeError(
            f"{library} is missing: the installation is damaged, install the wheel again"
        )
    torch.ops.load_library(library)


def isa() -> str:
    """Instruction set the kernels run with: baseline, avx2 or avx512, the best there is unless
    S4KV_CPU_ISA names a lesser one."""
    return torch.ops.s4kv_cpu.isa()


def use_isa(name: str) -> None:
    """Run with this instruction set from now on; for tests."""
    torch.ops.s4kv_cpu.use_isa(name)


def store_and_seal(
    key: Tensor, value: Tensor, sealed: Tensor, recent: Tensor, step: Step, slot_channel: Tensor
) -> None:
    """Parts 1 and 2 of a step. Shapes as in ``reference.store_and_seal``."""
    torch.ops.s4kv_cpu.store_and_seal(
        key,
        value,
        sealed,
        recent,
        step.query_start_loc,
        step.seq_lens,
        step.sealed_table,
        step.recent_table,
        slot_channel,
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sealed: Tensor,
    recent: Tensor,
    step: Step,
    slot_channel: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Part 3 of a step, into out [T, heads, D], query's dtype. Rows past the last request stay."""
    torch.ops.s4kv_cpu.attend(
        query,
        key,
        value,
        sealed,
        recent,
        step.query_start_loc,
        step.seq_lens,
        step.sealed_table,
        step.recent_table,
        slot_channel,
        scale,
        out,
    )


def causal_attend(query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
    """Attention of one sequence without a cache."""
    torch.ops.s4kv_cpu.causal_attend(query, key, value, scale, out)


def check_pages(
    cells: Tensor,
    num_pages: int,
    step: Tensor,
    sealed_table: Tensor,
    recent_table: Tensor,
    page_tokens: int,
    withdraw: bool,
    wrong: Tensor,
) -> None:
    """Compare the tags of the pages that a step needs; meaning and shapes as in
    ``reference.check_pages``."""
    torch.ops.s4kv_cpu.check_pages(
        cells, num_pages, step, sealed_table, recent_table, page_tokens, withdraw, wrong
    )
