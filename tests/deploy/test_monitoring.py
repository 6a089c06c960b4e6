"""Alerts, dashboard and reference name existing metrics; a real Prometheus loads them."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from config.environment import ROOT
from tests.deploy.exported_metrics import list_exported_metrics, list_series_names

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
RULE_TESTS = ROOT / "deploy" / "prometheus" / "alerts_test.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "aftertouch.json"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
FROM_PROMETHEUS = {"up", "ALERTS"}
STRINGS = re.compile(r"\"(\\.|[^\"\\])*\"")
NAMES = re.compile(r"(?<![\w$.:])[a-z_][\w:]*(?![\w:]*\s*\()", re.IGNORECASE)
GROUPINGS = re.compile(r"\b(by|without|on|ignoring)\s*\([^)]*\)")
MATCHERS = re.compile(r"\{[^}]*\}")
WORDS = {"and", "or", "unless", "by", "without", "on", "s", "m", "h", "d"}


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels():
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def names_in(expression):
    """The metrics that a query names."""
    bare = STRINGS.sub("", expression)
    for pattern in (GROUPINGS, MATCHERS, re.compile(r"\[[^\]]*\]")):
        bare = pattern.sub(" ", bare)
    return {name for name in NAMES.findall(bare) if name not in WORDS}


def labels_in(expression):
    """(metric, label) for each label that is matched."""
    return {
        (name, label)
        for name, matchers in re.findall(r"([a-z_][\w:]*)\{([^}]*)\}", expression)
        for label in re.findall(r"(\w+)\s*[!=]=?~?\s*\"", matchers)
    }


def promtool(*words):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("missing service: promtool (Debian: prometheus)")
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alert_rules_pass_promtool_tests():
    promtool("test", "rules", str(RULE_TESTS))


def test_each_alert_has_both_test_cases():
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    tested = [case for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in tested if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in tested if not case["exp_alerts"]} == alerts


def test_each_alert_has_severity_summary_and_action():
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
            assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]


@pytest.mark.django_db
def test_queries_name_only_exported_metrics_and_labels(valkey):
    metrics = list_exported_metrics()
    known = list_series_names(metrics) | FROM_PROMETHEUS | {rule["record"] for rule in rules() if "record" in rule}
    for query in [*(rule["expr"] for rule in rules()), *queries()]:
        assert names_in(query) <= known, query
        for name, label in labels_in(query):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            if found := metrics.get(name) or metrics.get(base):
                assert label in (*found.labels, "le"), query


@pytest.mark.django_db
def test_dashboard_shows_all_exported_metrics(valkey):
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for query in queries() for name in names_in(query)}
    assert set(list_exported_metrics()) - shown == set()


def test_dashboard_panels_do_not_overlap():
    taken = set()
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


@pytest.mark.django_db
def test_reference_lists_exported_metrics(valkey):
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| ([^|]*)\| ([^|]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    told = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}
    assert told == {name: (each.kind, each.labels) for name, each in list_exported_metrics().items()}
    assert len(rows) == len(told), "a metric is listed twice"


def test_metrics_reference_lists_all_alerts():
    text = PAGE.read_text("utf-8")
    assert [rule["alert"] for rule in rules() if "alert" in rule and f"`{rule['alert']}`" not in text] == []
