"""What a container's command line says: vLLM's options, however the command is written, and its KV transfer."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import msgspec

from tollbridge.deploy.lint.findings import Manifest, at, items
from tollbridge.deploy.lint.pods import PodView

_SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash"}
_MODULE = re.compile(r"vllm\.entrypoints\.\S+|dynamo\.vllm")
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
}


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM server in a pod. `options` have long names without dashes in front; a flag has the value ""."""

    pod: PodView
    path: str  # of the container
    container: Manifest
    options: dict[str, str]
    model: str | None
    is_dynamo: bool = False

    @property
    def image(self) -> str:
        return str(self.container.get("image", ""))

    @property
    def is_cpu(self) -> bool:
        device = self.options.get("device") or literal(self.container, "VLLM_TARGET_DEVICE") or ""
        return device == "cpu" or "cpu" in self.image.lower()

    @property
    def port(self) -> int:
        return number(self.options.get("port")) or 8000

    @property
    def transfer(self) -> dict[str, Any] | None:
        """The KV transfer config, None where there is none or where it is no JSON."""
        text = self.options.get("kv-transfer-config")
        try:
            found = json.loads(text) if text is not None else _dotted(self.options)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    @property
    def connector(self) -> str | None:
        found = (self.transfer or {}).get("kv_connector")
        return str(found) if found is not None else None

    @property
    def connectors(self) -> list[dict[str, Any]]:
        """The transfer configs, those inside of a MultiConnector too."""
        whole = self.transfer
        if whole is None:
            return []
        extra = whole.get("kv_connector_extra_config")
        inner = extra.get("connectors", []) if isinstance(extra, dict) else []
        return [whole, *(each for each in inner if isinstance(each, dict))]

    def uses(self, word: str) -> dict[str, Any] | None:
        """Return the config of the first connector whose name has `word` in it."""
        return next((each for each in self.connectors if word in str(each.get("kv_connector", ""))), None)

    def size(self, option: str) -> int:
        return number(self.options.get(option)) or 1


def engines_of(pod: PodView) -> list[Engine]:
    """Return the vLLM servers of a pod."""
    found = (_engine(pod, path, container) for path, container in pod.containers)
    return [engine for engine in found if engine is not None]


def number(text: object) -> int | None:
    try:
        return int(str(text))
    except ValueError:
        return None


def literal(container: Manifest, name: str) -> str | None:
    """Return the value of a variable that is written out; None where it is not, or comes from somewhere."""
    entry = variable(container, name)
    value = entry.get("value") if entry else None
    return None if value is None else str(value)


def variable(container: Manifest, name: str) -> Manifest | None:
    return next((each for each in items(container, "env") if each.get("name") == name), None)


def field_path(container: Manifest, name: str) -> str | None:
    """Return the field of the pod that a variable has, also by way of another variable: `$(POD_IP)`."""
    entry = variable(container, name)
    if entry is None:
        return None
    path = at(entry, ["valueFrom", "fieldRef", "fieldPath"])
    if path is not None:
        return str(path)
    reference = re.fullmatch(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", str(entry.get("value", "")))
    return field_path(container, reference[1]) if reference and reference[1] != name else None


def words_of(container: Manifest) -> list[str]:
    """Return the words of the command, a shell's script taken apart."""
    words = [str(each) for key in ("command", "args") for each in container.get(key) or []]
    if words and words[0] in _SHELLS and len(words) > 1:
        script = next((each for each in words[1:] if not each.startswith("-")), "")
        words = _split(script)
    return words


def _split(script: str) -> list[str]:
    script = re.sub(r"\\\s*\n", " ", script)
    try:
        return shlex.split(script, comments=True)
    except ValueError:
        return script.split()


def _engine(pod: PodView, path: str, container: Manifest) -> Engine | None:
    words = words_of(container)
    start = _start(words, str(container.get("image", "")), bool(container.get("command")))
    if start is None:
        return None
    options, rest = _options(words[start:])
    model = options.get("model") or (rest[0] if rest else None)
    dynamo = any("dynamo.vllm" in word for word in words)
    return Engine(pod=pod, path=path, container=container, options=options, model=model, is_dynamo=dynamo)


def _start(words: list[str], image: str, has_command: bool) -> int | None:
    """Return where the options of a vLLM server begin, None where none is started."""
    for index, word in enumerate(words):
        if word.rpartition("/")[2] == "vllm" and words[index + 1 : index + 2] == ["serve"]:
            return index + 2
        if _MODULE.fullmatch(word):
            return index + 1
    if not has_command and "vllm-openai" in image:
        return 1 if words[:1] == ["serve"] else 0  # the image starts the server
    if not has_command and "vllm" in image and any(word.startswith("--model") for word in words):
        return 0
    return None


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    rest: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word in ("&&", ";", "|", "&", "||"):
            break
        if not word.startswith("-"):
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name.lstrip("-").replace("_", "-"))
        if not equals and index < len(words) and not re.match(r"--?[A-Za-z]", words[index]):
            value = words[index]
            index += 1
        options[name] = value
    return options, rest


def _dotted(options: dict[str, str]) -> dict[str, Any] | None:
    """Return a config given as `--kv-transfer-config.kv_connector X`."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name.startswith("kv-transfer-config."):
            found[name.partition(".")[2].replace("-", "_")] = value
    return found or None
