"""How a request wants its tokens drawn: OpenAI's parameters, checked, as the engine's `SamplingParams`."""

from __future__ import annotations

from tollbridge.engine.base import ModelInfo, SamplingParams
from tollbridge.errors import ContextLengthError, RequestError, UnsupportedError
from tollbridge.wire.openai import ChatCompletionRequest, CompletionRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat may fill the context
MAX_STOP_STRINGS = 32  # each costs a search per token

Asked = CompletionRequest | ChatCompletionRequest


def sampling_params(asked: Asked, model: ModelInfo, *, num_prompt_tokens: int) -> SamplingParams:
    """Return the checked parameters; RequestError names the one at fault."""
    _check_ranges(asked)
    return SamplingParams(
        max_tokens=_max_tokens(asked, model, num_prompt_tokens),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(asked.top_k or 0, 0),
        seed=asked.seed,
        stop=_stop_strings(asked.stop),
        stop_token_ids=_stop_token_ids(asked.stop_token_ids, model.vocab_size),
        ignore_eos=asked.ignore_eos,
    )


def check_single(asked: Asked) -> None:
    """Refuse what needs several sequences, and options that contradict each other."""
    _require(asked.n >= 1, "n", f"must be at least 1, got {asked.n}")
    if asked.n > 1:
        raise UnsupportedError('Parameter "n" above 1 is not supported yet by the embedded engine.', param="n")
    _require(asked.stream or asked.stream_options is None, "stream_options", 'needs "stream": true')
    _require(asked.cache_salt != "", "cache_salt", "must not be empty")


def _check_ranges(asked: Asked) -> None:
    temperature, top_p, top_k, seed = asked.temperature, asked.top_p, asked.top_k, asked.seed
    _require(temperature is None or temperature >= 0, "temperature", f"must be 0 or more, got {temperature}")
    _require(top_p is None or 0 < top_p <= 1, "top_p", f"must be above 0 and at most 1, got {top_p}")
    _require(top_k is None or -1 <= top_k < 1 << 31, "top_k", f"must be -1 or 0 (all) or at least 1, got {top_k}")
    _require(seed is None or -(1 << 63) <= seed < 1 << 63, "seed", "must fit 64 bits")


def _max_tokens(asked: Asked, model: ModelInfo, num_prompt_tokens: int) -> int:
    room = model.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your request has "
            f"{num_prompt_tokens} input tokens. Please reduce the length of the input.",
            param="prompt" if isinstance(asked, CompletionRequest) else "messages",
        )
    name, wanted = _wanted_tokens(asked)
    if wanted is None:
        return min(DEFAULT_COMPLETION_TOKENS, room) if isinstance(asked, CompletionRequest) else room
    _require(wanted >= 1, name, f"must be at least 1, got {wanted}")
    if wanted > room:
        raise ContextLengthError(
            f"'{name}' is too large: {wanted}. This model's maximum context length is {model.max_model_len} tokens "
            f"and your request has {num_prompt_tokens} input tokens "
            f"({wanted} > {model.max_model_len} - {num_prompt_tokens}).",
            param=name,
        )
    return wanted


def _wanted_tokens(asked: Asked) -> tuple[str, int | None]:
    if isinstance(asked, ChatCompletionRequest) and asked.max_completion_tokens is not None:
        return "max_completion_tokens", asked.max_completion_tokens
    return "max_tokens", asked.max_tokens


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    _require(len(strings) <= MAX_STOP_STRINGS, "stop", f"has {len(strings)} strings, at most {MAX_STOP_STRINGS} do")
    _require(all(strings), "stop", "must not contain an empty string")
    return strings


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    for token_id in ids or ():
        _require(
            0 <= token_id < vocab_size,
            "stop_token_ids",
            f"names token id {token_id}, which is not in the vocabulary of {vocab_size} tokens",
        )
    return tuple(ids or ())


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise RequestError(f'Parameter "{name}" {what}.', param=name)
