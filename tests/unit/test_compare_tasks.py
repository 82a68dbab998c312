"""`s4kv compare`: tasks, scores, and how answers are held against each other."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s4kv_ext.compare import agreement, builtin, tasks
from s4kv_ext.compare.tasks import Task, score

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def write(tmp_path, *lines):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_all_forms_are_read(tmp_path):
    chat = [{"role": "user", "content": "Hello"}]
    found = tasks.load(
        write(
            tmp_path,
            {"prompt": "France?", "expected": "Paris"},
            "",
            {"messages": chat, "schema": SCHEMA, "task": "json", "id": "x", "max_tokens": 9},
            {"prompt": "Once"},
        )
    )
    assert [(t.task, t.id) for t in found] == [
        ("mine", "mine-1"),
        ("json", "x"),
        ("mine", "mine-4"),
    ]
    assert found[1].messages == tuple(chat) and found[1].max_tokens == 9
    assert [t.judged for t in found] == [True, True, False]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({"expected": "x"}, "either 'prompt' or 'messages'"),
        ({"prompt": "x", "messages": []}, "either 'prompt' or 'messages'"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["x"]}, "every message"),
        ({"prompt": 1}, "'prompt' is not str"),
        ({"prompt": "x", "answer": "y"}, "unknown field 'answer'"),
        ({"prompt": "x", "regex": "("}, "'regex' is none"),
        ({"prompt": "x", "schema": {"type": "nothing"}}, "'schema' is none"),
        ({"prompt": "x", "schema": {"$ref": "http://127.0.0.1:1/x"}}, "'schema' cannot be used"),
        ({"prompt": "x", "schema": {"$ref": "file:///etc/passwd"}}, "'schema' cannot be used"),
        ({"prompt": "x", "schema": {"$ref": "#/nowhere"}}, "'schema' cannot be used"),
        ({"prompt": "x", "schema": {"$ref": "#"}}, "'schema' cannot be used"),
        ({"prompt": "x", "schema": {"$schema": 5}}, "'schema' cannot be used"),
        ({"prompt": "x", "regex": "a{99999999999}"}, "'regex' is none"),
        ("[" * 100_000, "recursion"),
        ('{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}", "4300"),
        ({"prompt": "x", "max_tokens": 0}, "less than 1"),
        ({"prompt": "x", "max_tokens": True}, "'max_tokens' is not int"),
        ({"prompt": "x", "match": "fuzzy"}, "'match' is one of"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, told):
    path = write(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}, line 3: .*{re.escape(told)}"):
        tasks.load(path)


def test_empty_file_and_equal_ids(tmp_path):
    with pytest.raises(ValueError, match="holds no task"):
        tasks.load(write(tmp_path, ""))
    with pytest.raises(ValueError, match="same id"):
        tasks.load(write(tmp_path, {"prompt": "a", "id": "1"}, {"prompt": "b", "id": "1"}))


@pytest.mark.parametrize(
    ("how", "answer", "wanted"),
    [
        ({}, "anything", None),
        ({"expected": "in  Paris"}, "It is in\nParis.", 1),
        ({"expected": "Rome"}, "It is in Paris.", 0),
        ({"expected": "Paris", "match": "exact"}, " Paris\n", 1),
        ({"expected": "Paris", "match": "exact"}, "Paris!", 0),
        ({"expected": "a b c d", "match": "prefix"}, "a b x d", 0.5),
        ({"regex": "^[0-9]+$"}, "42", 1),
        ({"regex": "^[0-9]+$"}, "42.", 0),
        ({"schema": SCHEMA}, '{"a": 1}', 1),
        ({"schema": SCHEMA}, '{"a": "1"}', 0),
        ({"schema": SCHEMA}, '{"a": 1', 0),
        ({"schema": SCHEMA, "expected": "2"}, '{"a": 1}', 0),
    ],
)
def test_score(how, answer, wanted):
    assert score(Task("1", "t", prompt="x", **how), answer) == wanted


def test_builtin_tasks_are_the_same_every_time_and_hold_their_answers():
    made = builtin.make(list(builtin.SETS), 1000, 8)
    assert made == builtin.make(list(builtin.SETS), 1000, 8)
    assert len(made) == 8 * len(builtin.SETS) == len({(t.task, t.id) for t in made})
    assert all(t.judged for t in made)
    for t in made:
        if t.task in ("quotes", "needle"):
            assert tasks.squeezed(t.expected) in tasks.squeezed(t.prompt)
            assert 2000 < len(t.prompt) < 5000
    assert len(builtin.make(["needle"], 4000, 2)[0].prompt) > 12_000


def test_common_and_share():
    assert agreement.common([1, 2, 3], [1, 2, 4]) == 2
    assert agreement.share([1, 2, 3, 4], [1, 2]) == 0.5
    assert agreement.share([], []) == 1.0


def test_divergence_is_a_lower_bound_of_the_whole_kl():
    p = [0.5, 0.3, 0.1, 0.06, 0.04]
    q = [0.4, 0.3, 0.2, 0.02, 0.08]
    whole = sum(a * math.log(a / b) for a, b in zip(p, q))

    def top(x, n):
        order = sorted(range(5), key=lambda i: -x[i])[:n]
        return {str(i): math.log(x[i]) for i in order}

    told = [agreement.divergence(top(p, n), top(q, n)) for n in range(1, 6)]
    assert all(0 <= x <= whole + 1e-12 for x in told)
    assert told[-1] == pytest.approx(whole)
    assert told[3] > 0.8 * whole
    assert agreement.divergence(top(p, 3), top(p, 3)) == pytest.approx(0, abs=1e-12)


@given(st.data())
def test_divergence_never_exceeds_the_whole_kl(data):
    def distribution():
        masses = data.draw(st.lists(st.floats(0.01, 1), min_size=8, max_size=8))
        return [x / sum(masses) for x in masses]

    p, q, n = distribution(), distribution(), data.draw(st.integers(1, 8))

    def top(x):
        return {str(i): math.log(x[i]) for i in sorted(range(8), key=lambda i: -x[i])[:n]}

    whole = sum(a * math.log(a / b) for a, b in zip(p, q))
    assert -1e-9 <= agreement.divergence(top(p), top(q)) <= whole + 1e-9


def test_what_has_nothing_in_common_is_far_apart():
    assert agreement.divergence({"1": math.log(0.9)}, {"2": math.log(0.9)}) > 1.5
    assert agreement.compared([{"1": -0.1}], [{"2": -0.1}])[0][1] is False
