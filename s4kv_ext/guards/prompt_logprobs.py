"""Log-probabilities of a prompt, in slices that bound their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

LEAST, MOST = 64, 1024
"""Where few requests run at once it is not token by token; 1024 is what the second runner took."""


def slice_size(max_num_seqs: int) -> int:
    """Tokens whose logits exist at once: as many as a step samples at most, within these bounds,
    because start-up has measured the memory that those take."""
    return min(max(max_num_seqs, LEAST), MOST)


def in_slices(runner: Any, hidden: Tensor, count: int, targets: Tensor) -> list[Tensor]:
    """Token ids [T, count + 1], their log-probabilities and the ranks [T] of ``targets`` [T].

    hidden [T, hidden size]; count: of the likeliest tokens. The logits of a whole step would take
    T * vocabulary * 4 bytes twice: 10 GB for 8192 tokens of Qwen2.5.
    """
    size = slice_size(runner.max_num_reqs)
    found = []
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        logprobs = runner.sampler.compute_logprobs(runner.model.compute_logits(hidden[part]))
        found.append(runner.sampler.gather_logprobs(logprobs, count, targets[part])[:3])
    return [torch.cat(parts) for parts in zip(*found)]
