"""Loads a causal LM of transformers, with attention over our paged cache in place of its own. No model code here.

What can be served is every decoder whose layers all do full attention through transformers' attention interface
(Llama, Qwen2, Qwen3, Mistral without a window, ...). What cannot is refused by name, before weights are read where
the configuration tells, at the runner's warm-up otherwise: a wrong answer is worse than none.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tollbridge.engine import attention
from tollbridge.engine.dtype import dtype_name, resolve_dtype
from tollbridge.errors import StartupError, UnsupportedError

log = logging.getLogger(__name__)

# RoPE variants whose frequencies follow the longest position in the batch: KV would depend on who runs beside it.
UNSTABLE_ROPE_TYPES = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in memory and what the engine needs to know of it."""

    name: str
    folder: Path
    module: Any  # a transformers PreTrainedModel, in evaluation mode
    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


def load_model(folder: Path, *, name: str, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """Load the model in `folder`.

    Raises UnsupportedError naming the feature when the engine cannot serve it, StartupError when it cannot be read.
    """
    target = _device(device)
    number_format = resolve_dtype(dtype, target)
    config = _read_config(folder, name)
    refuse_unsupported(config, name)
    module = _read_weights(folder, name, config, number_format).to(target).eval()
    _check_module(module, name)
    num_heads: int = config.num_attention_heads
    return LoadedModel(
        name=name,
        folder=folder,
        module=module,
        dtype=number_format,
        device=target,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(module),
    )


def _device(name: str) -> torch.device:
    """Return the device called `name`; StartupError when torch knows of none, or this machine has none."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise StartupError(f"The device {name!r} cannot be used: {reason}. Set engine.device to cpu or cuda.") from None
    return device


def refuse_unsupported(config: Any, name: str) -> None:
    """Raise UnsupportedError when the configuration names a feature that the engine does not compute."""
    for feature, has in _REFUSALS.items():
        if has(config):
            raise UnsupportedError(
                f"Model {name} ({config.model_type}) has {feature}, which the embedded engine lacks."
            )


def _sliding(config: Any) -> bool:
    if getattr(config, "use_sliding_window", True) is False:
        return False
    return getattr(config, "sliding_window", None) is not None


def _other_layers(config: Any) -> bool:
    return any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())


def _unstable_rope(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in UNSTABLE_ROPE_TYPES


def _has(*names: str) -> Callable[[Any], bool]:
    """Return a test for a configuration that sets any of `names`."""
    return lambda config: any(getattr(config, name, None) for name in names)


_REFUSALS: dict[str, Callable[[Any], bool]] = {
    "an encoder and a decoder": _has("is_encoder_decoder"),
    "several modalities": _has("vision_config", "audio_config", "text_config"),
    "a sliding attention window": _sliding,
    "layers that are not full attention (layer_types)": _other_layers,
    "attention logit soft-capping": _has("attn_logit_softcapping"),
    "multi-head latent attention": _has("kv_lora_rank"),
    "chunked attention": _has("attention_chunk_size"),
    "layers that share KV": _has("num_kv_shared_layers"),
    "state-space or recurrent layers": _has("mamba_d_state", "ssm_state_size", "state_size", "layers_block_type"),
    "attention sinks": lambda config: config.model_type == "gpt_oss",
    "ALiBi positions": _has("alibi"),
    "a RoPE that depends on the batch (dynamic or longrope)": _unstable_rope,
    "quantised weights": _has("quantization_config"),
}


def _read_config(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise StartupError(f"Model {name} has no usable config.json in {folder}: {_first_line(error)}") from error


def _read_weights(folder: Path, name: str, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    attention.register()
    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported, and refused below in our words
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise StartupError(
                f"Model {name} could not be loaded as {dtype_name(dtype)} from {folder}: {_first_line(error)}"
            ) from error
    module, report = loaded  # as `output_loading_info` asks
    _refuse_incomplete(report, folder, name)
    return module


def _refuse_incomplete(report: dict[str, Any], folder: Path, name: str) -> None:
    """Raise StartupError for tensors that are absent or misshapen: transformers would fill them with random numbers."""
    wrong = sorted(report["missing_keys"]) + sorted(str(entry[0]) for entry in report["mismatched_keys"])
    if wrong:
        raise StartupError(
            f"Model {name} lacks {len(wrong)} tensors of the right shape in {folder}, the first being {wrong[0]}: "
            "config.json and the weights do not belong together."
        )


def _check_module(module: Any, name: str) -> None:
    """Refuse a model class that does not take attention from outside or cannot pick the positions of its logits."""
    if not module._supports_attention_backend:
        raise UnsupportedError(
            f"Model {name} ({type(module).__name__}) does not use transformers' attention interface."
        )
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedError(f"Model {name} ({type(module).__name__}) cannot compute logits of chosen positions.")


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    """Return the ids that end a text: the generation configuration's, which models keep right, else the model's."""
    ids = module.generation_config.eos_token_id
    if ids is None:
        ids = module.config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing progress bars and from logging below errors."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
