"""What the types of the cluster file cannot say: names are unique, addresses parse, values do not contradict.

Pure. `find_problem` returns the first problem in the order of the file, so that a person mends one thing at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tollbridge.config.address import is_loopback, parse_address
from tollbridge.config.cluster import DEFAULT_TENANT, ClusterConfig, DiscoveryConfig, WorkerConfig
from tollbridge.config.schema import Problem

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a DNS label: it becomes a host name and a metric label

_KEYS_OF = {
    "static": ("file",),
    "dns": ("min_ttl_s", "max_ttl_s"),
    "kubernetes": ("namespace", "selector", "engine", "connector", "http_port", "kv_port", "api", "account"),
}


def find_problem(cluster: ClusterConfig) -> Problem | None:
    """Return the first problem of `cluster`, None when it is sound."""
    return next(_problems(cluster), None)


def _problems(cluster: ClusterConfig) -> Iterator[Problem]:
    if not cluster.model:
        yield Problem(path="model", clause='is empty: name a model, such as "smollm2"')
    if not cluster.router.host:
        yield Problem(path="router.host", clause='is empty: name an address, such as "127.0.0.1"')
    yield from _tenant_problems(cluster)
    if cluster.secret.env is None and cluster.secret.file is None:
        yield Problem(path="secret", clause="names neither env nor file: set one of them")
    yield from _worker_list_problems(cluster)
    for index, worker in enumerate(cluster.workers):
        yield from _worker_problems(worker, f"workers[{index}]")
    yield from _address_clashes(cluster)
    yield from _link_problems(cluster)
    yield from _discovery_problems(cluster)


def _tenant_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    names: set[str] = {DEFAULT_TENANT}
    keys = set(cluster.router.api_keys or ())
    for index, tenant in enumerate(cluster.router.tenants):
        path = f"router.tenants[{index}]"
        if not _NAME.fullmatch(tenant.name) or tenant.name in names:
            clause = f'is "{tenant.name}", but must be lower-case letters, digits and hyphens, and differ from others'
            yield Problem(path=f"{path}.name", clause=clause)
        if not tenant.keys or not all(tenant.keys) or keys & set(tenant.keys):
            yield Problem(path=f"{path}.keys", clause="must be at least one key, none of them empty or another's")
        names.add(tenant.name)
        keys |= set(tenant.keys)


def _worker_list_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    if not cluster.workers and (cluster.lists_workers or cluster.discovery.kind == "dns"):
        yield Problem(path="workers", clause="is empty: list at least one worker")
    seen: dict[str, int] = {}
    for index, worker in enumerate(cluster.workers):
        if worker.name in seen:
            clause = f'is "{worker.name}", the name of workers[{seen[worker.name]}]: give each worker its own name'
            yield Problem(path=f"workers[{index}].name", clause=clause)
        seen.setdefault(worker.name, index)


def _worker_problems(worker: WorkerConfig, path: str) -> Iterator[Problem]:
    if not _NAME.fullmatch(worker.name):
        clause = f'is "{worker.name}", but must be lower-case letters, digits and hyphens, 63 at most'
        yield Problem(path=f"{path}.name", clause=clause)
    yield from _address_problems(f"{path}.url", worker.url, scheme="http://")
    yield from _address_problems(f"{path}.kv", worker.kv, scheme="")
    if worker.events is not None:
        yield from _address_problems(f"{path}.events", worker.events, scheme="tcp://")
    if worker.connector != "tollbridge" and worker.engine != "vllm":
        clause = f'is "{worker.connector}", which only vLLM has: write engine: vllm, or leave the key out'
        yield Problem(path=f"{path}.connector", clause=clause)
    if worker.cores is not None and not worker.cores:
        yield Problem(path=f"{path}.cores", clause="is an empty list: name cores, or leave the key out")


def _address_problems(path: str, text: str, *, scheme: str) -> Iterator[Problem]:
    try:
        parse_address(text, scheme=scheme)
    except ValueError as error:
        yield Problem(path=path, clause=f'is "{text}", but {error}')


def _address_clashes(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield each fixed address that two listeners would share."""
    seen: dict[str, str] = {}
    if cluster.router.port:
        seen[f"{cluster.router.host}:{cluster.router.port}"] = "router.port"
    for path, text in _listeners(cluster):
        address = parse_address(text.partition("://")[2] or text)
        other = seen.setdefault(str(address), path) if address.port else path
        if other != path:
            yield Problem(path=path, clause=f'is "{text}", the address of {other}: give each listener its own')


def _listeners(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    for index, worker in enumerate(cluster.workers):
        yield f"workers[{index}].url", worker.url.removesuffix("/")
        yield f"workers[{index}].kv", worker.kv
        if worker.events is not None:
            yield f"workers[{index}].events", worker.events


def _link_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    if not cluster.lists_workers:
        return  # on which hosts the workers run is found out
    hosts = {worker.host for worker in cluster.workers}
    for index, link in enumerate(cluster.links):
        for key, host in (("from", link.from_host), ("to", link.to_host)):
            if host not in hosts:
                clause = f'is "{host}", but no worker has that host: known are {", ".join(sorted(hosts))}'
                yield Problem(path=f"links[{index}].{key}", clause=clause)


def _discovery_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    found, defaults = cluster.discovery, DiscoveryConfig()
    for kind, keys in _KEYS_OF.items():
        for key in keys if kind != found.kind else ():
            if getattr(found, key) != getattr(defaults, key):
                clause = f'is for kind "{kind}" only, but discovery.kind is "{found.kind}"'
                yield Problem(path=f"discovery.{key}", clause=clause)
    if found.min_ttl_s > found.max_ttl_s:
        yield Problem(path="discovery.min_ttl_s", clause="is above discovery.max_ttl_s")
    if found.connector != "tollbridge" and found.engine != "vllm":
        yield Problem(path="discovery.connector", clause=f'is "{found.connector}", which only vLLM has')
    yield from _api_problems(found.api)
    if found.kind == "dns":
        yield from _template_problems(cluster)


def _api_problems(api: str | None) -> Iterator[Problem]:
    if api is None:
        return
    scheme = "http://" if api.startswith("http://") else "https://"
    yield from _address_problems("discovery.api", api, scheme=scheme)
    if scheme == "http://" and not is_loopback(parse_address(api, scheme=scheme).host):
        yield Problem(path="discovery.api", clause=f'is "{api}", but beyond this machine the token needs https://')


def _template_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """With DNS a worker's url is a name; a name that begins with an underscore is one of SRV records, which have the

    port.
    """
    for index, worker in enumerate(cluster.workers):
        address = parse_address(worker.url, scheme="http://")
        if (address.port == 0) != address.host.startswith("_"):
            clause = (
                f'is "{worker.url}", but needs the real port, or 0 and a name of SRV records: http://_http._tcp.NAME:0'
            )
            yield Problem(path=f"workers[{index}].url", clause=clause)
