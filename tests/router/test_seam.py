"""Where a continuation may begin, for byte-level tokens: each token is some bytes of UTF-8."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tollbridge.router.seam import find_seam
from tollbridge.router.transcript import Transcript

PROMPT = [b"The", b" toll "]


def complete(data: bytes) -> str:
    """Return the text less the character that is incomplete at its end."""
    return data.decode(errors="replace").rstrip("\ufffd")


def told_of(tokens: list[bytes], num_told: int, held: int = 0) -> Transcript:
    """What a worker told that holds back `held` characters and whatever is incomplete."""
    told = Transcript(prompt_ids=[0, 1])
    said = 0
    for at in range(num_told):
        text = complete(b"".join(tokens[: at + 1]))
        end = max(len(text) - held, said)
        told.add([2 + at], text[said:end], None)
        said = end
    return told


async def seam_of(tokens: list[bytes], told: Transcript, stop: list[str]) -> tuple[int, str] | None:
    vocabulary = PROMPT + tokens

    async def detokenize(ids: list[int]) -> str:
        return b"".join(vocabulary[i] for i in ids).decode(errors="replace")

    seam = await find_seam(detokenize, told, stop)
    return seam and (seam.cut, seam.overlap)


async def test_behind_the_last_token_when_all_is_clear() -> None:
    tokens = [b"a", b"b", b"c"]
    assert await seam_of(tokens, told_of(tokens, 2), []) == (2, "")
    assert await seam_of(tokens, told_of(tokens, 0), []) == (0, "")


async def test_never_within_a_character() -> None:
    bridge = "🌉".encode()
    tokens = [b"a", b" " + bridge[:2], bridge[2:3], bridge[3:], b"b"]
    # the space was told with the first half of the character
    assert [await seam_of(tokens, told_of(tokens, n), []) for n in range(6)] == [
        (0, ""), (1, ""), (1, " "), (1, " "), (4, ""), (5, ""),
    ]  # fmt: skip


async def test_so_far_back_that_no_stop_string_spans_it() -> None:
    tokens = [b"one ", b"two ", b"th", b"ree"]
    told = told_of(tokens, 4, held=4)  # vLLM holds back the longest stop string less one
    assert told.text == "one two t"
    assert await seam_of(tokens, told, ["STOP!"]) == (1, "two t")


async def test_text_that_does_not_fit_its_tokens() -> None:
    told = Transcript(prompt_ids=[0, 1])
    told.add([2, 3], "xy", None)
    assert await seam_of([b"a", b"b"], told, []) == (0, "xy")  # all of it again; the splice will compare
    for _ in range(20):
        told.add([3], "x", None)
    assert await seam_of([b"a", b"b"], told, []) is None


@given(st.text(min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(0, 5))
async def test_continuing_at_the_seam_loses_and_repeats_nothing(text: str, random: object, longest: int) -> None:
    data = text.encode()
    cuts = sorted({0, len(data), *(random.randrange(len(data) + 1) for _ in range(6))})  # type: ignore[attr-defined]
    tokens = [data[a:b] for a, b in pairwise(cuts)]
    for num_told in range(len(tokens) + 1):
        told = told_of(tokens, num_told, held=max(longest - 1, 0))
        seam = await seam_of(tokens, told, ["#" * longest] if longest else [])
        assert seam is not None
        cut, overlap = seam
        rest = b"".join(tokens)[len(b"".join(tokens[:cut])) :].decode()  # what a worker says behind the seam
        assert rest.startswith(overlap)
        assert told.text + rest[len(overlap) :] == text
