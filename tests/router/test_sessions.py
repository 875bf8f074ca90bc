"""What a session adds to what the index knows, and when it says nothing."""

from __future__ import annotations

import pytest

from tests.support.router_rig import Rig, rig
from tests.support.stub_worker import StubWorker
from tollbridge.router.sessions import Seat, Sessions

BLOCK = 16


def seat(**more: object) -> Seat:
    return Seat(**{"worker": "d0", "prompt_tokens": 100, "num_tokens": 140, "at_s": 0.0, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "num_tokens", "cached"),
    [
        (96, 200, 128),  # all of the last prompt is there, so the answer is too: 139 tokens, less what fills no block
        (96, 130, 128),  # the next prompt ends before
        (96, 100, 96),
        (80, 200, 80),  # another prompt, or evicted
        (0, 200, 0),
        (160, 200, 160),  # more is known than the session says
    ],
)
def test_the_last_answer_is_cached_where_the_last_prompt_is(found: int, num_tokens: int, cached: int) -> None:
    assert seat().cached(found, num_tokens, BLOCK) == cached


def test_a_prompt_that_fills_no_block_proves_nothing() -> None:
    assert seat(prompt_tokens=10).cached(0, 200, BLOCK) == 0


def test_a_session_is_forgotten_in_time_and_in_turn() -> None:
    sessions = Sessions(lasts_s=10.0, max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.served(name, f"w{name}", prompt_tokens=5, completion_tokens=2, now_s=0.0)
    assert len(sessions) == 2
    assert sessions.find("b", 1.0) is None
    found = sessions.find("a", 9.9)
    assert found is not None
    assert (found.worker, found.num_tokens) == ("wa", 7)
    assert sessions.find("a", 10.0) is None
    assert sessions.find(None, 0.0) is None


def workers() -> list[StubWorker]:
    return [StubWorker(f"d{number}", "decode") for number in range(4)]


async def ask(r: Rig, prompt: object, session: str | None) -> str:
    headers = {"x_session_id": session} if session else {}
    answer = await r.post({"prompt": prompt}, **headers)
    assert answer.status == 200
    return str(answer.decision["decode"])


@pytest.mark.parametrize("policy", ["local", "kv-aware"])
async def test_turns_of_a_session_stay_together_while_all_workers_are_idle(policy: str) -> None:
    async with rig(*workers(), policy=policy) as r:
        for session in ("a", "b", "c"):
            served = [await ask(r, [1000 * ord(session) + turn] * 3, session) for turn in range(4)]
            assert len(set(served)) == 1
        assert len({await ask(r, [turn] * 3, None) for turn in range(8)}) > 1


async def test_two_routers_agree_about_a_session_that_neither_knows() -> None:
    names = []
    for _ in range(2):
        async with rig(*workers()) as r:
            names.append([await ask(r, [7, 8, 9], session) for session in "abcdefgh"])
    assert names[0] == names[1]
    assert len(set(names[0])) > 1


async def test_the_next_turn_finds_prompt_and_answer() -> None:
    """No KV events here: only the session knows that the worker has its answer too."""
    only = StubWorker("d0", "decode")
    only.prompt_tokens, only.tokens = 64, ["x"] * 40
    async with rig(only) as r:
        prompt = list(range(64))
        await ask(r, prompt, "s")
        longer = [*prompt, *range(1000, 1080)]
        with_session = (await r.post({"prompt": longer}, x_session_id="s")).decision["predicted"]
        assert with_session["cached_tokens"] == 96  # 103 tokens are, less what fills no block
    async with rig(only) as r:
        await ask(r, prompt, "s")
        without = (await r.post({"prompt": longer}, x_session_id="t")).decision["predicted"]
        assert without["cached_tokens"] == 64
