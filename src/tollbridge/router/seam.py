"""Where the continuation of a broken stream begins, so that its text fits what the client has.

A worker holds text back: the start of a character, the possible start of a stop string. So the tokens that it named
may say more than the client has read, and a worker that went on behind them would leave a gap. The seam is the last
token at which all is clear: the text up to it ends with a whole character, the client has all of it, and (with stop
strings) so much more that no stop string can begin before it and end behind what the client has. The tokens behind it
are generated again, and the text that the client has of them, the overlap, is taken off.

Texts are decoded by the worker that will go on (`/detokenize`): the router needs no tokenizer for it. Decoding starts
with the last tokens of the prompt, for some tokenizers drop the space in front of the first word.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tollbridge.router.transcript import Transcript

NUM_CONTEXT_TOKENS = 8
MAX_TRIES = 12  # decodes, each one token further back
_INCOMPLETE = "\ufffd"

Detokenize = Callable[[list[int]], Awaitable[str]]


@dataclass(frozen=True, kw_only=True)
class Seam:
    cut: int  # generated tokens that the continuation takes for prompt
    overlap: str  # what the client has of the text behind the cut
    again: tuple[int, ...]  # the tokens behind the cut


async def find_seam(detokenize: Detokenize, told: Transcript, stop: Sequence[str]) -> Seam | None:
    """Return the last clear place, None when there is none near the end."""
    text, context = told.text, (told.prompt_ids or [])[-NUM_CONTEXT_TOKENS:]
    before = await detokenize(context) if context else ""
    if before.endswith(_INCOMPLETE):
        before = before.rstrip(_INCOMPLETE)
    margin = max((len(one) for one in stop), default=1) - 1
    last = _tokens_with_margin(told, margin)
    for cut in range(last, max(last - MAX_TRIES, -1), -1):
        said = await detokenize(context + told.ids[:cut]) if cut else before
        if said.endswith(_INCOMPLETE) or not said.startswith(before):
            continue
        said = said[len(before) :]
        if text.startswith(said) and (len(text) - len(said) >= margin or cut == 0):
            return Seam(cut=cut, overlap=text[len(said) :], again=tuple(told.ids[cut:]))
    return None


def _tokens_with_margin(told: Transcript, margin: int) -> int:
    """Return how many tokens there are in front of the last `margin` characters that the client has."""
    cut, behind = len(told.ids), 0
    for num_ids, text in reversed(told.pieces):
        if behind >= margin:
            break
        behind += len(text)
        cut -= num_ids
    return cut
