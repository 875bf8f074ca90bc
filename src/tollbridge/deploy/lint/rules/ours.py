"""What our connector does not start with, and secrets that are not the same on both sides."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tollbridge.config.secret import MIN_BYTES
from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.engines import Engine, variable
from tollbridge.deploy.lint.findings import Finding, at
from tollbridge.deploy.lint.rules.transfer import OURS
from tollbridge.errors import StartupError
from tollbridge.vllm.support import check_version

_TAG = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def rules(case: Case) -> Iterator[Finding]:
    for engine in case.engines:
        if engine.uses(OURS) is not None:
            yield from _parallel(engine)
            yield from _version(engine)
            yield from _length(case, engine)
    for prefill, decode in case.sides():
        yield from _same_secret(prefill[0], decode)


def _parallel(engine: Engine) -> Iterator[Finding]:
    for name in ("pipeline-parallel-size", "data-parallel-size"):
        if engine.size(name) > 1:
            yield engine.pod.finding(
                "unsupported",
                f"{engine.path}.args",
                what=f"--{name} is {engine.size(name)}",
                why="the connector tollbridge does not start with it",
                mend="use tensor parallelism, or more workers",
            )


def _version(engine: Engine) -> Iterator[Finding]:
    tag = engine.image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    match = _TAG.match(tag)
    extra = (engine.uses(OURS) or {}).get("kv_connector_extra_config")
    allowed = isinstance(extra, dict) and extra.get("allow_untested_vllm") is True
    if match is None or allowed or not engine.image.rpartition(":")[0].endswith("vllm-openai"):
        return
    try:
        check_version(match[0].removeprefix("v"), allow_untested=False)
    except StartupError as error:
        yield engine.pod.finding(
            "vllm-version",
            f"{engine.path}.image",
            what=error.message,
            why="vLLM ends at its start",
            mend="take a version that was tested, the same in both roles",
        )


def _reference(engine: Engine) -> tuple[str, str] | None:
    """Return name and key of the Secret that holds the cluster secret."""
    extra = (engine.uses(OURS) or {}).get("kv_connector_extra_config")
    name = extra.get("secret_env", "TOLLBRIDGE_SECRET") if isinstance(extra, dict) else "TOLLBRIDGE_SECRET"
    reference = at(variable(engine.container, str(name)), ["valueFrom", "secretKeyRef"])
    return (str(reference.get("name")), str(reference.get("key"))) if isinstance(reference, dict) else None


def _same_secret(prefill: Engine, others: list[Engine]) -> Iterator[Finding]:
    wanted = _reference(prefill)
    for decode in others:
        found = _reference(decode)
        if wanted is not None and found is not None and wanted != found:
            yield decode.pod.finding(
                "roles-differ",
                f"{decode.path}.env",
                what=f"the secret is {'/'.join(found)} on decode, {'/'.join(wanted)} on prefill",
                why="workers with different secrets refuse each other's KV",
                mend="take it from the same Secret in both roles, and in the router",
            )


def _length(case: Case, engine: Engine) -> Iterator[Finding]:
    name, key = _reference(engine) or ("", "")
    for secret in case.of("Secret"):
        text = at(secret.manifest, ["stringData", key])
        here = secret.name == name and secret.namespace == engine.pod.document.namespace
        if here and isinstance(text, str) and len(text.encode()) < MIN_BYTES:
            yield secret.finding(
                "secret",
                f"stringData.{key}",
                what=f"the cluster secret has {len(text.encode())} bytes",
                why="workers and routers do not start with it",
                mend=f"at least {MIN_BYTES} random bytes: openssl rand -hex 32",
            )
