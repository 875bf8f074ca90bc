from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tollbridge.engine.base import SamplingParams
from tollbridge.engine.detokenizer import IncrementalText, _StopStrings
from tollbridge.engine.tokenizer import ModelTokenizer

TEXTS = [
    "naïve café",
    "你好，世界",
    "👩‍👩‍👧‍👦 family",
    "ok 🤷🏽‍♀️!",
    "a\n\n  b\t",
    "ﷺ",
    "\u200d",
    "ÿ" * 9,
    "مرحبا",
    "हिन्दी",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer(tiny_model_dir, name="tiny")


def sampling(*stop: str, **more: bool) -> SamplingParams:
    return SamplingParams(max_tokens=9, stop=stop, **more)


def push_all(stream: IncrementalText, token_ids: list[int]) -> tuple[list[str], str | None]:
    pieces = []
    for token_id in token_ids:
        piece, stopped = stream.push(token_id)
        pieces.append(piece)
        if stopped is not None:
            return pieces, stopped
    return [*pieces, stream.finish()], None


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from(TEXTS), prompt=st.text(min_size=1, max_size=10))
def test_pieces_of_any_text_add_up_to_it(tokenizer: ModelTokenizer, text: str, prompt: str) -> None:
    ids = tokenizer.encode(text)
    pieces, _ = push_all(tokenizer.text_stream(tokenizer.encode(prompt), sampling()), ids)
    if not prompt.endswith("\ufffd"):
        assert "".join(pieces) == tokenizer.decode(ids)


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=60))
def test_pieces_of_any_tokens_add_up_to_their_decode(tokenizer: ModelTokenizer, ids: list[int]) -> None:
    pieces, _ = push_all(tokenizer.text_stream([5], sampling()), ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_has_half_a_character(tokenizer: ModelTokenizer, text: str) -> None:
    pieces, _ = push_all(tokenizer.text_stream([5], sampling()), tokenizer.encode(text))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_text_is_not_kept_waiting(tokenizer: ModelTokenizer) -> None:
    """What was a whole character is out at once, also when the token after it began another."""
    stream = tokenizer.text_stream([5], sampling())
    given = ""
    for token_id in tokenizer.encode("ab你"):
        given += stream.push(token_id)[0]
        assert given in ("a", "ab", "ab你")
    assert given == "ab你"


def test_a_prompt_that_ends_within_a_character_gets_it_completed(tokenizer: ModelTokenizer) -> None:
    whole = tokenizer.encode("so 你好")
    for cut in range(1, len(whole)):
        started = tokenizer.text_stream([5], sampling())
        first = "".join(started.push(token_id)[0] for token_id in whole[:cut])
        rest, _ = push_all(tokenizer.text_stream([5, *whole[:cut]], sampling()), whole[cut:])
        assert first + "".join(rest) == "so 你好"


def test_special_tokens_have_no_text(tokenizer: ModelTokenizer) -> None:
    ids = [1, *tokenizer.encode("hi"), 2]
    assert "".join(push_all(tokenizer.text_stream([5], sampling()), ids)[0]) == "hi"


def test_stop_strings_span_tokens(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("the keeper counts. STOP here")
    pieces, stopped = push_all(tokenizer.text_stream([5], sampling("STOP", "never")), ids)
    assert stopped == "STOP"
    assert "".join(pieces) == "the keeper counts. "


def test_what_may_start_a_stop_string_is_held_and_given_back(tokenizer: ModelTokenizer) -> None:
    stream = tokenizer.text_stream([5], sampling("\n\nQ:"))
    pieces = [stream.push(token_id)[0] for token_id in tokenizer.encode("answer\n\nQ")]
    assert "".join(pieces) == "answer"
    assert stream.finish() == "\n\nQ"


def test_the_stop_string_is_kept_where_that_is_wanted(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("the keeper counts. STOP here")
    pieces, stopped = push_all(tokenizer.text_stream([5], sampling("STOP", include_stop=True)), ids)
    assert ("".join(pieces), stopped) == ("the keeper counts. STOP", "STOP")


def test_special_tokens_are_text_where_that_is_wanted(tokenizer: ModelTokenizer) -> None:
    ids = [1, *tokenizer.encode("hi"), 2]
    stream = tokenizer.text_stream([5], sampling(skip_special_tokens=False))
    assert "".join(push_all(stream, ids)[0]) == "<|im_start|>hi<|im_end|>"


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
    stop=st.text("ab", min_size=1, max_size=4),
    at=st.integers(0, 8),
)
def test_a_stop_string_that_came_too_early_is_text(pieces: list[str], stop: str, at: int) -> None:
    """Only one that is complete behind the first `at` pieces counts, wherever it began."""
    scanner, given, stopped = _StopStrings((stop,), include_stop=False), "", None
    for index, piece in enumerate(pieces):
        text, stopped = scanner.push(piece, may_stop=index >= at)
        given += text
        if stopped is not None:
            break
    early, whole = len("".join(pieces[:at])), "".join(pieces)
    ends = [end for end in range(early + 1, len(whole) + 1) if whole[:end].endswith(stop)]
    if stopped is None:
        assert not ends
        assert given + scanner.finish() == whole
    else:
        assert given == whole[: ends[0] - len(stop)]


stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def naive_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The stop string that is complete first when the text arrives letter by letter; of those, the longest."""
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), stop=stops)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stop: tuple[str, ...]) -> None:
    scanner, given, stopped = _StopStrings(stop, include_stop=False), "", None
    for piece in pieces:
        text, stopped = scanner.push(piece, may_stop=True)
        given += text
        if stopped is not None:
            break
    if stopped is None:
        given += scanner.finish()
    assert (given, stopped) == naive_stop("".join(pieces), stop)


@given(text=st.text("abc", max_size=20), stop=stops)
def test_held_text_could_always_start_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    scanner = _StopStrings(stop, include_stop=False)
    for letter in text:
        _, stopped = scanner.push(letter, may_stop=True)
        if stopped is not None:
            return
    held = scanner.finish()
    assert not held or any(one.startswith(held) for one in stop)


@pytest.mark.model
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), ids=st.lists(st.integers(0, 49151), max_size=30))
def test_smollm2_vocabulary(smollm2_dir: Path, text: str, ids: list[int]) -> None:
    tokenizer = smollm2_tokenizer(smollm2_dir)
    tokens = [*tokenizer.encode(text), *ids]
    pieces, _ = push_all(tokenizer.text_stream([17], sampling()), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)


_LOADED: dict[Path, ModelTokenizer] = {}


def smollm2_tokenizer(folder: Path) -> ModelTokenizer:
    """Load once: hypothesis calls the test many times."""
    if folder not in _LOADED:
        _LOADED[folder] = ModelTokenizer(folder, name="smollm2")
    return _LOADED[folder]
