"""Command line and environment of a worker's engine, as a container has them; `$(POD_IP)` is left to the kubelet."""

from __future__ import annotations

from dataclasses import dataclass

from tollbridge.deploy.render.site import EVENTS_PORT, HTTP_PORT, SECRET_KEY, UCX_PORTS, Manifest, Role, Site
from tollbridge.vllm.launch import VllmWorker, command, transfer_options

CACHE = "/models"
HOME = "/home/worker"
PLUGIN = "/opt/tollbridge-plugin"
CONFIG = "/etc/tollbridge"
_HEAD = 3  # python3 -m MODULE


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`command` and `args` of the container, and its variables as `env` has them."""

    command: list[str]
    args: list[str]
    env: list[Manifest]


def engine_of(site: Site, role: Role) -> Engine:
    """Return how a worker of `role` is started."""
    made = _vllm(site, role) if site.deploy.engine == "vllm" else _embedded(role)
    env = [_field("POD_IP", "status.podIP"), *_secret_variables(site), *made.env, *_folders(site)]
    extra = [{"name": name, "value": value} for name, value in site.role(role).env.items()]
    names = {each["name"] for each in extra}
    return Engine(command=made.command, args=made.args, env=[*(e for e in env if e["name"] not in names), *extra])


def _vllm(site: Site, role: Role) -> Engine:
    worker = VllmWorker(
        model=site.cluster.model,
        host="0.0.0.0",  # noqa: S104 (of the pod; who may come is the NetworkPolicy's)
        port=HTTP_PORT,
        kv_host="$(POD_IP)",
        kv_port=site.kv_port,
        events_port=EVENTS_PORT,
        served_model_name=site.cluster.model,
        media=site.deploy.connector,
        transfer=transfer_options(site.cluster.transfer),
        python="python3",
        extra_args=_flags(site, role),
    )
    launch = command(worker, {})
    variables = launch.environ | (_ucx() if site.deploy.connector == "nixl" else {})
    env = [{"name": name, "value": value} for name, value in variables.items()]
    if site.deploy.connector == "tollbridge" and site.deploy.install == "init":
        env.append({"name": "PYTHONPATH", "value": PLUGIN})
    return Engine(command=launch.argv[:_HEAD], args=launch.argv[_HEAD:], env=env)


def _flags(site: Site, role: Role) -> list[str]:
    deploy, settings = site.deploy, site.role(role)
    flags = ["--tensor-parallel-size", str(settings.tensor_parallel)]
    flags += ["--shutdown-timeout", str(deploy.drain.shutdown_s)]
    if deploy.max_model_len is not None:
        flags += ["--max-model-len", str(deploy.max_model_len)]
    if deploy.revision is not None:
        flags += ["--revision", deploy.revision]
    if site.cluster.dtype != "auto":
        flags += ["--dtype", site.cluster.dtype]
    return [*flags, *settings.args]


def _ucx() -> dict[str, str]:
    """Pods do not see each other's GPUs, so NVLink between them is not to be had; the range makes a policy possible."""
    return {"UCX_TLS": "tcp,self,sm,cuda_copy", "UCX_TCP_PORT_RANGE": f"{UCX_PORTS[0]}-{UCX_PORTS[1]}"}


def _embedded(role: Role) -> Engine:
    args = ["worker", "--name", role, "--config", f"{CONFIG}/{role}.yaml"]
    return Engine(command=["tollbridge"], args=args, env=[{"name": "TOLLBRIDGE_HOME", "value": CACHE}])


def _secret_variables(site: Site) -> list[Manifest]:
    found = [secret_variable(site)] if site.deploy.connector == "tollbridge" else []
    if site.deploy.hf_token_secret is not None:
        key = {"name": site.deploy.hf_token_secret, "key": "token"}
        found.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return found


def secret_variable(site: Site) -> Manifest:
    """Return the variable that holds the cluster secret."""
    key = {"name": site.named("transfer"), "key": SECRET_KEY}
    return {"name": SECRET_KEY, "valueFrom": {"secretKeyRef": key}}


def _folders(site: Site) -> list[Manifest]:
    """A user without an entry in /etc/passwd has no home and no name, which torch's compiler asks for."""
    folders = {"HOME": HOME, "USER": "worker", "HF_HOME": CACHE, "VLLM_CACHE_ROOT": f"{HOME}/.cache/vllm"}
    if site.deploy.cache.offline:
        folders["HF_HUB_OFFLINE"] = "1"
    return [{"name": name, "value": value} for name, value in folders.items()]


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
