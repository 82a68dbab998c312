"""A vLLM plugin that gives requests a wrong page, for `test_faults.py`.

vLLM loads it in every process of a server. In the block table of a request whose id contains
"wrong-page", the first page is another's from the tenth step on.
"""

from __future__ import annotations


def spoil() -> None:
    from s4kv_ext.page_check import PageCheck

    run, steps = PageCheck.run, {}

    def spoilt(self, req_ids, tables):
        for row, rid in enumerate(req_ids):
            steps[rid] = steps.get(rid, 0) + 1
            if "wrong-page" in rid and steps[rid] >= 10:
                tables[1][row, 0] += 1
        run(self, req_ids, tables)

    PageCheck.run = spoilt
