"""The model's own tokenizer and chat template in the router: `tokenizers` and `jinja2`, no transformers and no torch.

Both come with the extra `[router]`; without them, or without the model's folder at hand, workers are asked instead.
What this computes is believed only once it has equalled what a worker computes (`tokens.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from tollbridge.engine.store import DEFAULT_MODEL, smollm2_folder

Render = Callable[[list[dict[str, Any]], bool], str]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateError(Exception):
    """The chat template refuses the messages, or there is none."""


class _Encoder(Protocol):
    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]: ...


class LocalTokenizer:
    """Safe to use from several threads."""

    def __init__(self, encoder: _Encoder, render: Render | None) -> None:
        self._encoder = encoder
        self._render = render

    def text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # `encode_batch` lets go of the interpreter lock, `encode` does not
        ids: list[int] = self._encoder.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the prompt's token ids; TemplateError when the template refuses the messages."""
        if self._render is None:
            raise TemplateError("The model has no chat template.")
        return self.text(self._render(messages, add_generation_prompt), add_special_tokens=False)


def maybe_folder(model: str) -> Path | None:
    """Return the folder of the cluster file's model if it is on this machine; nothing is fetched."""
    folder = smollm2_folder() if model == DEFAULT_MODEL else Path(model).expanduser()
    return folder if folder.is_dir() else None


def maybe_load(folder: Path) -> LocalTokenizer | None:
    """Return the tokenizer in `folder`; None when it, or a library it needs, is not there. Takes up to a second."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    if not (folder / "tokenizer.json").is_file():
        return None
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoder.no_padding()
    encoder.no_truncation()
    return LocalTokenizer(encoder, _maybe_render(folder))


def _maybe_render(folder: Path) -> Render | None:
    """Return the chat template as a function of messages, None when the model has none or jinja2 is missing."""
    settings = _settings(folder / "tokenizer_config.json")
    template = _template(folder, settings)
    if template is None:
        return None
    try:
        compiled = _compile(template)
    except ImportError:
        return None
    special = {name: _plain(settings.get(name)) for name in _SPECIAL if settings.get(name) is not None}

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            text: str = compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **special
            )
        except Exception as error:
            raise TemplateError(str(error)) from error
        return text

    return render


def _compile(template: str) -> Any:
    """Compile with the settings that chat templates are written for (transformers, utils/chat_template_utils.py)."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # local time is what they mean
    return environment.from_string(template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _plain(token: object) -> object:
    """A special token is a text, or an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token
