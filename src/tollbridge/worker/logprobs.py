"""Log probabilities as OpenAI's and vLLM's bodies write them. Pure.

What vLLM does and one might not expect: the token that was drawn comes first among the likeliest ones, also where it is
among them anyway; a completion so names up to one more than was asked for, a chat exactly so many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tollbridge.engine.base import PromptLogprobs, TokenLogprobs
from tollbridge.wire import openai as wire

LEAST = -9999.0  # stands for minus infinity, which JSON lacks

Spell = Callable[[int], str]  # a token id as it is shown


def completion_logprobs(
    spell: Spell, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None], num_top: int, *, offset: int = 0
) -> wire.CompletionLogprobs:
    """Return the object of a completion; its text begins at `offset` of the choice's."""
    tokens = [spell(token_id) for token_id in token_ids]
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return wire.CompletionLogprobs(
        text_offset=offsets[: len(tokens)],
        token_logprobs=[None if one is None else _finite(one.logprobs[0]) for one in found],
        tokens=tokens,
        top_logprobs=[
            None if one is None else {spell(token): value for token, value in _distinct(one, num_top + 1)}
            for one in found
        ],
    )


def chat_logprobs(
    spell: Spell, token_ids: Sequence[int], found: Sequence[TokenLogprobs], num_top: int
) -> wire.ChatLogprobs:
    """Return the object of a chat."""
    content = []
    for token_id, one in zip(token_ids, found, strict=True):
        token = spell(token_id)
        top = [
            wire.ChatTopLogprob(token=(text := spell(each)), logprob=value, bytes=_bytes(text))
            for each, value in _distinct(one, num_top)
        ]
        content.append(
            wire.ChatLogprob(token=token, logprob=_finite(one.logprobs[0]), bytes=_bytes(token), top_logprobs=top)
        )
    return wire.ChatLogprobs(content=content)


def prompt_logprobs(spell: Spell, found: PromptLogprobs) -> wire.PromptLogprobs:
    """Return those of a prompt, by position and token id."""
    return [None if one is None else _by_id(spell, one) for one in found]


def _by_id(spell: Spell, one: TokenLogprobs) -> dict[str, wire.PromptLogprob]:
    ranks = [one.rank, *range(1, len(one.token_ids))]
    return {
        str(token_id): wire.PromptLogprob(logprob=_finite(value), rank=rank, decoded_token=spell(token_id))
        for token_id, value, rank in zip(one.token_ids, one.logprobs, ranks, strict=True)
    }


def _distinct(one: TokenLogprobs, limit: int) -> Iterator[tuple[int, float]]:
    """Yield at most `limit` different tokens with their log probabilities."""
    distinct: Iterable[tuple[int, float]] = dict(zip(one.token_ids, one.logprobs, strict=True)).items()
    for place, (token_id, value) in enumerate(distinct):
        if place < limit:
            yield token_id, _finite(value)


def _finite(value: float) -> float:
    return max(value, LEAST)


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", errors="replace"))
