"""Why a split would never happen, or be lost: connector, addresses, secret, variables of Services."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.engines import Engine, field_path, literal, number, variable
from tollbridge.deploy.lint.findings import Finding, at, items

OURS = "TollbridgeConnector"
KNOWN = [
    OURS,
    "NixlConnector",
    "NixlPushConnector",
    "MultiConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "P2pNcclConnector",
    "SharedStorageConnector",
    "ExampleConnector",
    "OffloadingConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "DynamoConnector",
    "PdConnector",
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "DecodeBenchConnector",
    "MoRIIOConnector",
    "PyNcclConnector",
    "SimpleCPUOffloadConnector",
]
_LOCAL = ("localhost", "127.0.0.1", "::1")
_ROLES = {"kv_producer", "kv_consumer", "kv_both"}
_WRONG_ROLE = {"prefill": "kv_consumer", "decode": "kv_producer"}


def rules(case: Case) -> Iterator[Finding]:
    for engine in case.engines:
        yield from _configured(case, engine)
        yield from _role(engine)
        yield from _side_channel(engine)
        yield from _ours(case, engine)
        yield from _address(engine)
        yield from _service_links(case, engine)
        yield from _ucx(engine)


def _configured(case: Case, engine: Engine) -> Iterator[Finding]:
    text = engine.options.get("kv-transfer-config")
    where = f"{engine.path}.args"
    if text is not None and engine.transfer is None:
        try:
            json.loads(text)
            reason = "is no JSON object"
        except ValueError as error:
            reason = f"is no JSON: {error}"
        yield engine.pod.finding(
            "connector-json",
            where,
            what=f"--kv-transfer-config {reason}",
            why="vLLM does not start",
            mend='write it on one line in single quotes: \'{"kv_connector": "...", "kv_role": "kv_both"}\'',
        )
    if text is None and engine.transfer is None and _is_split(case, engine) and not dynamo_moves_kv(engine):
        yield engine.pod.finding(
            "no-connector",
            where,
            what=f"{engine.pod.title} runs vLLM without --kv-transfer-config",
            why="no KV ever moves: each request is prefilled where it is decoded, and nothing says so",
            mend="add --kv-transfer-config with the same connector on both roles",
        )
    for config in engine.connectors:
        name = str(config.get("kv_connector"))
        near = _near(name)
        if name not in KNOWN and near and not config.get("kv_connector_module_path"):
            yield engine.pod.finding(
                "connector-name",
                where,
                what=f"vLLM has no connector {name!r}",
                why="vLLM does not start",
                mend=f"did you mean {near}?",
            )


def _near(name: str) -> str | None:
    known = {each.lower(): each for each in KNOWN}
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.8)
    return known[found[0]] if found else None


def _is_split(case: Case, engine: Engine) -> bool:
    """Whether somebody means this worker to prefill or decode for another."""
    sides = {each.pod.side for each in case.group_of(engine)}
    return engine.pod.side is not None and len(sides - {None}) == 2


def dynamo_moves_kv(engine: Engine) -> bool:
    """Dynamo's own launcher configures NIXL for `--disaggregation-mode`."""
    mode = engine.options.get("disaggregation-mode")
    flags = {"is-prefill-worker", "is-decode-worker"} & set(engine.options)
    return engine.is_dynamo and (mode in ("prefill", "decode") or bool(flags))


def _role(engine: Engine) -> Iterator[Finding]:
    for config in engine.connectors[:1]:
        role = str(config.get("kv_role"))
        where = f"{engine.path}.args"
        if role not in _ROLES:
            yield engine.pod.finding(
                "kv-role",
                where,
                what=f"kv_role is {config.get('kv_role')!r}",
                why="vLLM does not start",
                mend="write kv_both, or kv_producer for prefill and kv_consumer for decode",
            )
        elif engine.pod.side and role == _WRONG_ROLE[engine.pod.side]:
            yield engine.pod.finding(
                "kv-role",
                where,
                what=f"kv_role is {role} on a {engine.pod.side} worker",
                why="prefill produces KV and decode consumes it: this way nothing is sent",
                mend="write kv_both, or swap the roles",
            )


def _side_channel(engine: Engine) -> Iterator[Finding]:
    if engine.uses("Nixl") is None:
        return
    name = "VLLM_NIXL_SIDE_CHANNEL_HOST"
    entry = variable(engine.container, name)
    if entry is not None and field_path(engine.container, name) == "status.podIP":
        return
    if entry is None:
        what = f"{name} is not set, so it is localhost"
    elif "valueFrom" in entry and field_path(engine.container, name):
        what = f"{name} is {field_path(engine.container, name)}, not the pod's IP"
        if field_path(engine.container, name) == "status.podIPs" or engine.pod.spec.get("hostNetwork"):
            return
    elif "valueFrom" in entry:
        return  # from a ConfigMap or Secret: not known
    else:
        what = f"{name} is {entry.get('value')!r}"
    yield engine.pod.finding(
        "side-channel",
        f"{engine.path}.env",
        what=what,
        why="prefill tells decode this address: decode dials itself, or nobody (engine ID mismatch, crash, timeout)",
        mend="valueFrom: {fieldRef: {fieldPath: status.podIP}}",
    )


def _ours(case: Case, engine: Engine) -> Iterator[Finding]:
    config = engine.uses(OURS)
    if config is None:
        return
    where = f"{engine.path}.args"
    extra = config.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    host = str(extra.get("kv_host", "127.0.0.1"))
    if not _is_pod_ip(engine, host) and not _is_pod_ip(engine, str(extra.get("advertise_host", ""))):
        yield engine.pod.finding(
            "kv-host",
            where,
            what=f"kv_host is {host}",
            why="other pods cannot reach it, so no KV ever arrives",
            mend='set a variable POD_IP from status.podIP, and write "kv_host": "$(POD_IP)"',
        )
    if config.get("kv_connector_module_path") != "tollbridge.vllm.connector":
        yield engine.pod.finding(
            "connector-module",
            where,
            what="kv_connector_module_path is not tollbridge.vllm.connector",
            why="vLLM does not know the connector, and does not start",
            mend='add "kv_connector_module_path": "tollbridge.vllm.connector"',
        )
    if config.get("kv_load_failure_policy") != "recompute":
        yield engine.pod.finding(
            "load-failure",
            where,
            what="kv_load_failure_policy is not recompute",
            why="vLLM's default fails a request whose KV does not come, in place of computing it",
            mend='add "kv_load_failure_policy": "recompute"',
        )
    if "enable-prompt-tokens-details" not in engine.options:
        yield engine.pod.finding(
            "verify",
            where,
            what="--enable-prompt-tokens-details is missing",
            why="the router cannot tell whether a split happened",
            mend="add --enable-prompt-tokens-details",
        )
    yield from _installed(engine)
    yield from _secret(engine, str(extra.get("secret_env", "TOLLBRIDGE_SECRET")))
    yield from _kv_port(engine, number(extra.get("kv_port", 7801)))


def _is_pod_ip(engine: Engine, text: str) -> bool:
    for opening, closing in (("$(", ")"), ("${", "}"), ("$", "")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
            name = text[len(opening) : len(text) - len(closing)]
            return field_path(engine.container, name) in ("status.podIP", "status.podIPs")
    return False


def _installed(engine: Engine) -> Iterator[Finding]:
    stock = engine.image.startswith("vllm/") or "/vllm/vllm-openai" in engine.image
    if stock and not literal(engine.container, "PYTHONPATH") and "pip install" not in str(engine.container):
        yield engine.pod.finding(
            "connector-missing",
            f"{engine.path}.image",
            what=f"{engine.image} does not contain Tollbridge's connector",
            why="vLLM does not start: no module named tollbridge",
            mend="use an image that has it, or bring it by an init container and PYTHONPATH",
        )


def _secret(engine: Engine, name: str) -> Iterator[Finding]:
    entry = variable(engine.container, name)
    if entry is None and not engine.container.get("envFrom"):
        yield engine.pod.finding(
            "secret",
            f"{engine.path}.env",
            what=f"{name} is not set",
            why="workers refuse each other's KV",
            mend=f"take {name} from a Secret by secretKeyRef, the same in both roles and the router",
        )
    elif entry is not None and entry.get("value"):
        yield engine.pod.finding(
            "secret",
            f"{engine.path}.env",
            what=f"{name} stands in the manifest in plain text",
            why="everybody who may read pods knows it",
            mend="take it from a Secret by secretKeyRef",
        )


def _kv_port(engine: Engine, port: int | None) -> Iterator[Finding]:
    named = next((each for each in items(engine.container, "ports") if each.get("name") == "kv"), None)
    if named is not None and port is not None and named.get("containerPort") != port:
        yield engine.pod.finding(
            "kv-port",
            f"{engine.path}.ports",
            what=f"kv_port is {port}, and the port named kv {named.get('containerPort')}",
            why="the router tells decode the port named kv",
            mend=f"write containerPort: {port}",
        )
    if named is None and "tollbridge.io/role" in engine.pod.labels and port != 7801:
        yield engine.pod.finding(
            "kv-port",
            f"{engine.path}.ports",
            what=f"kv_port is {port}, and no port is named kv",
            why="the router takes 7801 where no port has that name",
            mend="add a containerPort with the name kv",
        )


def _address(engine: Engine) -> Iterator[Finding]:
    host = engine.options.get("host")
    if host in _LOCAL:
        yield engine.pod.finding(
            "host-local",
            f"{engine.path}.args",
            what=f"vLLM listens on {host}",
            why="no other pod, and no probe, reaches it",
            mend="--host 0.0.0.0, or leave it out",
        )
    if engine.pod.spec.get("hostNetwork") and engine.transfer is not None:
        yield engine.pod.finding(
            "host-network",
            f"{engine.pod.spec_path}.hostNetwork",
            what="the pod uses the host's network",
            why="its IP may be the node's public one, workers on one node fight for the KV port, and no NetworkPolicy "
            "protects it",
            mend="take hostNetwork away; RDMA needs its device and IPC_LOCK, not the host's network",
        )


def _service_links(case: Case, engine: Engine) -> Iterator[Finding]:
    services = [each for each in case.of("Service") if each.namespace == engine.pod.document.namespace]
    culprit = next((each for each in services if each.name == "vllm" or each.name.startswith("vllm-")), None)
    if engine.pod.spec.get("enableServiceLinks") is False:
        return
    what = "enableServiceLinks is not false"
    if culprit is not None:
        what += f", and there is a Service called {culprit.name}"
    yield engine.pod.finding(
        "service-links",
        f"{engine.pod.spec_path}.enableServiceLinks",
        what=what,
        why="a Service called vllm gives every pod VLLM_PORT=tcp://…, and vLLM does not start",
        mend="set enableServiceLinks: false",
    )


def _ucx(engine: Engine) -> Iterator[Finding]:
    if engine.uses("Nixl") is None:
        return
    text = literal(engine.container, "UCX_TLS")
    if text is None or text.startswith("^"):
        return
    transports = {each.strip() for each in text.split(",")}
    fabric = {each for each in transports if each.split("_")[0] in ("rc", "ud", "dc", "ib", "rdmacm", "mlx5")}
    if not transports & {"tcp", "all"} and not fabric:
        yield engine.pod.finding(
            "ucx",
            f"{engine.path}.env",
            what=f"UCX_TLS is {text}",
            why="none of these leaves the pod",
            mend="add tcp, or rc with an RDMA device",
        )
    limits = at(engine.container, ["resources", "limits"]) or {}
    if (
        fabric
        and "tcp" not in transports
        and not any("rdma" in name or "hca" in name or "roce" in name for name in limits)
    ):
        claims = at(engine.container, ["resources", "claims"])
        if not claims and not at(engine.container, ["securityContext", "privileged"]):
            yield engine.pod.finding(
                "ucx",
                f"{engine.path}.resources",
                what=f"UCX_TLS is {text}, and the pod has no RDMA device",
                why="NIXL_ERR_BACKEND when the first KV is fetched",
                mend="add the device (rdma/…), or tcp to UCX_TLS",
            )
