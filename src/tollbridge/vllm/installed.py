"""What only vLLM can tell: its version, attention backend, CPU packing, tensor parallel rank, model."""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from tollbridge.engine.fingerprint import IGNORED_CONFIG_KEYS, model_digest
from tollbridge.errors import StartupError
from tollbridge.transfer.base import Fingerprint
from tollbridge.vllm.layout import CacheLayout


def version() -> str:
    """Return the version of the vLLM that runs this process."""
    import vllm

    return str(vllm.__version__)


def use_vllms_log() -> None:
    """Write this package's log lines where vLLM writes its own; it configures nobody else's loggers."""
    ours, theirs = logging.getLogger("tollbridge"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def attention_backend(vllm_config: Any) -> str:
    """Return the name of the attention backend that writes the KV cache."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend

    return str(get_current_attn_backend(vllm_config).get_name())


def tensor_parallel_rank() -> int:
    """Return this worker process's rank in its tensor parallel group."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def fingerprint(vllm_config: Any, layout: CacheLayout, *, tp_rank: int) -> Fingerprint:
    """Return what must be equal on both sides of a transfer."""
    model = vllm_config.model_config
    return Fingerprint(
        model=_model_digest(vllm_config),
        dtype=layout.dtype,
        num_layers=len(layout.regions),
        num_kv_heads=layout.num_kv_heads,
        head_size=model.get_head_size(),
        block_size=vllm_config.cache_config.block_size,
        layout=layout.description,
        isa=_packing(vllm_config) if layout.device == "cpu" else "any",
        tp_rank=tp_rank,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
    )


def _packing(vllm_config: Any) -> str:
    """Return the instruction set by which vLLM's CPU attention packs K and V inside a block."""
    from vllm.v1.attention.backends import cpu_attn

    model, cache = vllm_config.model_config, vllm_config.cache_config
    choose = getattr(cpu_attn, "_get_attn_isa", None)
    if choose is None:
        raise StartupError("This vLLM does not say how its CPU attention packs KV (cpu_attn._get_attn_isa is gone).")
    return str(choose(model.dtype, cache.block_size, model.get_head_size()))


def _model_digest(vllm_config: Any) -> str:
    """Return a digest of the configuration that shapes KV, and of samples of the weights when they are on disk."""
    folder = _folder(vllm_config.model_config)
    dummy = str(vllm_config.load_config.load_format) == "dummy"
    if folder is not None and not dummy and any(folder.glob("*.safetensors")):
        return model_digest(folder)
    model = vllm_config.model_config
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in IGNORED_CONFIG_KEYS}
    named = [config, "dummy" if dummy else [model.model, model.revision], str(model.quantization)]
    text = json.dumps(named, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tollbridge-model").hexdigest()


def _folder(model: Any) -> Path | None:
    """Return where the model lies on this machine."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(config).parent if isinstance(config, str) else None
