"""`tollbridge metrics`: the metric list as documentation, Grafana dashboard or Prometheus rules, on stdout."""

from __future__ import annotations

from typing import Literal


def metrics(what: Literal["docs", "grafana", "alerts"], /) -> int:
    """Print docs (Markdown), grafana (a dashboard to import) or alerts (a Prometheus rule file)."""
    from tollbridge.ui import export

    print(getattr(export, what)(), end="")
    return 0
