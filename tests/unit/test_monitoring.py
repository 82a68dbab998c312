"""The dashboard and the rules as files; tests/e2e/test_live_metrics.py has the servers."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess

import monitoring
import pytest
import yaml


def test_every_query_is_promql():
    found = monitoring.queries()
    assert len(found) > 40
    for query in found:
        assert monitoring.selectors(query.promql), query


@pytest.mark.parametrize("wrong", ["rate(vllm:x[5m]", "sum by le (x)", "vllm:x[5m] > 1"])
def test_what_is_no_promql_is_seen(wrong):
    with pytest.raises(ValueError):
        monitoring.selectors(wrong)


def test_selectors_are_found_wherever_they_are():
    promql = 'sum by (a) (rate(x{b="1"}[5m])) / on (a) y > bool 1 and -z{c=~"."} unless absent(v)'
    found = {s.metric: (s.equal, s.labels) for s in monitoring.selectors(promql)}
    assert found == {
        "x": ({"b": "1"}, {"a", "b"}),
        "y": ({}, set()),
        "z": ({}, {"c"}),
        "v": ({}, set()),
    }


def test_alerts_say_what_they_are():
    names = [rule["alert"] for rule in monitoring.rules()]
    assert len(set(names)) == len(names)
    for rule in monitoring.rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule
        assert set(rule["annotations"]) == {"summary", "description"}, rule
        assert re.fullmatch(r"\d+[mh]", rule["for"]), rule


def test_every_alert_is_in_the_docs():
    text = (monitoring.FOLDER.parents[1] / "docs" / "monitor.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", text, re.M)) >= {r["alert"] for r in monitoring.rules()}


def test_every_alert_has_a_case():
    """That it is right is for promtool, below."""
    tests = yaml.safe_load((monitoring.FOLDER / "rules_test.yml").read_text())["tests"]
    cases = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    assert cases == {rule["alert"] for rule in monitoring.rules()}


def test_dashboard_can_be_imported():
    """What Grafana wants: panels that do not overlap, their own ids, a data source to choose."""
    dashboard = monitoring.dashboard()
    panels = dashboard["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    for a, b in itertools.combinations([p["gridPos"] for p in panels], 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"].endswith(".") and panel["targets"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]
    names = [v["name"] for v in dashboard["templating"]["list"]]
    assert names == ["datasource", "instance", "model"]
    assert "id" not in dashboard  # of the Grafana that it came from


@pytest.mark.parametrize(
    "command", ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"]
)
def test_promtool(command):
    """Also whether the alerts fire when they should: deploy/monitoring/rules_test.yml."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: it comes with Prometheus, not from pip")
    done = subprocess.run(
        [promtool, *command.split()],
        cwd=monitoring.FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
