"""The metric list: whole, documented, bounded; dashboard and rules ask only for what there is."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.router_rig import Rig, rig
from tollbridge.ui import export
from tollbridge.ui.catalogue import CONNECTOR, LABELS, catalogue
from tollbridge.ui.panels import ROWS, RULES

ROOT = Path(__file__).parents[2]
ENTRIES = {each.name: each for each in catalogue()}
SERIES = {name for each in ENTRIES.values() for name in each.series}
OF_VLLM = {"vllm:kv_cache_usage_perc"}  # our workers have them too
SPAN = "5m"


def expressions() -> list[str]:
    panels = [query.expr.replace("$__rate_interval", SPAN) for row in ROWS for p in row.panels for query in p.queries]
    return panels + [rule.expr for rule in RULES]


def selectors(node: object) -> list[promql_parser.VectorSelector]:
    """Return every series that an expression asks for."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    parts = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param")]
    parts += list(getattr(node, "args", None) or [])
    return [found for part in parts if part is not None for found in selectors(part)]


@pytest.mark.parametrize("name", ["metrics.md", "grafana.json", "alerts.yaml"])
def test_committed_files_are_current(name: str) -> None:
    made = {"metrics.md": export.docs, "grafana.json": export.grafana, "alerts.yaml": export.alerts}[name]()
    command = {"metrics.md": "docs", "grafana.json": "grafana", "alerts.yaml": "alerts"}[name]
    same = (ROOT / "docs" / name).read_text() == made
    assert same, f"make it again: tollbridge metrics {command} > docs/{name}"


def test_every_metric_has_a_sentence_and_bounded_labels() -> None:
    assert len(ENTRIES) == len(catalogue()) > 60
    for each in ENTRIES.values():
        assert each.text.endswith("."), each.name
        assert set(each.labels) <= set(LABELS), each.name
    used = {label for each in ENTRIES.values() for label in each.labels}
    assert used == set(LABELS)


def test_the_connectors_metrics_are_those_of_its_code() -> None:
    """vLLM is not installed here, so its module is read instead of imported."""
    tree = ast.parse((ROOT / "src/tollbridge/vllm/stats.py").read_text())
    found = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr in ("_counter", "_gauge", "_histogram"):
            name, text, *labels = [each.value for each in call.args if isinstance(each, ast.Constant)]
            kind = call.func.attr[1:]
            found.add((f"vllm:tollbridge_{name}{'_total' if kind == 'counter' else ''}", kind, text, tuple(labels)))
    assert found == {(each.name, each.kind, each.text, each.labels[2:]) for each in CONNECTOR}


@pytest.mark.parametrize("expr", expressions())
def test_queries_ask_for_what_there_is(expr: str) -> None:
    found = selectors(promql_parser.parse(expr))
    assert found
    for each in found:
        assert each.name in SERIES, f"{each.name} in {expr}"
        base = next(e for e in ENTRIES.values() if each.name in e.series)
        for matcher in each.matchers.matchers:
            assert matcher.name in base.labels


def test_legends_and_groups_use_labels_that_there_are() -> None:
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                named = set(re.findall(r"{{(\w+)}}", query.legend))
                names = {s.name for s in selectors(promql_parser.parse(query.expr.replace("$__rate_interval", SPAN)))}
                known = {label for e in ENTRIES.values() if set(e.series) & names for label in e.labels}
                assert named <= known | {"instance"}, panel.title


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(export.grafana())
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len({(x, y) for x, y, _, _ in places}) == len(places)
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_rules_are_what_prometheus_takes(tmp_path: Path) -> None:
    """By promtool where there is one; what it checks is checked by hand besides."""
    (group,) = yaml.safe_load(export.alerts())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) == len(RULES)
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[0-9]+(s|m|h)", rule["for"])
        promql_parser.parse(rule["expr"])
    tool = shutil.which("promtool")
    if tool is not None:
        path = tmp_path / "alerts.yaml"
        path.write_text(export.alerts())
        done = subprocess.run([tool, "check", "rules", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


async def _series(r: Rig) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    text = (await r.get("/metrics")).body.decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))) for s in samples if not s.name.endswith("_created")}


async def test_what_a_client_says_makes_no_series() -> None:
    """Whatever ids, models, sessions and users come, the series are the same as after the first few requests."""
    async with rig() as r:

        async def some(first: int) -> None:
            for number in range(first, first + 12):
                body = {"prompt": f"p{number}", "user": f"u{number}", "max_tokens": 2, "stream": number % 2 == 0}
                policy = ("local", "split", None)[number % 3]
                await r.post(body, policy=policy, x_request_id=f"id-{number}", x_session_id=f"s-{number}")
                await r.post({**body, "model": f"model-{number}"})
                await r.post(b"no json", x_request_id=f"bad-{number}")

        await some(0)
        before = await _series(r)
        await some(100)
        assert await _series(r) == before
        assert {name for name, _ in before} <= SERIES
        assert {label for _, labels in before for label, _ in labels} <= set(LABELS) | {"le"}
