"""vLLM's command line: options that are misspelt or make no sense, a model that is not there, GPUs that idle."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.engines import Engine, number
from tollbridge.deploy.lint.findings import Finding, items
from tollbridge.deploy.lint.rules.devices import gpus
from tollbridge.deploy.lint.rules.transfer import OURS
from tollbridge.errors import ConfigError
from tollbridge.vllm.settings import read_settings

# those that matter here, and their neighbours, lest one be taken for the other; not all that vLLM has
_OPTIONS = """
model served-model-name host port uvicorn-log-level api-key tensor-parallel-size pipeline-parallel-size data-
parallel-size data-parallel-size-local data-parallel-address data-parallel-rank enable-expert-parallel max-model-len
max-num-seqs max-num-batched-tokens gpu-memory-utilization kv-cache-dtype kv-cache-memory-bytes block-size dtype
quantization revision code-revision tokenizer tokenizer-revision tokenizer-mode trust-remote-code enforce-eager
enable-prefix-caching no-enable-prefix-caching enable-chunked-prefill no-enable-chunked-prefill kv-transfer-config
kv-events-config kv-offloading-size enable-prompt-tokens-details shutdown-timeout swap-space cpu-offload-gb load-
format download-dir seed enable-auto-tool-choice tool-call-parser reasoning-parser chat-template enable-lora max-
loras max-lora-rank lora-modules speculative-config compilation-config attention-backend disable-log-requests
enable-log-requests disable-log-stats disable-uvicorn-access-log scheduling-policy async-scheduling distributed-
executor-backend limit-mm-per-prompt prefix-caching-hash-algo device hf-overrides hf-config-path hf-token
generation-config override-generation-config disable-hybrid-kv-cache-manager max-seq-len-to-capture max-logprobs
root-path ssl-keyfile ssl-certfile headless nnodes node-rank master-addr master-port disaggregation-mode is-prefill-
worker is-decode-worker connector
"""
KNOWN = frozenset(_OPTIONS.split())


def rules(case: Case) -> Iterator[Finding]:
    for engine in case.engines:
        yield from _misspelt(engine)
        yield from _values(engine)
        yield from _port(engine)
        yield from _folder(engine)
        yield from _idle(engine)
        yield from _settings(engine)


def _misspelt(engine: Engine) -> Iterator[Finding]:
    for name in engine.options:
        base = name.partition(".")[0]
        near = difflib.get_close_matches(base, KNOWN, n=1, cutoff=0.88)
        if base not in KNOWN and not base.startswith("no-") and near:
            yield engine.pod.finding(
                "flag",
                f"{engine.path}.args",
                what=f"vLLM has no option --{name}",
                why="vLLM does not start",
                mend=f"did you mean --{near[0]}?",
            )


def _values(engine: Engine) -> Iterator[Finding]:
    share = engine.options.get("gpu-memory-utilization")
    try:
        wrong = share is not None and not 0 < float(share) <= 1
    except ValueError:
        wrong = True
    if wrong:
        yield engine.pod.finding(
            "flag-value",
            f"{engine.path}.args",
            what=f"--gpu-memory-utilization is {share}",
            why="vLLM does not start",
            mend="a share above 0 and up to 1, such as 0.9",
        )
    for name in ("tensor-parallel-size", "pipeline-parallel-size", "block-size", "port"):
        text = engine.options.get(name)
        if text is not None and not text.startswith("$") and (number(text) or 0) < 1:
            yield engine.pod.finding(
                "flag-value",
                f"{engine.path}.args",
                what=f"--{name} is {text!r}",
                why="vLLM does not start",
                mend="write a whole number of at least 1",
            )


def _port(engine: Engine) -> Iterator[Finding]:
    named = next((each for each in items(engine.container, "ports") if each.get("name") == "http"), None)
    if named is None or engine.is_dynamo or "containerPort" not in named:
        return
    if named["containerPort"] != engine.port:
        yield engine.pod.finding(
            "http-port",
            f"{engine.path}.ports",
            what=f"the port named http is {named.get('containerPort')}, and vLLM listens on {engine.port}",
            why="Services, probes and routers go by that name, and reach nobody",
            mend=f"write containerPort: {engine.port}, or --port {named.get('containerPort')}",
        )


def _folder(engine: Engine) -> Iterator[Finding]:
    """A model by path, which no volume brings."""
    model = engine.model or ""
    mounted = [str(each.get("mountPath")).rstrip("/") for each in items(engine.container, "volumeMounts")]
    inside = any(model == each or model.startswith(f"{each}/") for each in mounted if each)
    if model.startswith("/") and engine.image.startswith("vllm/") and not inside:
        yield engine.pod.finding(
            "model-path",
            f"{engine.path}.volumeMounts",
            what=f"the model {model} is in no volume of the container",
            why="vLLM takes it for the name of a model at the hub, and does not start",
            mend=f"mount the volume that has it on {model.rpartition('/')[0] or model}",
        )


def _idle(engine: Engine) -> Iterator[Finding]:
    used = (
        engine.size("tensor-parallel-size") * engine.size("pipeline-parallel-size") * engine.size("data-parallel-size")
    )
    given = gpus(engine.container)
    if given > used and not engine.is_dynamo and len(engine.pod.containers) == 1 and "headless" not in engine.options:
        yield engine.pod.finding(
            "idle-gpus",
            f"{engine.path}.resources",
            what=f"the container has {given} GPUs, and vLLM uses {used}",
            why="the others idle, and nobody else gets them",
            mend=f"--tensor-parallel-size {given}, or ask for {used}",
        )


def _settings(engine: Engine) -> Iterator[Finding]:
    """Our connector's own settings, read as it reads them."""
    config = engine.uses(OURS)
    extra = config.get("kv_connector_extra_config") if config is not None else None
    if not isinstance(extra, dict):
        return
    name = str(extra.get("secret_env", "TOLLBRIDGE_SECRET"))
    try:
        read_settings(extra, {name: "x" * 32})
    except (ConfigError, TypeError, ValueError) as error:
        yield engine.pod.finding(
            "connector-settings",
            f"{engine.path}.args",
            what=str(error),
            why="vLLM does not start",
            mend="see docs/vllm.md, settings in kv_connector_extra_config",
        )
