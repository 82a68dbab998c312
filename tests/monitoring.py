"""The dashboard and the alerts of deploy/monitoring, and the metrics and labels they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring"
ADDED = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes."""


@dataclass(frozen=True)
class Query:
    """where: for messages. shown: labels that its legend or its message names."""

    where: str
    promql: str
    shown: frozenset[str]


@dataclass(frozen=True)
class Selector:
    """equal: labels and the value each must have. labels: all that are asked for by name."""

    metric: str
    equal: dict[str, str]
    labels: frozenset[str]


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "dashboard.json").read_text())


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[Query]:
    """All there are, as Prometheus gets them."""
    found = []
    for rule in rules():
        said = " ".join(rule["annotations"].values())
        shown = frozenset(re.findall(r"\$labels\.(\w+)", said))
        found.append(Query(rule["alert"], rule["expr"], shown))
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            shown = frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            found.append(Query(panel["title"], filled(target["expr"]), shown))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert match, variable["name"]
            found.append(Query(f"${variable['name']}", filled(match[1]), frozenset({match[2]})))
    return found


def filled(promql: str) -> str:
    """With values for Grafana's variables."""
    promql = promql.replace("$__rate_interval", "1m")
    for variable in dashboard()["templating"]["list"]:
        promql = promql.replace(f"${variable['name']}", ".*")
    assert "$" not in promql, promql
    return promql


def selectors(promql: str) -> list[Selector]:
    """Raises ValueError for what is no PromQL."""
    return list(_selectors(promql_parser.parse(promql), frozenset()))


def _selectors(node: Any, grouped: frozenset[str]) -> Iterator[Selector]:
    """grouped: labels by which what contains the node aggregates."""
    if isinstance(node, promql_parser.VectorSelector):
        matchers = node.matchers.matchers
        equal = {m.name: m.value for m in matchers if m.op == promql_parser.MatchOp.Equal}
        yield Selector(node.name, equal, grouped | {m.name for m in matchers})
        return
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
        assert node.modifier.type == promql_parser.AggModifierType.By
        grouped = frozenset(node.modifier.labels)
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if child := getattr(node, name, None):
            yield from _selectors(child, grouped)
    for child in getattr(node, "args", ()):
        yield from _selectors(child, grouped)


def result_labels(promql: str, of_metric: dict[str, set[str]]) -> set[str]:
    """The labels that a query's result has, if its metrics have these."""
    return _labels(promql_parser.parse(promql), of_metric)


def _labels(node: Any, of_metric: dict[str, set[str]]) -> set[str]:
    if isinstance(node, promql_parser.VectorSelector):
        return of_metric[node.name] | ADDED
    if isinstance(node, promql_parser.AggregateExpr):
        inner = _labels(node.expr, of_metric)
        return inner & set(node.modifier.labels) if node.modifier else set()
    for name in ("lhs", "expr", "vector_selector"):
        if child := getattr(node, name, None):
            return _labels(child, of_metric)
    vectors = [a for a in getattr(node, "args", ()) if not isinstance(a, _PLAIN)]
    return _labels(vectors[-1], of_metric) if vectors else set()


_PLAIN = (promql_parser.NumberLiteral, promql_parser.StringLiteral)
