"""Arguments of ``check_pages`` at random, with poison in all that it must not look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from s4kv_ext import reference
from s4kv_ext.format import SINKS, sealed_tokens
from s4kv_ext.reference import OUTSIDE

POISON = (2**31 - 1, -7, -(2**31))
ARGUMENTS = (
    "cells",
    "num_pages",
    "step",
    "sealed_table",
    "recent_table",
    "page_tokens",
    "withdraw",
    "wrong",
)
IN_REACH = ("step", "wrong")
"""What the engine keeps in pinned memory on a GPU."""

SIZES: dict[str, Any] = {
    "few": {},
    "many": {"requests": 130, "widths": (70, 300), "wrong": 0.002},
    "long": {"requests": 2, "widths": (2048, 8192), "num_pages": 20_000, "wrong": 0.001},
    "wide pages": {"widths": (9, 1)},
    "nobody": {"requests": 0},
}
"""Arguments of ``random_case``."""


def needed(computed: int, recent: int, page_tokens: int) -> set[int]:
    """Columns of the recent table."""
    window = range(sealed_tokens(computed) // page_tokens, recent)
    return {*range(min(SINKS // page_tokens, recent)), *window}


def random_case(
    seed: int,
    requests: int = 7,
    widths: tuple[int, int] = (23, 41),
    page_tokens: int = 16,
    wrong: float = 0.02,
    num_pages: int = 300,
) -> dict[str, Any]:
    """wrong: share of the entries of tables that are another page, or none, in half of the rows."""
    random = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.int32)

    def poison(*shape: int) -> Tensor:
        return torch.tensor(POISON, dtype=torch.int32)[ints(0, len(POISON), *shape).long()]

    rows = requests + 3
    tags = torch.randperm(10 * num_pages, generator=random)[:num_pages].int()
    expected = poison(rows, sum(widths))
    row = torch.randperm(rows, generator=random)[:requests].int()
    held = [ints(0, w + 1, requests) for w in widths]
    computed = ints(-9, page_tokens * widths[1] + 200, requests)
    tables = []
    for group, width in enumerate(widths):
        # A part of a wider memory, with more rows than requests.
        table = poison(requests + 2, width + 5)[:, :width]
        for i in range(requests):
            end = int(held[group][i])
            columns = needed(int(computed[i]), end, page_tokens) if group else range(end)
            own = torch.tensor(sorted(columns), dtype=torch.long)
            table[i, own] = ints(0, num_pages, len(own))
            expected[row[i], own + group * widths[0]] = tags[table[i, own].long()]
            spoilt = own[torch.rand(len(own), generator=random) < (wrong if i % 2 else 0)]
            table[i, spoilt] = ints(-3, num_pages + 3, len(spoilt))
        tables.append(table)
    cells = torch.cat((tags, expected.flatten()))
    cell = torch.randperm(len(cells), generator=random)[: ints(0, 30, 1)].int()
    given = torch.stack((cell, cells[cell.long()]), 1)
    cells[cell.long()] = OUTSIDE
    about = torch.stack((row, held[0], computed, held[1]), 1)
    step = torch.cat((about.flatten(), given.flatten()))
    result = torch.full((requests, 4), 99, dtype=torch.int32)
    values = (cells, num_pages, step, *tables, page_tokens, bool(seed % 3), result)
    return dict(zip(ARGUMENTS, values, strict=True))


def whole(x: Tensor) -> Tensor:
    """All of its memory, also what lies beside a table's columns."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def on(device: str, case: dict[str, Any], pinned: Sequence[str] = ()) -> dict[str, Any]:
    """A copy, with the same strides; pinned: arguments that stay in memory of the host."""

    def copy(name: str, x: Tensor) -> Tensor:
        memory = whole(x).clone()
        memory = memory.pin_memory() if name in pinned else memory.to(device)
        return memory.as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: copy(name, x) if isinstance(x, Tensor) else x for name, x in case.items()}


def assert_same(
    case: dict[str, Any],
    check_pages: Callable[..., None],
    device: str,
    pinned: Sequence[str] = (),
) -> Tensor:
    """As the reference, in all memory; returns what was found."""
    want, got = on("cpu", case), on(device, case, pinned)
    reference.check_pages(**want)
    check_pages(**got)
    if device != "cpu":
        torch.cuda.synchronize()
    for name, x in want.items():
        if isinstance(x, Tensor):
            assert torch.equal(whole(got[name]).cpu(), whole(x)), name
    return want["wrong"]
