"""Tasks: what is asked, and how an answer is judged. One JSON object a line:

    {"prompt": "The capital of France is", "expected": "Paris"}
    {"messages": [{"role": "user", "content": "Name a prime."}], "regex": "\\\\b(2|3|5|7|11)\\\\b"}
    {"messages": […], "schema": {"type": "object", …}, "task": "orders", "max_tokens": 200}
    {"prompt": "Once upon a time"}

`expected`, `regex` and `schema` may be combined; without any, only agreement with the baseline is
measured. `match` says how `expected` is held against the answer: "contains" (default), "exact", or
"prefix" (the share of its words that the answer begins with). A schema is also sent along as
response_format, unless `"constrain": false`. `task` names the group that is scored together, by
default the file; `id` the line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

FIELDS = {
    "id": str,
    "task": str,
    "prompt": str,
    "messages": list,
    "expected": str,
    "match": str,
    "regex": str,
    "schema": dict,
    "constrain": bool,
    "max_tokens": int,
}
MATCHES = ("contains", "exact", "prefix")


@dataclass(frozen=True)
class Task:
    id: str
    task: str
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    expected: str | None = None
    match: str = "contains"
    regex: str | None = None
    schema: dict[str, Any] | None = None
    constrain: bool = True
    max_tokens: int | None = None

    @property
    def judged(self) -> bool:
        return not (self.expected is None and self.regex is None and self.schema is None)


def load(path: Path) -> list[Task]:
    """The tasks of a file; ValueError names the line that is wrong."""
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(read(json.loads(line), path.stem, f"{path.stem}-{number}"))
        except (ValueError, RecursionError) as e:  # json.JSONDecodeError is a ValueError
            told = f"not JSON: {e.msg}" if isinstance(e, json.JSONDecodeError) else str(e)
            raise ValueError(f"{path}, line {number}: {told}") from None
    if not found:
        raise ValueError(f"{path} holds no task: one JSON object a line (s4kv compare --help)")
    if len({(t.task, t.id) for t in found}) < len(found):
        raise ValueError(f"{path}: two lines have the same id")
    return found


def read(line: Any, group: str, name: str) -> Task:
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    for key, value in line.items():
        if key not in FIELDS:
            raise ValueError(f"unknown field {key!r}, there are {', '.join(FIELDS)}")
        kind = FIELDS[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{key!r} is not {kind.__name__}")
    if ("prompt" in line) == ("messages" in line):
        raise ValueError("either 'prompt' or 'messages' is needed")
    for m in line.get("messages", [{"role": ""}]):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise ValueError("every message is an object with 'role' and 'content'")
    if line.get("messages") == []:
        raise ValueError("'messages' is empty")
    if line.get("match", MATCHES[0]) not in MATCHES:
        raise ValueError(f"'match' is one of {', '.join(MATCHES)}")
    if line.get("max_tokens", 1) < 1:
        raise ValueError("'max_tokens' is less than 1")
    if "regex" in line:
        try:
            re.compile(line["regex"])
        except (re.error, OverflowError) as e:
            raise ValueError(f"'regex' is none: {e}") from None
    if "schema" in line:
        for value in ({}, [], "", 0, None):
            fits(value, line["schema"])
    given: dict[str, Any] = {"id": name, "task": group} | line
    if "messages" in given:
        given["messages"] = tuple(given["messages"])
    return Task(**given)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Raises ValueError for a schema that is none, or refers to elsewhere or for ever to itself."""
    try:
        validator = validator_for(schema, Draft202012Validator)
        validator.check_schema(schema)
        return validator(schema, registry=Registry()).is_valid(value)  # which asks no server
    except jsonschema.SchemaError as e:
        raise ValueError(f"'schema' is none: {e.message[:300]}") from None
    except (Unresolvable, AttributeError, RecursionError, TypeError) as e:
        raise ValueError(f"'schema' cannot be used: {e!s:.300}") from None


def squeezed(text: str) -> str:
    return " ".join(text.split())


def prefix_share(expected: str, answer: str) -> float:
    """The share of the expected words that the answer begins with."""
    wanted, got = expected.split(), answer.split()
    same = 0
    for a, b in zip(wanted, got):
        if a != b:
            break
        same += 1
    return same / len(wanted) if wanted else 1.0


def of_schema(schema: dict[str, Any], answer: str) -> bool:
    try:
        return fits(json.loads(answer), schema)
    except (ValueError, RecursionError):
        return False


def score(task: Task, answer: str) -> float | None:
    """0 to 1; None for a task that has no right answer. The least of all that is asked for."""
    parts: list[float] = []
    if task.expected is not None:
        if task.match == "prefix":
            parts.append(prefix_share(task.expected, answer))
        else:
            wanted, got = squeezed(task.expected), squeezed(answer)
            parts.append(float(wanted == got if task.match == "exact" else wanted in got))
    if task.regex is not None:
        parts.append(float(re.search(task.regex, answer) is not None))
    if task.schema is not None:
        parts.append(float(of_schema(task.schema, answer)))
    return min(parts) if parts else None
