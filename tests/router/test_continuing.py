"""A stream whose worker fails goes on elsewhere, and its client cannot tell; or it ends with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.router_rig import Answer, Rig, rig
from tests.support.stub_worker import PROMPT_IDS, Behaviour, StubWorker
from tollbridge.router.limits import Limits
from tollbridge.router.resume import OBSTACLES

STREAM = {"prompt": "Hello", "max_tokens": 8, "stream": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


def two() -> tuple[StubWorker, StubWorker]:
    return StubWorker("d0", "decode"), StubWorker("d1", "decode")


def breaking(r: Rig, after: int, mode: str = "die") -> None:
    r["d0"].behaviour = dict.fromkeys(("local", "decode"), Behaviour(mode, after=after))  # type: ignore[arg-type]


def text_of(answer: Answer) -> str:
    chunks = [event for event in answer.events if event != "[DONE]" and event.get("choices")]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for e in chunks for c in e["choices"])


@pytest.mark.parametrize("mode", ["die", "end_early"])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("body", [STREAM, STREAM | USAGE, CHAT | USAGE])
async def test_the_client_sees_one_answer(body: dict[str, Any], after: int, mode: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with rig(*two()) as r:
        whole = await r.post(body, path=path)
        breaking(r, after, mode)
        answer = await r.post(body, path=path, x_request_id="broken")
        if answer.decision["decode"] == "d1":  # now it is d0's turn
            answer = await r.post(body, path=path, x_request_id="broken")
        assert text_of(answer) == "Hello world"
        assert [e if e == "[DONE]" else (e["id"], e["object"]) for e in answer.events] == [
            e if e == "[DONE]" else (e["id"], e["object"]) for e in whole.events
        ]
        assert b"token_ids" not in answer.body
        if "stream_options" in body:
            usage = answer.events[-2]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT_IDS), 4)
            assert usage["total_tokens"] == len(PROMPT_IDS) + 4
        record = await r.record("broken")
        assert record["decision"]["reason"] == "continued"
        assert record["happened"]["status"] == "ok"
        assert record["happened"]["continued_at"] == [after]
        assert (record["happened"]["prompt_tokens"], record["happened"]["completion_tokens"]) == (3, 4)


async def test_the_continuation_is_a_token_request_for_the_rest() -> None:
    async with rig(*two()) as r:
        breaking(r, 2)
        for _ in range(2):
            await r.post(CHAT | {"min_tokens": 3, "top_p": 0.5}, path="/v1/chat/completions")
        [body] = [seen.body for seen in r["d1"].seen if seen.path == "/v1/completions"]
        assert body["prompt"] == [*PROMPT_IDS, 100, 101]
        assert (body["max_tokens"], body["min_tokens"], body["top_p"], body["stream"]) == (6, 1, 0.5, True)
        assert "messages" not in body
        first = r["d0"].seen[-1].body
        assert body["seed"] == first["seed"]  # drawn by the router: embedded engines go on as they would have


async def test_embedded_engines_are_told_what_was_generated() -> None:
    more = {"presence_penalty": 0.5, "structured_outputs": {"regex": ".*"}}
    async with rig(*two()) as r:
        breaking(r, 2)
        for _ in range(2):
            assert text_of(await r.post(STREAM | more)) == "Hello world"
        [body] = [seen.body for seen in r["d1"].seen if isinstance(seen.body["prompt"], list)]
        assert (body["prompt"], body["continued_tokens"]) == ([*PROMPT_IDS, 100, 101], 2)
        assert {name: body[name] for name in more} == more


async def test_ids_that_the_client_asked_for_are_each_told_once() -> None:
    async with rig(*two()) as r:
        breaking(r, 3)
        for _ in range(2):
            answer = await r.post(STREAM | {"return_token_ids": True})
            told = [i for e in answer.events if e != "[DONE]" for c in e["choices"] for i in c["token_ids"]]
            assert told == [100, 101, 102, 103]


async def test_nor_again_when_the_next_worker_fails_before_it_says_them() -> None:
    """A stop string moves the seam back: some tokens that the client has are generated again."""
    async with rig(*two(), StubWorker("d2", "decode")) as r:
        breaking(r, 3)
        r["d1"].behaviour["local"] = Behaviour("die")
        answer = await r.post(STREAM | {"return_token_ids": True, "stop": "xyz!"}, x_request_id="twice")
        assert text_of(answer) == "Hello world"
        told = [i for e in answer.events if e != "[DONE]" for c in e["choices"] for i in c["token_ids"]]
        assert told == [100, 101, 102, 103]
        assert (await r.record("twice"))["happened"]["continued_at"] == [2, 2]


async def test_a_lost_end_needs_no_worker() -> None:
    async with rig(*two()) as r:
        breaking(r, 4)  # all tokens and the finish, then nothing
        for _ in range(2):
            answer = await r.post(STREAM | USAGE)
            assert text_of(answer) == "Hello world"
            assert answer.events[-1] == "[DONE]"
        assert all(len(seen.body["prompt"]) == 5 for seen in r["d1"].seen)  # the text, no continuation


async def test_a_worker_that_shuts_down_hands_over() -> None:
    """Its error event is for the router, not for the client."""
    async with rig(*two()) as r:
        r["d0"].behaviour["local"] = Behaviour(
            "break_event", after=2, error={"message": "This worker is shutting down.", "code": 503}
        )
        for _ in range(2):
            answer = await r.post(STREAM)
            assert text_of(answer) == "Hello world"


CANNOT: dict[str, tuple[dict[str, Any], str]] = {
    "logprobs": ({"logprobs": 1}, "logprobs"),
    "structured output": ({"structured_outputs": {"regex": "a"}}, "structured_output"),
    "tools": ({"tools": [{"type": "function"}]}, "tools"),
    "penalties": ({"presence_penalty": 0.5}, "penalties"),
    "several": ({"n": 2}, "several_choices"),
    "unknown": ({"a_new_parameter": 1}, "parameter"),
}


@pytest.mark.parametrize("case", CANNOT)
async def test_what_cannot_be_continued_ends_with_a_reason(case: str) -> None:
    more, reason = CANNOT[case]
    workers = two()
    if reason in ("penalties", "structured_output"):  # an embedded engine is told what was generated
        for worker in workers:
            worker.engine_kind = "vllm"
    async with rig(*workers) as r:
        for name in ("d0", "d1"):
            r[name].behaviour["local"] = Behaviour("die", after=2)
        answer = await r.post(STREAM | more)
        error = answer.events[-1]["error"]
        assert (error["type"], error["code"]) == ("upstream_error", 502)
        assert f"({reason}): {OBSTACLES[reason]}" in error["message"]
        assert "return_token_ids" not in r["d0"].seen[0].body  # nothing is asked for that is of no use
        assert await r.metric("continuations_total", outcome=reason) == 1


async def test_a_seed_means_the_same_draws_or_an_error() -> None:
    workers = two()
    for worker in workers:
        worker.engine_kind = "vllm"
    async with rig(*workers) as r:
        for name in ("d0", "d1"):
            r[name].behaviour["local"] = Behaviour("die", after=2)
        answer = await r.post(STREAM | {"temperature": 1, "seed": 5})
        assert "(seeded)" in answer.events[-1]["error"]["message"]
        r["d1"].behaviour.clear()
        for body in (STREAM | {"seed": 5}, STREAM | {"temperature": 1}):  # greedy; draws left to chance
            assert text_of(await r.post(body)) == "Hello world"
        assert all("seed" not in s.body for s in r["d1"].seen if s.body.get("seed") != 5)


async def test_a_continuation_that_says_something_else_is_an_error() -> None:
    async with rig(*two()) as r:
        breaking(r, 3)
        r["d1"].tokens = ["Hel", "lo", " sun", "ny"]  # another model: its text of the same tokens differs
        answers = [await r.post(STREAM) for _ in range(2)]
        errors = [a.events[-1]["error"]["message"] for a in answers if a.events[-1] != "[DONE]"]
        assert len(errors) == 1
        assert "(seam)" in errors[0] or "(diverged)" in errors[0]


async def test_there_is_an_end_to_it() -> None:
    async with rig(*two()) as r:
        for name in ("d0", "d1"):
            r[name].tokens = list("abcdefghij")
            r[name].behaviour["local"] = Behaviour("die", after=1)
        answer = await r.post(STREAM | {"max_tokens": 10})
        assert "(too_often)" in answer.events[-1]["error"]["message"]
        assert text_of(answer) == "abcde"


async def test_without_another_worker_it_ends() -> None:
    async with rig(StubWorker("d0")) as r:
        breaking(r, 2)
        answer = await r.post(STREAM)
        assert "(no_worker)" in answer.events[-1]["error"]["message"]


async def test_a_storm_of_retries_is_impossible() -> None:
    limits = Limits(poll_interval_s=60, check_timeout_s=5, retry_fraction=0.1, retry_burst=3)
    async with rig(*two(), limits=limits) as r:
        for name in ("d0", "d1"):
            r[name].behaviour["local"] = Behaviour("die")
        answers = [await r.post(STREAM) for _ in range(30)]
        assert all(answer.status in (502, 503) for answer in answers)
        assert sum(len(worker.seen) for worker in r.workers.values()) <= 30 + 3 + 3
        assert await r.metric("retries_refused_total") >= 24


async def test_a_long_answer_closes_the_breaker_with_its_first_word() -> None:
    async with rig(StubWorker("d0")) as r:
        r["d0"].behaviour["local"] = Behaviour("die")
        await r.post(STREAM)
        r["d0"].behaviour["local"] = Behaviour("stall", after=1)
        async with r.open(STREAM) as response:
            await response.content.readuntil(b"\n\n")
            assert (await r.get("/health")).json["workers"]["d0"]["suspect"] is False


@pytest.mark.parametrize(("more", "after"), [(USAGE, 5), (USAGE, 6), ({"logprobs": 1}, 5)])
async def test_what_was_told_of_the_end_is_not_told_again(more: dict[str, Any], after: int) -> None:
    """The connection breaks behind the usage, or behind [DONE], whether the stream could be continued or not."""
    async with rig(*two()) as r:
        breaking(r, after)
        answer = await r.post(STREAM | more, x_request_id="ended")
        assert text_of(answer) == "Hello world"
        assert answer.events.count("[DONE]") == 1
        assert answer.events[-1] == "[DONE]"
        assert sum("usage" in event for event in answer.events[:-1]) == len(more.keys() & USAGE.keys())
        happened = (await r.record("ended"))["happened"]
        assert (happened["status"], happened["completion_tokens"]) == ("ok", 4)


async def test_a_lost_end_needs_no_worker_at_all() -> None:
    async with rig(StubWorker("d0")) as r:
        breaking(r, 4)
        answer = await r.post(STREAM | USAGE, x_request_id="lost")
        assert (text_of(answer), answer.events[-1]) == ("Hello world", "[DONE]")
        decision = (await r.record("lost"))["decision"]
        assert (decision["decode"], decision["reason"]) == ("d0", "continued")
        assert "only its end was lost" in decision["why"]


async def test_a_worker_that_cannot_detokenize_is_passed_over() -> None:
    workers = *two(), StubWorker("d2", "decode")
    workers[1].detokenizes = False
    async with rig(*workers) as r:
        breaking(r, 2)
        answer = await r.post(STREAM, x_request_id="over")
        assert text_of(answer) == "Hello world"
        assert (await r.record("over"))["decision"]["decode"] == "d2"


async def test_a_continued_stream_counts_as_one_that_runs() -> None:
    async with rig(*two()) as r:
        breaking(r, 2)
        r["d1"].behaviour["local"] = Behaviour("stall", after=1)
        async with r.open(STREAM) as response:
            await response.content.readuntil(b" wor")
            assert await r.num_running("d1") == 1
