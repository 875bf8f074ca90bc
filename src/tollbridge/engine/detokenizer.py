"""The text of a request, token by token: whole characters only, ending before a stop string.

Tokens are not characters: a byte-level vocabulary splits an emoji over four tokens, and others drop the space before
the first word. So new text is the difference between two decodes of a short window of tokens, `with` and `without` the
newest ones (the technique of vLLM's and TGI's detokenizers), and characters that are still incomplete are held back.
The window starts with the last prompt tokens: text that continues a prompt keeps its leading space, and a prompt that
ends within a character (a stream continued on another worker) gets it completed.

For byte-level vocabularies the pieces add up to the decode of the whole, whatever the tokens. With SentencePiece byte
fallback that holds unless the tokens are invalid UTF-8: there one bad byte spoils the decode of its good neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # how a decoder shows bytes that are not (yet) a character
NUM_CONTEXT_TOKENS = 6  # a character has at most 4 bytes, so 6 tokens hold the last one whole
MAX_WINDOW_TOKENS = 16  # then the window is cut back to the context

Decode = Callable[[list[int]], str]


class IncrementalText:
    """Implements `ports.TextStream`: incremental decoding, then stop strings."""

    def __init__(
        self, decode: Decode, prompt_token_ids: Sequence[int], stop: tuple[str, ...], *, include_stop: bool = False
    ) -> None:
        self._pieces = _Pieces(decode, prompt_token_ids)
        self._stops = _StopStrings(stop, include_stop=include_stop) if stop else None

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; return the new text and the stop string that is now complete, if any and if it may stop."""
        text = self._pieces.push(token_id)
        return self._stops.push(text, may_stop=may_stop) if self._stops else (text, None)

    def finish(self) -> str:
        """Return what was held back: the possible start of a stop string, then the incomplete character."""
        held = self._stops.finish() if self._stops else ""
        return held + self._pieces.finish()


class _Pieces:
    """Turns tokens into pieces of text that end at character boundaries."""

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_given = len(_complete(decode(self._window)))  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        complete = _complete(text)
        piece = complete[self._num_given :]
        self._num_given = max(self._num_given, len(complete))
        if len(complete) == len(text) and len(self._window) >= MAX_WINDOW_TOKENS:
            self._shorten()
        return piece

    def finish(self) -> str:
        piece = self._decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _shorten(self) -> None:
        """Keep the context that the next tokens need; only at a character boundary, where all text was given out."""
        self._window = self._window[-NUM_CONTEXT_TOKENS:]
        self._num_given = len(self._decode(self._window))


class _StopStrings:
    """Finds the stop string that is completed first, however the text is cut into pieces."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str, *, may_stop: bool) -> tuple[str, str | None]:
        text = self._held + piece
        found = self._first(text, len(self._held)) if may_stop else None
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop) if self._include_stop else start], stop
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return (start, stop string) of the first match to end behind `num_old` characters; of those, the longest."""
        starts = ((stop, text.find(stop, max(0, num_old - len(stop) + 1))) for stop in self._stop)
        matches = [(start + len(stop), start, stop) for stop, start in starts if start >= 0]
        return min(matches)[1:] if matches else None

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of `text` that may be the start of a stop string."""
        longest = max(map(len, self._stop)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0


def _complete(text: str) -> str:
    """Return `text` without the incomplete character at its end."""
    return text.rstrip(INCOMPLETE)
