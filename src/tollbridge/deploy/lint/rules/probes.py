"""When a vLLM server is started, sent requests, killed and let go."""

from __future__ import annotations

from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.engines import Engine, number
from tollbridge.deploy.lint.findings import Finding, Manifest, at, items

SHORTEST_START_S = 120  # a 7B model is read, compiled and captured
SHORTEST_LIVENESS_S = 30  # of failing: a long prefill keeps the server from answering
_PATHS = {"/health", "/ping", "/load", "/version", "/v1/models", "/metrics", "/is_sleeping"}
_DYNAMO_PATHS = {"/live", "/health"}
_DEFAULT_GRACE_S = 30


def rules(case: Case) -> Iterator[Finding]:
    for engine in case.engines:
        yield from _paths(engine)
        yield from _ready(engine)
        yield from _start(engine)
        yield from _live(engine)
        yield from _leave(engine)


def budget_s(probe: Manifest) -> float:
    """Return how long a probe may fail before it counts."""
    return float(probe.get("periodSeconds", 10)) * float(probe.get("failureThreshold", 3))


def _paths(engine: Engine) -> Iterator[Finding]:
    known = _DYNAMO_PATHS if engine.is_dynamo else _PATHS
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = at(engine.container, [probe, "httpGet"])
        if not isinstance(get, dict):
            continue
        path, port = str(get.get("path", "/")).partition("?")[0], get.get("port")
        where = f"{engine.path}.{probe}.httpGet"
        if path not in known:
            yield engine.pod.finding(
                "probe-path",
                f"{where}.path",
                what=f"vLLM has no {path}",
                why="the probe gets 404 (or starts a generation) and the pod is never ready, or killed",
                mend="use /health",
            )
        listening = _numbers(engine)
        value = number(port) if number(port) is not None else listening.get(str(port))
        if value is not None and value != engine.port and not engine.is_dynamo:
            yield engine.pod.finding(
                "probe-port",
                f"{where}.port",
                what=f"the probe asks port {value}, and vLLM listens on {engine.port}",
                why="the probe always fails",
                mend=f"ask port {engine.port}, or start vLLM with --port {value}",
            )


def _numbers(engine: Engine) -> dict[str, int]:
    ports = items(engine.container, "ports")
    return {
        str(each.get("name")): each["containerPort"] for each in ports if isinstance(each.get("containerPort"), int)
    }


def _ready(engine: Engine) -> Iterator[Finding]:
    if not engine.container.get("readinessProbe") and not engine.container.get("startupProbe"):
        yield engine.pod.finding(
            "no-readiness",
            engine.path,
            what="there is neither a readiness nor a startup probe",
            why="the pod is ready, and sent requests, while the model is still being loaded",
            mend="add a readinessProbe on /health, and a startupProbe as long as the model takes",
        )


def _start(engine: Engine) -> Iterator[Finding]:
    startup, liveness = engine.container.get("startupProbe"), engine.container.get("livenessProbe")
    if startup:
        allowed_s = budget_s(startup) + float(startup.get("initialDelaySeconds", 0))
        if allowed_s < SHORTEST_START_S:
            yield engine.pod.finding(
                "startup-short",
                f"{engine.path}.startupProbe",
                what=f"the server has {allowed_s:.0f} s to start (periodSeconds x failureThreshold)",
                why="loading and compiling a model takes longer; the kubelet kills it again and again",
                mend="raise failureThreshold, to an hour for a large model: periodSeconds 10, failureThreshold 360",
            )
    elif liveness:
        allowed_s = budget_s(liveness) + float(liveness.get("initialDelaySeconds", 0))
        if allowed_s < SHORTEST_START_S:
            yield engine.pod.finding(
                "no-startup",
                f"{engine.path}.livenessProbe",
                what=f"without a startupProbe the liveness probe kills the server {allowed_s:.0f} s after its start",
                why="the model is still being loaded",
                mend="add a startupProbe on /health with failureThreshold 360",
            )


def _live(engine: Engine) -> Iterator[Finding]:
    probe = engine.container.get("livenessProbe")
    if not probe:
        return
    threshold = int(probe.get("failureThreshold", 3))
    if threshold < 3 or budget_s(probe) < SHORTEST_LIVENESS_S:
        yield engine.pod.finding(
            "liveness-strict",
            f"{engine.path}.livenessProbe",
            what=f"the server is killed after {threshold} unanswered checks, {budget_s(probe):.0f} s, of "
            f"{probe.get('timeoutSeconds', 1)} s each",
            why="under load vLLM answers late; the restart loses every request and all KV, and loads the model again",
            mend="periodSeconds 20, timeoutSeconds 10, failureThreshold 6",
        )


def _leave(engine: Engine) -> Iterator[Finding]:
    if engine.pod.side is None or engine.transfer is None:
        return
    hook = at(engine.container, ["lifecycle", "preStop"])
    if engine.pod.side == "prefill" and not hook:
        yield engine.pod.finding(
            "no-drain",
            f"{engine.path}.lifecycle",
            what="a prefill worker has no preStop",
            why="it exits while decode workers are still fetching KV from it, in every rollout and node drain",
            mend="wait in preStop until KV has been fetched (python3 -m tollbridge.deploy.drain), or sleep 35 s",
        )
    slept = number(at(hook, ["sleep", "seconds"])) or 0
    needed = slept + (number(engine.options.get("shutdown-timeout")) or 0)
    grace = number(engine.pod.spec.get("terminationGracePeriodSeconds"))
    grace = _DEFAULT_GRACE_S if grace is None else grace
    if needed >= grace and needed > 0:
        yield engine.pod.finding(
            "grace-short",
            f"{engine.pod.spec_path}.terminationGracePeriodSeconds",
            what=f"preStop and --shutdown-timeout take up to {needed} s, and the pod is killed after {grace} s",
            why="requests are cut off in the middle",
            mend=f"set terminationGracePeriodSeconds to {needed + 15}",
        )
