"""Rendered pods as processes of one machine, to try their command lines before a cluster does.

What a kubelet does is done here: variables from fields and Secrets, `$(NAME)` in arguments, mounts as folders. What
differs: the pod's IP is 127.0.0.1 and servers listen there only, ports that would clash are others, the interpreter is
that of an environment with vLLM, and vLLM computes on the CPU (`ADDED`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tollbridge.deploy.manifest import Manifest

POD_IP = "127.0.0.1"
ADDED = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_ENDPOINT = re.compile(r"tcp://[^:]*:(\d+)")
_HIDDEN = {"TOLLBRIDGE_SECRET"}  # every user of the machine can read an argv
_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"


@dataclass(frozen=True, kw_only=True)
class LocalProcess:
    """A container of a pod, here. `environ` is all that it gets beside the parent's PATH and the like."""

    name: str
    argv: list[str]
    environ: dict[str, str]
    ports: dict[str, int]  # by the name of the container's port
    pre_stop: list[str]  # what is run before it is told to stop; empty: nothing
    health: str  # path of its startup probe


def processes(
    objects: Iterable[Manifest], *, free_port: Callable[[], int], python: str, folders: Mapping[str, str]
) -> list[LocalProcess]:
    """Return a process for the main container of each worker's template; `folders` are what the mounts become."""
    objects = list(objects)
    secrets = {each["metadata"]["name"]: each.get("stringData", {}) for each in objects if each["kind"] == "Secret"}
    workers = [each for each in objects if each["kind"] == "Deployment" and _role(each) in ("prefill", "decode")]
    return [_process(_role(each), each, secrets, free_port, python, folders) for each in workers]


def shell(process: LocalProcess) -> str:
    """Return a shell command that starts the process."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in process.environ.items() if name not in _HIDDEN]
    return " \\\n  ".join(["env", *variables, shlex.join(process.argv)])


def _role(workload: Manifest) -> str:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels["app.kubernetes.io/component"]


def _process(
    role: str,
    workload: Manifest,
    secrets: Mapping[str, Mapping[str, str]],
    free_port: Callable[[], int],
    python: str,
    folders: Mapping[str, str],
) -> LocalProcess:
    container: Manifest = workload["spec"]["template"]["spec"]["containers"][0]
    ports = {each["name"]: free_port() for each in container["ports"]}
    ports["replay"] = ports["events"] + 1  # vLLM takes the one after
    numbers = {each["containerPort"]: ports[each["name"]] for each in container["ports"]}
    environ = _environ(container["env"], secrets)
    words = [_expand(each, environ) for each in (*container["command"], *container["args"])]
    environ = {name: _in_folder(value, folders) for name, value in environ.items()}
    if _PORT_VARIABLE in environ:
        environ[_PORT_VARIABLE] = str(numbers[int(environ[_PORT_VARIABLE])])
    hook = container["lifecycle"]["preStop"].get("exec", {}).get("command", [])
    return LocalProcess(
        name=role,
        argv=_interpreted(_moved(words, numbers), python),
        environ={**environ, **ADDED},
        ports=ports,
        pre_stop=_interpreted(_moved(list(hook), numbers), python),
        health=container["startupProbe"]["httpGet"]["path"],
    )


def _environ(entries: Sequence[Manifest], secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the variables of a container; one of a Secret that is not rendered is left out."""
    found: dict[str, str] = {}
    for entry in entries:
        source = entry.get("valueFrom", {})
        if "value" in entry:
            found[entry["name"]] = _expand(entry["value"], found)
        elif source.get("fieldRef", {}).get("fieldPath") == "status.podIP":
            found[entry["name"]] = POD_IP
        elif "secretKeyRef" in source and source["secretKeyRef"]["name"] in secrets:
            found[entry["name"]] = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
    return found


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as the kubelet does: `$$` is a dollar, an unknown name stays as it is."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environ.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)


def _moved(words: list[str], numbers: Mapping[int, int]) -> list[str]:
    """Give the words other ports, where a port stands: after `--port`, and in JSON."""
    result: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--port":
            word = str(numbers[int(word)])
        elif before == "--host":
            word = POD_IP
        elif word.startswith("{"):
            word = json.dumps(_moved_json(json.loads(word), numbers))
        result.append(word)
    return result


def _moved_json(value: Any, numbers: Mapping[int, int], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _moved_json(each, numbers, name) for name, each in value.items()}
    if isinstance(value, int) and key.endswith("port"):
        return numbers.get(value, value)
    if isinstance(value, str):
        return _ENDPOINT.sub(lambda match: f"tcp://{POD_IP}:{numbers.get(int(match[1]), int(match[1]))}", value)
    return value


def _in_folder(text: str, folders: Mapping[str, str]) -> str:
    """Return a path below a mount as one below the folder that stands for it."""
    for mount, folder in folders.items():
        if text == mount or text.startswith(f"{mount}/"):
            return folder + text.removeprefix(mount)
    return text


def _interpreted(words: list[str], python: str) -> list[str]:
    return [python, *words[1:]] if words and words[0] == "python3" else words
