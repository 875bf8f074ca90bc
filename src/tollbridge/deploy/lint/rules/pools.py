"""Objects that pick pods or Services by labels for others: InferencePool, ServiceMonitor."""

from __future__ import annotations

from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case, selects
from tollbridge.deploy.lint.engines import engines_of
from tollbridge.deploy.lint.findings import Document, Finding, at, items
from tollbridge.deploy.lint.rules.network import meant

_REVISIONS = ("disaggregatedset.x-k8s.io/revision", "tollbridge.io/revision", "pod-template-hash")


def rules(case: Case) -> Iterator[Finding]:
    for pool in case.of("InferencePool"):
        yield from _pool(case, pool)
    for monitor in case.of("ServiceMonitor"):
        yield from _monitor(case, monitor)


def _pool(case: Case, pool: Document) -> Iterator[Finding]:
    selector = pool.spec.get("selector")
    here = case.pods_in(pool.namespace)
    chosen = [pod for pod in here if selects(selector, pod.labels)]
    revision = next((each for each in _REVISIONS if each in (at(selector, ["matchLabels"]) or {})), None)
    wanted = at(selector, ["matchLabels"]) or {}
    if not chosen and revision is None and meant(pool, here, wanted):
        yield pool.finding(
            "selects-nothing",
            "spec.selector",
            what="no pod has these labels",
            why="the pool is empty",
            mend="select labels that the pods have",
        )
    listening = {engine.port for pod in chosen for engine in engines_of(pod)}
    for index, port in enumerate(items(pool.spec, "targetPorts")):
        if listening and port.get("number") not in listening:
            yield pool.finding(
                "target-port",
                f"spec.targetPorts[{index}].number",
                what=f"no selected pod listens on {port.get('number')}",
                why="requests are refused",
                mend=f"write {', '.join(map(str, sorted(listening)))}",
            )


def _monitor(case: Case, monitor: Document) -> Iterator[Finding]:
    if at(monitor.spec, ["namespaceSelector"]):
        return
    services = [each for each in case.of("Service") if each.namespace == monitor.namespace]
    labels = {each.name: {k: str(v) for k, v in (each.metadata.get("labels") or {}).items()} for each in services}
    chosen = [each for each in services if selects(monitor.spec.get("selector"), labels[each.name])]
    if services and not chosen:
        yield monitor.finding(
            "selects-nothing",
            "spec.selector",
            what="no Service has these labels",
            why="nothing is scraped: a ServiceMonitor selects by labels of the Service itself",
            mend="give the Service these labels in its metadata",
        )
    names = {port.get("name") for each in chosen for port in items(each.spec, "ports")}
    for index, endpoint in enumerate(items(monitor.spec, "endpoints")):
        if chosen and endpoint.get("port") is not None and endpoint["port"] not in names:
            yield monitor.finding(
                "target-port",
                f"spec.endpoints[{index}].port",
                what=f"no selected Service has a port called {endpoint['port']!r}",
                why="nothing is scraped",
                mend=f"name one of {', '.join(sorted(str(name) for name in names if name)) or '(none)'}",
            )
