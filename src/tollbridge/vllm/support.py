"""What this connector does not split: refused at start (a whole deployment) or served locally (one request).

Reads vLLM's objects by attribute and imports none of it.
"""

from __future__ import annotations

from typing import Any

from tollbridge.errors import StartupError

OLDEST = (0, 25)
NEWEST = (0, 31)
TESTED = frozenset({OLDEST, NEWEST})

# Speculators without KV of their own; a draft model's cache is another matter.
_SPECULATORS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
_FULL_ATTENTION = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


def check_version(version: str, *, allow_untested: bool) -> str | None:
    """Raise StartupError for a vLLM whose connector interface is not known; return a warning for an untested one."""
    parsed = _minor(version)
    if parsed in TESTED:
        return None
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if parsed is not None and OLDEST < parsed < NEWEST:
        return f"vLLM {version} lies between the tested versions {span} and has not been tested itself."
    if allow_untested:
        return f"vLLM {version} is outside the tested versions {span}; allow_untested_vllm is set."
    raise StartupError(
        f"TollbridgeConnector works with vLLM {span} and this is {version}: install a supported version, "
        'or set "allow_untested_vllm": true in kv_connector_extra_config.'
    )


def check_deployment(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise StartupError, one sentence, for a deployment that cannot be split."""
    problem = _parallel_problem(vllm_config.parallel_config) or _speculation_problem(vllm_config)
    if problem is None and kv_cache_config is not None:
        problem = _cache_problem(kv_cache_config)
    if problem is not None:
        raise StartupError(f"TollbridgeConnector cannot split this deployment: {problem}.")


def why_not_split(request: Any) -> str | None:
    """Return why one request is served locally, None when it can be split. Both legs come to the same answer."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "A prompt of embeddings has no token ids to name its KV by."
    if request.lora_request is not None:
        return "A request with a LoRA adapter is not split yet."
    if request.mm_features:
        return "A request with images, audio or video is not split yet."
    if request.pooling_params is not None:
        return "A pooling request has nothing to decode."
    if getattr(request, "resumable", False):
        return "A streaming-input session is not split."
    return None


def _minor(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 3 or not (parts[0].isdigit() and parts[1].isdigit()) or "dev" in version:
        return None
    return int(parts[0]), int(parts[1])


def _parallel_problem(parallel: Any) -> str | None:
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("data_parallel_size", "data parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            hint = "run one worker per replica" if name == "data_parallel_size" else "use tensor parallelism"
            return f"{what} of size {size} is not supported, {hint}"
    return None


def _speculation_problem(vllm_config: Any) -> str | None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _SPECULATORS_WITHOUT_KV:
        return None
    return f'speculative decoding by "{speculative.method}" keeps KV of its own, which is not shipped'


def _cache_problem(kv_cache_config: Any) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model's KV cache has {len(groups)} groups (a hybrid of attention kinds), one is supported"
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind == "UniformTypeKVCacheSpecs":
        kinds = {type(layer_spec).__name__ for layer_spec in spec.kv_cache_specs.values()}
        return "the layers' KV blocks differ in size" if kinds <= _FULL_ATTENTION else f"its KV cache is {kinds}"
    if kind not in _FULL_ATTENTION:
        return f"its KV cache is of the kind {kind}, only full attention is supported"
    return None
