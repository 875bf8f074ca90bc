"""What is refused at start, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tollbridge.errors import StartupError
from tollbridge.vllm.support import check_deployment, check_version


def spec(kind: str, **fields: Any) -> Any:
    return type(kind, (), fields)()


def config(speculative: str | None = None, **parallel: int) -> Any:
    method = SimpleNamespace(method=speculative) if speculative is not None else None
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), speculative_config=method)


def cache(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])


FULL = cache(spec("FullAttentionSpec"))


@pytest.mark.parametrize("version", ["0.25.1", "0.31.0", "0.31.2+cpu"])
def test_tested_versions(version: str) -> None:
    assert check_version(version, allow_untested=False) is None


def test_a_version_in_between_warns() -> None:
    warning = check_version("0.28.0", allow_untested=False)
    assert warning is not None
    assert "0.28.0" in warning


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0", "1.0.0", "0.31", "0.31.1.dev3+g12", "dev"])
def test_other_versions(version: str) -> None:
    with pytest.raises(StartupError, match=r"0\.25 to 0\.31"):
        check_version(version, allow_untested=False)
    assert check_version(version, allow_untested=True) is not None


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_supported_caches(kind: str) -> None:
    check_deployment(config(tensor_parallel_size=2, pipeline_parallel_size=1), cache(spec(kind)))
    check_deployment(config(speculative="ngram"), None)


@pytest.mark.parametrize(
    ("vllm_config", "kv_cache_config", "sentence"),
    [
        (config(pipeline_parallel_size=2), FULL, "pipeline"),
        (config(data_parallel_size=2), FULL, "one worker per replica"),
        (config(decode_context_parallel_size=2), FULL, "context"),
        (config(speculative="eagle3"), FULL, "eagle3"),
        (config(), cache(spec("FullAttentionSpec"), spec("MambaSpec")), "2 groups"),
        (config(), cache(spec("SlidingWindowSpec")), "SlidingWindowSpec"),
        (config(), cache(spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("FullAttentionSpec")})), "differ"),
        (config(), cache(spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("MambaSpec")})), "Mamba"),
    ],
)
def test_refused(vllm_config: Any, kv_cache_config: Any, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence) as caught:
        check_deployment(vllm_config, kv_cache_config)
    assert caught.value.message.count(". ") == 0
