"""A model's config.json, read with the many names its keys go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tollbridge.errors import UnsupportedError
from tollbridge.kv.defaults import HEAD_SIZES, of_nested

# Where a multimodal config keeps the language model whose KV is meant.
NESTED = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
}
_INHERITED = ("model_type", "dtype", "torch_dtype", "quantization_config")
MAX_VALUE = 10**9  # a config with more is broken or hostile


class ModelConfig:
    """The part of a config.json that describes the language model. Raises UnsupportedError for what is missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = _language_model(values)
        self.model_type = str(self.values.get("model_type") or "")
        if not self.model_type:
            raise UnsupportedError("The config has no model_type, so its KV cache is not known: give a complete one.")

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of `names` that is a positive whole number; `default`, else UnsupportedError."""
        value = self.maybe_number(*names)
        if value is not None:
            return value
        if default is None:
            raise UnsupportedError(f"The config of {self.model_type!r} has no {names[0]!r}: its KV cache is not known.")
        return default

    def maybe_number(self, *names: str) -> int | None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, bool) or value is None:
                continue
            if (
                not isinstance(value, int | float)
                or value != value
                or not 0 < value <= MAX_VALUE
                or value != int(value)
            ):
                raise UnsupportedError(
                    f"The config of {self.model_type!r} has {name} = {str(value)[:40]!r}: it must be a positive number."
                )
            return int(value)
        return None

    def count(self, name: str, default: int = 0) -> int:
        """Return a whole number that may be 0."""
        return 0 if self.values.get(name) == 0 else self.number(name, default=default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def strings(self, name: str) -> list[str]:
        """Return a list of strings, empty when the key is missing or something else."""
        value = self.values.get(name)
        return [str(item) for item in value] if isinstance(value, list) else []

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers (or flags), None when there is none; UnsupportedError for other items."""
        value = self.values.get(name)
        if not isinstance(value, list):
            return None
        if not all(isinstance(item, int) for item in value):
            raise UnsupportedError(f"The config of {self.model_type!r} has a {name} that is no list of whole numbers.")
        return [int(item) for item in value]

    def indices(self, name: str) -> set[int] | None:
        """Return the layers that a list names, None when there is none; UnsupportedError for one that is none."""
        found = self.numbers(name)
        if found is not None and not all(0 <= index < self.layers for index in found):
            raise UnsupportedError(f"The config of {self.model_type!r} has {name} beyond its {self.layers} layers.")
        return None if found is None else set(found)

    def section(self, name: str) -> ModelConfig:
        """Return a nested mapping as a config of the same model type."""
        value = self.values.get(name)
        inner = dict(value) if isinstance(value, Mapping) else {}
        return ModelConfig({k: v for k, v in inner.items() if k not in NESTED} | {"model_type": self.model_type})

    @property
    def layers(self) -> int:
        return self.number(*_NAMES["layers"])

    @property
    def heads(self) -> int:
        return self.number(*_NAMES["heads"])

    @property
    def hidden(self) -> int:
        return self.number(*_NAMES["hidden"])

    @property
    def head_size(self) -> int:
        """Return the explicit head size where there is one (Qwen3: hidden / heads would be wrong)."""
        given = self.maybe_number("head_dim", "attention_head_dim", "kv_channels", "head_size")
        if given is None and "head_dim" not in self.values:
            given = HEAD_SIZES.get(self.model_type)
        if not (size := given or self.hidden // self.heads):
            raise UnsupportedError(f"The config of {self.model_type!r} has more heads than its hidden_size.")
        return size

    @property
    def dtype(self) -> str:
        """Return the dtype the weights are stored in, "bfloat16" when the config does not say."""
        return str(self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def _language_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the innermost language model's keys; the outer dtype and model_type stand in where it has none."""
    found = dict(values)
    for _ in range(3):
        inner = next((found[name] for name in NESTED if isinstance(found.get(name), Mapping)), None)
        if inner is None:
            break
        outer = {key: found[key] for key in _INHERITED if found.get(key) is not None}
        found = outer | {key: value for key, value in inner.items() if value is not None or key not in _INHERITED}
        found = of_nested(str(found.get("model_type"))) | found
    return found
