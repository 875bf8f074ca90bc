"""Services, policies, budgets, monitors: whether they reach the pods that they are meant for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from tollbridge.deploy.lint.case import Case, selects
from tollbridge.deploy.lint.engines import Engine, literal, number, words_of
from tollbridge.deploy.lint.findings import Document, Finding, at, items
from tollbridge.deploy.lint.pods import SIDES, PodView
from tollbridge.deploy.lint.rules.transfer import OURS

_OF_A_REVISION = (
    "disaggregatedset.x-k8s.io/revision",
    "leaderworkerset.sigs.k8s.io/template-revision-hash",
    "nvidia.com/dynamo-worker-hash",
    "pod-template-hash",
    "controller-revision-hash",
    "tollbridge.io/revision",
)
_GENERATED = re.compile(r"\b[a-z0-9][-a-z0-9]*-[0-9a-f]{8}-(prefill|decode)(-prv)?\b")


def rules(case: Case) -> Iterator[Finding]:
    for service in case.of("Service"):
        yield from _service(case, service)
    for budget in case.of("PodDisruptionBudget"):
        yield from _budget(case, budget)
    for monitor in case.of("PodMonitor"):
        yield from _monitor(case, monitor)
    for engine in case.engines:
        yield from _policies(case, engine)
        yield from _names(case, engine)
        yield from _requests(case, engine)
    yield from _generated_names(case)


def _service(case: Case, service: Document) -> Iterator[Finding]:
    selector = service.spec.get("selector")
    if not isinstance(selector, dict) or not selector:
        return
    revision = next((each for each in _OF_A_REVISION if each in selector), None)
    if revision is not None:
        yield service.finding(
            "selector-revision",
            "spec.selector",
            what=f"the selector has {revision}",
            why="the next rollout makes pods with another one, and the Service is empty",
            mend="select by name and role only",
        )
        return
    here = case.pods_in(service.namespace)
    chosen = [pod for pod in here if selects({"matchLabels": selector}, pod.labels)]
    elsewhere = [pod for pod in case.pods if selects({"matchLabels": selector}, pod.labels)]
    if not chosen and elsewhere:
        yield service.finding(
            "selects-nothing",
            "metadata.namespace",
            what=f"its pods are in the namespace {elsewhere[0].document.namespace}, not in {service.namespace}",
            why="a Service selects in its own namespace only",
            mend=f"write namespace: {elsewhere[0].document.namespace}",
        )
    elif not chosen and meant(service, here, selector):
        yield service.finding("selects-nothing", "spec.selector", **_nothing(here, selector))
    yield from _service_ports(service, chosen)


def meant(document: Document, pods: list[PodView], selector: dict[str, Any]) -> bool:
    """Whether a selector that picks none of `pods` was meant for one of them, rather than for pods of other files."""
    if not pods or not selector:
        return False
    if any(side in document.name for side in SIDES):
        return True
    return any(_resembles(pod, key, str(value)) for pod in pods for key, value in selector.items())


def _resembles(pod: PodView, key: str, value: str) -> bool:
    if pod.own_labels.get(key) == value or pod.labels.get(key) == value:
        return True
    return difflib.SequenceMatcher(None, pod.labels.get(key, ""), value).ratio() >= 0.75


def _nothing(pods: list[PodView], selector: dict[str, Any]) -> dict[str, str]:
    """Name the pod that fits best, and where it differs."""
    best = max(pods, key=lambda pod: sum(pod.labels.get(key) == value for key, value in selector.items()))
    wrong = [key for key, value in selector.items() if best.labels.get(key) != value]
    has = ", ".join(f"{key}={best.labels.get(key, '(none)')}" for key in wrong)
    why = "it leads nowhere"
    if "app" in wrong and best.document.kind == "DisaggregatedSet":
        why += "; a DisaggregatedSet overwrites the label app of its pods"
    wanted = ", ".join(f"{key}={selector[key]}" for key in wrong)
    return {
        "what": f"no pod has {wanted}: {best.title} has {has}",
        "why": why,
        "mend": "select labels that the pods have",
    }


def _service_ports(service: Document, pods: list[PodView]) -> Iterator[Finding]:
    ports = items(service.spec, "ports")
    if not ports and service.spec.get("type") != "ExternalName":
        yield service.finding(
            "service-ports",
            "spec.ports",
            what="the Service has no ports",
            why="a router that looks for a named port finds none",
            mend="list them, with names",
        )
    for index, port in enumerate(ports):
        if len(ports) > 1 and not port.get("name"):
            yield service.finding(
                "service-ports",
                f"spec.ports[{index}].name",
                what="one of several ports has no name",
                why="the API server refuses the Service",
                mend="give each port a name",
            )
        target = port.get("targetPort", port.get("port"))
        names = {each.get("name"): each for pod in pods for _, c in pod.containers for each in items(c, "ports")}
        if isinstance(target, str) and not target.isdigit() and pods and target not in names:
            yield service.finding(
                "target-port",
                f"spec.ports[{index}].targetPort",
                what=f"no pod has a port called {target!r}",
                why="connections are refused",
                mend=f"name one of {', '.join(sorted(str(n) for n in names if n)) or '(none)'}",
            )
        numbers = {each.get("containerPort") for each in names.values()}
        if number(target) is not None and pods and numbers and number(target) not in numbers:
            yield service.finding(
                "target-port",
                f"spec.ports[{index}].targetPort",
                what=f"no selected pod listens on {target}",
                why="connections are refused",
                mend=f"use {', '.join(sorted(str(n) for n in numbers))}, or a port's name",
            )


def _budget(case: Case, budget: Document) -> Iterator[Finding]:
    low, high = budget.spec.get("minAvailable"), budget.spec.get("maxUnavailable")
    if (low is None) == (high is None):
        yield budget.finding(
            "budget",
            "spec",
            what=f"{'both' if low is not None else 'none'} of minAvailable and maxUnavailable",
            why="the API server refuses it, or it protects nothing",
            mend="write maxUnavailable: 1",
        )
        return
    here = case.pods_in(budget.namespace)
    chosen = [pod for pod in here if selects(budget.spec.get("selector"), pod.labels)]
    total = sum(pod.replicas for pod in chosen)
    wanted = at(budget.spec, ["selector", "matchLabels"]) or {}
    if not chosen and meant(budget, here, wanted):
        yield budget.finding("selects-nothing", "spec.selector", **_nothing(here, wanted))
    blocks = high in (0, "0", "0%") or low == "100%" or (isinstance(low, int) and low >= total)
    if chosen and blocks:
        yield budget.finding(
            "budget",
            "spec",
            what=f"none of {total} pods may ever be away",
            why="kubectl drain waits for ever, and with it every upgrade of a node",
            mend="write maxUnavailable: 1",
        )


def _monitor(case: Case, monitor: Document) -> Iterator[Finding]:
    if at(monitor.spec, ["namespaceSelector"]):
        return
    here = case.pods_in(monitor.namespace)
    chosen = [pod for pod in here if selects(monitor.spec.get("selector"), pod.labels)]
    if not chosen and meant(monitor, here, at(monitor.spec, ["selector", "matchLabels"]) or {}):
        yield monitor.finding(
            "selects-nothing",
            "spec.selector",
            what="no pod has these labels",
            why="nothing is scraped",
            mend="select labels that the pods have",
        )
    names = {each.get("name") for pod in chosen for _, c in pod.containers for each in items(c, "ports")}
    for index, endpoint in enumerate(items(monitor.spec, "podMetricsEndpoints")):
        port = endpoint.get("port")
        if chosen and port is not None and port not in names:
            yield monitor.finding(
                "target-port",
                f"spec.podMetricsEndpoints[{index}].port",
                what=f"no pod has a port called {port!r}",
                why="nothing is scraped",
                mend=f"name one of {', '.join(sorted(str(n) for n in names if n)) or '(none)'}",
            )


def _policies(case: Case, engine: Engine) -> Iterator[Finding]:
    """Whether KV may flow: decode dials prefill with our connector and with NIXL's alike."""
    if engine.pod.side != "prefill" or engine.transfer is None:
        return
    peers = [each for each in case.group_of(engine) if each.pod.side == "decode"]
    port = _kv_port(engine)
    for peer in peers:
        incoming = _selecting(case, engine.pod, "Ingress")
        if incoming and not any(_permits(each, "ingress", peer.pod, port) for each in incoming):
            yield incoming[0].finding(
                "policy",
                "spec.ingress",
                what=f"decode pods may not reach port {port} of prefill pods",
                why="no KV ever arrives",
                mend=f"add an ingress rule from the decode pods for port {port}",
            )
        outgoing = _selecting(case, peer.pod, "Egress")
        if outgoing and not any(_permits(each, "egress", engine.pod, port) for each in outgoing):
            yield outgoing[0].finding(
                "policy",
                "spec.egress",
                what=f"decode pods may not go to port {port} of prefill pods",
                why="no KV ever arrives",
                mend=f"add an egress rule to the prefill pods for port {port}",
            )
        if incoming and all(_has_ports(each) for each in incoming) and _takes_any_port(engine):
            yield engine.pod.finding(
                "policy",
                f"{engine.path}.env",
                what="a NetworkPolicy lists ports, and UCX takes any it likes",
                why="KV moves on ephemeral ports, which are shut",
                mend="set UCX_TCP_PORT_RANGE, and open that range",
            )


def _names(case: Case, engine: Engine) -> Iterator[Finding]:
    """Whether a worker whose egress is restricted may ask DNS."""
    outgoing = _selecting(case, engine.pod, "Egress")
    rules = [rule for policy in outgoing for rule in items(policy.spec, "egress")]
    if outgoing and not any(_covers(rule, 53) and _leaves(rule) for rule in rules):
        yield outgoing[0].finding(
            "policy-dns",
            "spec.egress",
            what="no egress rule lets port 53 pass",
            why="no name can be looked up: neither the model's hub nor a Service",
            mend="add an egress rule for port 53, UDP and TCP",
        )


def _leaves(rule: dict[str, Any]) -> bool:
    """Whether a rule reaches beyond the namespace, where the cluster's DNS is."""
    peers = items(rule, "to")
    return not peers or any(key in peer for peer in peers for key in ("namespaceSelector", "ipBlock"))


def _requests(case: Case, engine: Engine) -> Iterator[Finding]:
    """Whether routers of ours may reach a worker's HTTP port."""
    incoming = _selecting(case, engine.pod, "Ingress")
    routers = [pod for pod in case.pods_in(engine.pod.document.namespace) if is_router(pod)]
    for router in routers:
        if incoming and not any(_permits(each, "ingress", router, engine.port) for each in incoming):
            yield incoming[0].finding(
                "policy",
                "spec.ingress",
                what=f"routers may not reach port {engine.port} of {engine.pod.title}",
                why="the worker is never healthy for them, and gets no request",
                mend=f"add an ingress rule from the router pods for port {engine.port}",
            )


def is_router(pod: PodView) -> bool:
    return any(words_of(container)[:2] == ["tollbridge", "router"] for _, container in pod.containers)


def _takes_any_port(engine: Engine) -> bool:
    tcp = "tcp" in (literal(engine.container, "UCX_TLS") or "tcp")
    return engine.uses("Nixl") is not None and tcp and literal(engine.container, "UCX_TCP_PORT_RANGE") is None


def _kv_port(engine: Engine) -> int:
    ours = engine.uses(OURS)
    if ours is not None:
        return number(at(ours, ["kv_connector_extra_config", "kv_port"])) or 7801
    return number(literal(engine.container, "VLLM_NIXL_SIDE_CHANNEL_PORT")) or 5600


def _selecting(case: Case, pod: PodView, direction: str) -> list[Document]:
    found = [each for each in case.of("NetworkPolicy") if each.namespace == pod.document.namespace]
    return [
        each for each in found if selects(each.spec.get("podSelector"), pod.labels) and direction in _directions(each)
    ]


def _directions(policy: Document) -> list[str]:
    given = policy.spec.get("policyTypes")
    return list(given) if given else ["Ingress", *(["Egress"] if "egress" in policy.spec else [])]


def _permits(policy: Document, key: str, peer: PodView, port: int) -> bool:
    return any(
        _to(rule, "from" if key == "ingress" else "to", peer) and _covers(rule, port)
        for rule in items(policy.spec, key)
    )


def _to(rule: dict[str, Any], key: str, peer: PodView) -> bool:
    peers = items(rule, key)
    return not peers or any(_is_peer(each, peer) for each in peers)


def _is_peer(entry: dict[str, Any], peer: PodView) -> bool:
    if "ipBlock" in entry:
        return True
    return "podSelector" not in entry or selects(entry["podSelector"], peer.labels)


def _covers(rule: dict[str, Any], port: int) -> bool:
    ports = items(rule, "ports")
    if not ports:
        return True
    for each in ports:
        first = each.get("port")
        if first is None or (number(first) is None):
            return True  # all ports, or a name that we take on trust
        lowest = number(first) or 0
        if lowest <= port <= int(each.get("endPort", lowest)):
            return True
    return False


def _has_ports(policy: Document) -> bool:
    return all(items(rule, "ports") for rule in items(policy.spec, "ingress"))


def _generated_names(case: Case) -> Iterator[Finding]:
    """A name with a revision in it, written into a manifest."""
    for pod in case.pods:
        for path, container in pod.all_containers:
            texts = [str(each) for key in ("command", "args") for each in container.get(key) or []]
            texts += [str(each.get("value")) for each in items(container, "env")]
            found = next((match for text in texts if (match := _GENERATED.search(text))), None)
            if found is not None:
                yield pod.finding(
                    "generated-name",
                    path,
                    what=f"{found[0]} is a name that LWS made, with a revision in it",
                    why="the next rollout makes another one",
                    mend="use a Service of your own, or let the router watch pods",
                )
