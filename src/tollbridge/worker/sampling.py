"""How a request wants its tokens drawn: OpenAI's and vLLM's parameters, checked, as the engine's `SamplingParams`."""

from __future__ import annotations

from dataclasses import replace

from tollbridge.engine.base import ModelInfo, SamplingParams, Structure, Tokenizer
from tollbridge.errors import ContextLengthError, RequestError
from tollbridge.wire.openai import ChatCompletionRequest, CompletionRequest
from tollbridge.worker.forced import maybe_calls
from tollbridge.worker.prompts import split_prompts
from tollbridge.worker.structured import maybe_structure

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat may fill the context
MAX_STOP_STRINGS = 32  # each costs a search per token
MAX_LOGPROBS = 20  # per token, as OpenAI and vLLM
MAX_CHOICES = 128  # of one request, over all its prompts
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_BIAS = 100.0  # what is beyond is cut, as in vLLM
MAX_LISTED_TOKENS = 1024  # in logit_bias and in each list of token ids: each costs with every token drawn
MAX_REPETITION = 1000.0  # and its inverse; what is far beyond makes logits that are no numbers, for the whole batch
_MAX_DIGITS = 20  # of a token id

Asked = CompletionRequest | ChatCompletionRequest


def common_params(asked: Asked, model: ModelInfo, tokenizer: Tokenizer) -> SamplingParams:
    """Return the checked parameters but for `max_tokens`, which depends on the prompt; RequestError names the wrong."""
    _check_ranges(asked)
    return SamplingParams(
        max_tokens=1,
        min_tokens=asked.min_tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(asked.top_k or 0, 0),
        min_p=asked.min_p or 0.0,
        seed=asked.seed,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        logit_bias=_logit_bias(asked.logit_bias, model.vocab_size),
        allowed_token_ids=_token_ids("allowed_token_ids", asked.allowed_token_ids, model.vocab_size),
        bad_words=_bad_words(asked.bad_words, tokenizer, model.vocab_size),
        structure=_structure(asked),
        stop=_stop_strings(asked.stop),
        stop_token_ids=_token_ids("stop_token_ids", asked.stop_token_ids, model.vocab_size),
        include_stop=asked.include_stop_str_in_output,
        ignore_eos=asked.ignore_eos,
        skip_special_tokens=asked.skip_special_tokens,
        logprobs=_num_logprobs(asked),
        prompt_logprobs=_num_prompt_logprobs(asked),
    )


def params_of_prompt(
    common: SamplingParams, asked: Asked, model: ModelInfo, *, num_prompt_tokens: int
) -> list[SamplingParams]:
    """Return the parameters of each of the choices of a prompt: those with a seed count on from it, as in vLLM."""
    max_tokens = _max_tokens(asked, model, num_prompt_tokens)
    _require(asked.min_tokens <= max_tokens, "min_tokens", f"must be at most max_tokens, {max_tokens}")
    seeds = [None if asked.seed is None else asked.seed + choice for choice in range(asked.n)]
    return [replace(common, max_tokens=max_tokens, seed=seed) for seed in seeds]


def check_shape(asked: Asked) -> None:
    """Refuse options that contradict each other."""
    num_prompts = len(split_prompts(asked.prompt)) if isinstance(asked, CompletionRequest) else 1
    _require(asked.n >= 1, "n", f"must be at least 1, got {asked.n}")
    few = num_prompts * asked.n <= MAX_CHOICES
    _require(few, "n", f"asks {asked.n} choices of {num_prompts} prompts: at most {MAX_CHOICES} do in all")
    _require(asked.stream or asked.stream_options is None, "stream_options", 'needs "stream": true')
    _require(asked.cache_salt != "", "cache_salt", "must not be empty")
    _require(not (asked.stream and asked.prompt_logprobs), "prompt_logprobs", 'cannot be had with "stream": true')
    _require(asked.continued_tokens >= 0, "continued_tokens", f"must be 0 or more, got {asked.continued_tokens}")
    _require(abs(asked.priority) < 1 << 63, "priority", "must fit 64 bits")
    if isinstance(asked, ChatCompletionRequest):
        _require(asked.logprobs or not asked.top_logprobs, "top_logprobs", 'needs "logprobs": true')


def only_echoes(asked: Asked) -> bool:
    """Return whether the prompt alone is wanted back; a token is generated all the same, as in vLLM."""
    return isinstance(asked, CompletionRequest) and asked.echo and asked.max_tokens == 0


def _check_ranges(asked: Asked) -> None:
    temperature, top_p, top_k, seed = asked.temperature, asked.top_p, asked.top_k, asked.seed
    _require(temperature is None or 0 <= temperature <= 2, "temperature", f"must be within 0 and 2, got {temperature}")
    _require(top_p is None or 0 < top_p <= 1, "top_p", f"must be above 0 and at most 1, got {top_p}")
    _require(top_k is None or -1 <= top_k < 1 << 31, "top_k", f"must be -1 or 0 (all) or at least 1, got {top_k}")
    _require(seed is None or -(1 << 63) <= seed < 1 << 63, "seed", "must fit 64 bits")
    _require(asked.min_p is None or 0 <= asked.min_p <= 1, "min_p", f"must be within 0 and 1, got {asked.min_p}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(asked, name)
        _require(value is None or -2 <= value <= 2, name, f"must be within -2 and 2, got {value}")
    repetition = asked.repetition_penalty
    _require(
        repetition is None or 1 / MAX_REPETITION <= repetition <= MAX_REPETITION,
        "repetition_penalty",
        f"must be within {1 / MAX_REPETITION:g} and {MAX_REPETITION:g}, got {repetition}",
    )
    _require(asked.min_tokens >= 0, "min_tokens", f"must be 0 or more, got {asked.min_tokens}")


def _structure(asked: Asked) -> Structure | None:
    """Return what the output must look like: calls of tools that must come, or the shape that is asked for."""
    shape = maybe_structure(asked.response_format, asked.structured_outputs)
    calls = maybe_calls(asked) if isinstance(asked, ChatCompletionRequest) else None
    one = shape is None or calls is None
    _require(one, "tool_choice", "asks for a call, so that the answer can have no other structure")
    return shape or calls


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
    if only_echoes(asked):
        return 1
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


def _num_logprobs(asked: Asked) -> int | None:
    if isinstance(asked, ChatCompletionRequest):
        wanted, name = (asked.top_logprobs or 0) if asked.logprobs else None, "top_logprobs"
    else:
        wanted, name = asked.logprobs, "logprobs"
    _check_num_logprobs(name, wanted)
    return wanted


def _num_prompt_logprobs(asked: Asked) -> int | None:
    _check_num_logprobs("prompt_logprobs", asked.prompt_logprobs)
    if asked.prompt_logprobs is None and isinstance(asked, CompletionRequest) and asked.echo:
        return asked.logprobs
    return asked.prompt_logprobs


def _check_num_logprobs(name: str, wanted: int | None) -> None:
    right = wanted is None or 0 <= wanted <= MAX_LOGPROBS
    _require(right, name, f"must be within 0 and {MAX_LOGPROBS}, got {wanted}")


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    _require(len(strings) <= MAX_STOP_STRINGS, "stop", f"has {len(strings)} strings, at most {MAX_STOP_STRINGS} do")
    _require(all(strings), "stop", "must not contain an empty string")
    return strings


def _token_ids(name: str, ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    _check_number(name, len(ids or ()))
    for token_id in ids or ():
        _require(
            0 <= token_id < vocab_size,
            name,
            f"names token id {token_id}, which is not in the vocabulary of {vocab_size} tokens",
        )
    _require(ids is None or bool(ids) or name != "allowed_token_ids", name, "must not be empty")
    return tuple(dict.fromkeys(ids or ()))


def _logit_bias(biases: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    _check_number("logit_bias", len(biases or ()))
    for key, bias in (biases or {}).items():
        right = key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS and int(key) < vocab_size
        shown = key[:_MAX_DIGITS]
        _require(right, "logit_bias", f"names token {shown!r}, which is not one of the {vocab_size} token ids")
        found[int(key)] = max(-MAX_BIAS, min(MAX_BIAS, bias))
    return tuple(found.items())


def _bad_words(words: list[str] | None, tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word as it stands at the beginning and, where that is another one, within a text."""
    words = words or []
    _require(len(words) <= MAX_BAD_WORDS, "bad_words", f"has {len(words)} words, at most {MAX_BAD_WORDS} do")
    right = all(word.strip() and len(word) <= MAX_BAD_WORD_CHARACTERS for word in words)
    _require(right, "bad_words", f"must hold words of 1 to {MAX_BAD_WORD_CHARACTERS} characters")
    found: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        first, within = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        _require(bool(first), "bad_words", "has a word without tokens")
        found[first] = None
        if within and within[0] != first[0] and len(within) == len(first):
            found[within] = None
    _require(all(0 <= max(ids) < vocab_size for ids in found), "bad_words", "has a word outside the vocabulary")
    return tuple(found)


def _check_number(name: str, number: int) -> None:
    _require(number <= MAX_LISTED_TOKENS, name, f"lists {number} tokens: at most {MAX_LISTED_TOKENS} do")


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise RequestError(f'Parameter "{name}" {what}.', param=name)
