"""The metric list as files for others: docs, a Grafana dashboard, Prometheus alert rules. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from tollbridge.ui.catalogue import LABELS, Entry, catalogue
from tollbridge.ui.panels import ROWS, RULES, Panel, Row, Rule

_WIDTH, _HEIGHT, _ROW_HEIGHT, _COLUMNS = 8, 8, 1, 24
_SOURCES = {
    "router": "The router, `/metrics` on its own port.",
    "worker": "Embedded workers, `/metrics` of each. Names that begin with `vllm:` mean what they mean in vLLM.",
    "vLLM connector": "vLLM workers add these to vLLM's own.",
}


def docs() -> str:
    """Return docs/metrics.md."""
    entries = catalogue()
    parts = [
        "# Metrics\n",
        "Made from the code by `tollbridge metrics docs`; a test keeps it current. `tollbridge metrics grafana` and "
        "`tollbridge metrics alerts` print\nthe dashboard and the rules of [grafana.json](grafana.json) and "
        "[alerts.yaml](alerts.yaml), which are made from the same list.\n",
    ]
    for source, text in _SOURCES.items():
        parts += [
            f"## {source[0].upper()}{source[1:]}\n",
            f"{text}\n",
            _table([e for e in entries if e.source == source]),
        ]
    parts += [
        "## Labels\n",
        "Each label has a bounded set of values: ids, prompts, models that a client names and keys are never labels.\n",
        "| label | values |\n|---|---|\n" + "".join(f"| `{name}` | {text} |\n" for name, text in LABELS.items()),
        "## Alerts\n",
        "| alert | when | for | what to do |\n|---|---|---|---|\n" + "".join(map(_rule_row, RULES)),
    ]
    return "\n".join(parts)


def grafana() -> str:
    """Return a Grafana dashboard; its data source is chosen there."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(_row(row, top, len(panels) + 1))
        top += _ROW_HEIGHT
        for at, panel in enumerate(row.panels):
            down, right = divmod(at * _WIDTH, _COLUMNS)
            place = {"x": right, "y": top + down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(panel, place, len(panels) + 1))
        top += -(-len(row.panels) * _WIDTH // _COLUMNS) * _HEIGHT
    dashboard = {
        "uid": "tollbridge",
        "title": "Tollbridge",
        "tags": ["tollbridge"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


def alerts() -> str:
    """Return a rule file for Prometheus."""
    rules = [
        {
            "alert": rule.name,
            "expr": rule.expr,
            "for": rule.hold,
            "labels": {"severity": rule.severity},
            "annotations": {"summary": rule.summary, "description": rule.action},
        }
        for rule in RULES
    ]
    return yaml.safe_dump({"groups": [{"name": "tollbridge", "rules": rules}]}, sort_keys=False, width=1000)


def _table(entries: Sequence[Entry]) -> str:
    rows = "".join(
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{name}`' for name in each.labels) or '-'} | {each.text} |\n"
        for each in entries
    )
    return f"| metric | kind | labels | |\n|---|---|---|---|\n{rows}"


def _rule_row(rule: Rule) -> str:
    expr = rule.expr.replace("|", "\\|")
    return f"| `{rule.name}` ({rule.severity}): {rule.summary} | `{expr}` | {rule.hold} | {rule.action} |\n"


def _row(row: Row, top: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": _COLUMNS, "h": _ROW_HEIGHT}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }
