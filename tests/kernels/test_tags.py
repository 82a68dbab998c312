"""check_pages against the reference, with poison in every entry that is not needed."""

import pytest
import torch
from tag_cases import SIZES, assert_same, random_case

from s4kv_ext import cpu_ops


@pytest.mark.parametrize("page_tokens", [8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_the_reference_s_result(size, page_tokens):
    rows = wrong = 0
    for seed in range(5):
        case = random_case(seed, page_tokens=page_tokens, **SIZES[size])
        found = assert_same(case, cpu_ops.check_pages, "cpu")
        rows, wrong = rows + len(found), wrong + int(found[:, 0].sum())
    print(f"{wrong} of {rows} rows wrong")
    assert rows == 0 or 0 < wrong < rows


def test_the_first_wrong_page():
    """Sealed before recent; what is in nobody's window may be anything."""
    case = random_case(0, wrong=0, requests=1, num_pages=5000)
    case["step"][1:4] = torch.tensor([20, 64 * 7, 40])  # the window begins at recent page 24
    case["step"] = case["step"][:4]
    cells, row = case["cells"], case["cells"][5000:].view(-1, 64)[case["step"][0]]
    cells[:5000] = torch.arange(5000)
    sealed, recent = case["sealed_table"][0], case["recent_table"][0]
    sealed[:20] = row[:20] = torch.arange(20)
    recent[:40] = row[23:63] = torch.arange(100, 140)

    def first_wrong(*changes):
        tables = {name: case[name].clone() for name in ("sealed_table", "recent_table")}
        for name, column, page in changes:
            tables[name][0, column] = page
        return assert_same(case | tables, cpu_ops.check_pages, "cpu").tolist()

    assert first_wrong() == [[0, 0, 0, 0]]
    assert first_wrong(("recent_table", 1, 7), ("recent_table", 23, -1)) == [[0, 0, 0, 0]]
    assert first_wrong(("recent_table", 0, 7)) == [[1, 7, 100, 7]]
    assert first_wrong(("recent_table", 24, 5000), ("recent_table", 39, 7)) == [[1, 5000, 124, -1]]
    assert first_wrong(("recent_table", 0, 7), ("sealed_table", 19, -3)) == [[1, -3, 19, -1]]
    assert first_wrong(("sealed_table", 20, 7), ("recent_table", 40, 7)) == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"sealed_table": c["sealed_table"].long()}, "expected int32"),
        (lambda c: {"recent_table": c["recent_table"].T}, "contiguous last"),
        (lambda c: {"recent_table": c["recent_table"][:6]}, "6 rows for 7 requests"),
        (lambda c: {"cells": c["cells"][:-1]}, "cells has 939 values"),
        (lambda c: {"wrong": c["wrong"][:, :3]}, "wrong is"),
        (lambda c: {"step": c["step"][:27]}, "step has 27 values"),
        (lambda c: {"step": c["step"].index_fill(0, torch.tensor(0), 99)}, "row 99 of 10"),
        (lambda c: {"step": c["step"].index_fill(0, torch.tensor(5), 24)}, "24 of 23 sealed"),
        (lambda c: {"step": c["step"].index_fill(0, torch.tensor(28), -1)}, "cell -1 of 940"),
        (lambda c: {"page_tokens": 12}, "divisor of 16"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    case = random_case(1)
    with pytest.raises(RuntimeError, match=message):
        cpu_ops.check_pages(**case | change(case))
