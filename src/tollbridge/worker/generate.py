"""vLLM's `/inference/v1/generate`: token ids in, token ids out. The request as a completion of the same meaning.

Its sampling parameters are an object of their own, under the names that they have in vLLM's `SamplingParams`. Two
customs are not OpenAI's: without `max_tokens` an answer may fill the context, and one that would not fit is cut.
"""

from __future__ import annotations

import msgspec

from tollbridge.errors import RequestError
from tollbridge.wire.openai import CompletionRequest, GenerateRequest
from tollbridge.worker.parse import parse, parse_fields, refuse_unless_neutral

_OBJECT = "sampling_params"
_SAMPLING = frozenset({
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "skip_special_tokens", "bad_words", "allowed_token_ids", "logprobs", "prompt_logprobs",
    "structured_outputs",
})  # fmt: skip
_WITHOUT_EFFECT = frozenset({"detokenize", "output_kind"})  # about a text that this path does not show


def as_completion(body: bytes, max_model_len: int) -> CompletionRequest:
    """Return the completion that `body` asks for; RequestError names what is wrong."""
    asked = parse(body, GenerateRequest)
    if not asked.token_ids:
        raise RequestError('Parameter "token_ids" must not be empty.', param="token_ids")
    completion = parse(msgspec.json.encode(_sampling(asked) | _rest(asked)), CompletionRequest)
    room = max_model_len - len(asked.token_ids)
    if room < 1:
        return completion  # to be refused with all that is too long
    wanted = room if completion.max_tokens is None else min(completion.max_tokens, room)
    return msgspec.structs.replace(completion, max_tokens=wanted, return_tokens_as_token_ids=True)


def _sampling(asked: GenerateRequest) -> dict[str, msgspec.Raw]:
    fields = parse_fields(asked.sampling_params)
    for name in fields.keys() - _SAMPLING - _WITHOUT_EFFECT:
        refuse_unless_neutral(name, fields[name], set(_SAMPLING))
    return {name: value for name, value in fields.items() if name in _SAMPLING}


def _rest(asked: GenerateRequest) -> dict[str, object]:
    return {
        "prompt": asked.token_ids,
        "model": asked.model,
        "stream": asked.stream,
        "stream_options": asked.stream_options,
        "return_token_ids": asked.return_token_ids,
        "cache_salt": asked.cache_salt,
        "priority": asked.priority,
        "kv_transfer_params": asked.kv_transfer_params,
    }
