"""The paths of one request through router and workers, the good one and each bad one."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.support.router_rig import PATIENCE_S, Rig, happens, rig
from tests.support.stub_worker import Behaviour, StubWorker
from tollbridge.router.limits import Limits
from tollbridge.wire.params import parse

STREAM = {"prompt": "Hello", "max_tokens": 8, "stream": True}
WHOLE = {"prompt": "Hello", "max_tokens": 8}


def three() -> tuple[StubWorker, StubWorker, StubWorker]:
    return StubWorker("p0", "prefill"), StubWorker("d0", "decode"), StubWorker("d1", "decode")


class TestLocal:
    async def test_stream_is_relayed_and_recorded(self) -> None:
        async with rig() as r:
            answer = await r.post(STREAM, x_request_id="mine")
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert answer.text == "Hello world"
            assert answer.events[-1] == "[DONE]"
            assert answer.decision == {
                "id": "mine", "choice": "local", "prefill": None, "decode": "d0",
                "policy": "local", "reason": "policy",
                "predicted": {"prompt_tokens": 3, "cached_tokens": 0, "max_tokens": 8},
            }  # fmt: skip
            assert answer.headers["x-request-id"] == "mine"
            assert r["p0"].seen == []
            record = await r.record("mine")
            assert record["happened"]["status"] == "ok"
            assert record["happened"]["completion_tokens"] == 4
            assert record["happened"]["ttft_s"] <= record["happened"]["total_s"]
            assert await r.metric("requests_total", choice="local", reason="policy", outcome="ok") == 1

    async def test_whole_answer(self) -> None:
        async with rig() as r:
            answer = await r.post(WHOLE)
            assert answer.json["choices"][0]["text"] == "Hello world"
            assert "kv_transfer_params" not in answer.json
            assert "verified" not in answer.decision

    async def test_busy_worker_is_passed_over(self) -> None:
        async with rig(*three()) as r:
            r["d0"].behaviour["local"] = Behaviour("stall", after=1)
            async with r.open(STREAM, x_request_id="slow") as slow:
                assert slow.headers["x-request-id"] == "slow"
                assert (await r.post(WHOLE)).decision["decode"] == "d1"


class TestSplit:
    @pytest.mark.parametrize("body", [STREAM, WHOLE])
    async def test_both_legs_carry_one_signed_transfer(self, body: dict[str, object]) -> None:
        async with rig() as r:
            answer = await r.post(body, policy="split", traceparent="00-abc-def-01", x_request_id="s1")
            assert answer.status == 200
            assert b"kv_transfer_params" not in answer.body
            assert (answer.decision["choice"], answer.decision["reason"]) == ("split", "forced")
            [prefill], [decode] = r["p0"].seen, r["d0"].seen
            for leg in (prefill, decode):
                assert leg.headers["x-request-id"] == "s1"
                assert leg.headers["x-tollbridge-report"] == "1"
                assert leg.headers["traceparent"] == "00-abc-def-01"
                assert "x-tollbridge-policy" not in leg.headers
            one, two = (parse(leg.body["kv_transfer_params"]) for leg in (prefill, decode))
            assert one is not None
            assert two is not None
            assert (one.role, two.role) == ("prefill", "decode")
            assert one.transfer_id == two.transfer_id
            assert f"{one.host}:{one.port}" == r["p0"].kv
            assert prefill.body["max_tokens"] == 1
            assert prefill.body["stream"] is False
            ours = ("kv_transfer_params", "return_token_ids", "seed")  # the latter for a stream that may break off
            assert {k: v for k, v in decode.body.items() if k not in ours} == body
            assert ("return_token_ids" in decode.body) is ("stream" in body)
            assert "return_token_ids" not in prefill.body
            record = await r.record("s1")
            assert record["decision"]["transfer_id"] == one.transfer_id
            assert record["happened"]["split_verified"] is True
            assert record["happened"]["prefill_report"]["role"] == "prefill"
            assert record["happened"]["decode_report"]["loaded_tokens"] == 99
            assert await r.metric("split_verified_total") == 1
            assert await r.metric("kv_payload_bytes_total") == 99 * 64

    async def test_legs_run_at_the_same_time(self) -> None:
        async with rig() as r:
            gate = asyncio.Event()
            r["p0"].behaviour["prefill"] = r["d0"].behaviour["decode"] = Behaviour(hold=gate)
            request = asyncio.create_task(r.post(STREAM, policy="split"))
            await happens(r["p0"].arrived["prefill"])
            await happens(r["d0"].arrived["decode"])
            gate.set()
            assert (await request).text == "Hello world"

    async def test_whole_answer_says_whether_the_kv_was_loaded(self) -> None:
        async with rig() as r:
            assert (await r.post(WHOLE, policy="split")).decision["verified"] is True
            r["d0"].report["decode"] = {"loaded_tokens": 0}
            assert (await r.post(WHOLE, policy="split")).decision["verified"] is False

    async def test_prefill_that_never_answers_does_not_hold_up_the_end(self) -> None:
        async with rig() as r:
            r["p0"].behaviour["prefill"] = Behaviour("hang")
            answer = await r.post(STREAM, policy="split", x_request_id="late")
            assert answer.text == "Hello world"
            await happens(r["p0"].departed["prefill"])
            assert "prefill_report" not in (await r.record("late"))["happened"]

    async def test_failed_load_cancels_prefill_and_is_never_silent(self, caplog: pytest.LogCaptureFixture) -> None:
        async with rig() as r:
            r["p0"].behaviour["prefill"] = Behaviour("hang")
            failed = r["d0"].make_report("decode").transfer
            assert failed is not None
            lost = msgspec.structs.replace(failed, outcome="failed", reason="peer_lost", detail="the link broke")
            r["d0"].report["decode"] = {"loaded_tokens": 0, "transfer": lost}
            answer = await r.post(STREAM, policy="split", x_request_id="lost")
            assert answer.text == "Hello world"
            await happens(r["p0"].departed["prefill"])
            happened = (await r.record("lost"))["happened"]
            assert happened["split_verified"] is False
            assert "the link broke" in happened["error"]
            assert await r.metric("split_unverified_total", reason="peer_lost") == 1
            assert "split not verified" in caplog.text

    async def test_worker_without_reports_is_unverified(self) -> None:
        async with rig() as r:
            r["d0"].stock = True
            await r.post(STREAM, policy="split")
            assert await r.metric("split_unverified_total", reason="no_report") == 1

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
            ({"prompt": "", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ],
    )
    async def test_what_one_transfer_cannot_carry_runs_local_and_says_so(self, body: object, reason: str) -> None:
        async with rig() as r:
            answer = await r.post(body, policy="split")
            assert (answer.decision["choice"], answer.decision["reason"]) == ("local", reason)


class TestNoPrefill:
    async def test_local_counted_and_shown(self) -> None:
        async with rig(policy="split") as r:
            await r["p0"].stop()
            await r.until_ready("p0", False)
            answer = await r.post(STREAM, x_request_id="np")
            assert answer.text == "Hello world"
            assert answer.decision["reason"] == "no_ready_prefill"
            assert await r.metric("requests_total", reason="no_ready_prefill", outcome="ok") == 1
            assert "No prefill worker" in (await r.record("np"))["decision"]["why"]

    async def test_fail_when_told_to(self) -> None:
        async with rig(policy="split", on_no_prefill="fail") as r:
            await r["p0"].stop()
            await r.until_ready("p0", False)
            answer = await r.post(STREAM)
            assert answer.status == 503
            assert "on_no_prefill" in answer.error
            assert answer.headers["Retry-After"] == "1"

    async def test_prefill_comes_back(self) -> None:
        async with rig(policy="split") as r:
            await r["p0"].stop()
            await r.until_ready("p0", False)
            await r["p0"].start()
            await r.until_ready("p0")
            assert (await r.post(STREAM)).decision["choice"] == "split"

    async def test_nobody_at_all(self) -> None:
        async with rig() as r:
            for name in ("p0", "d0"):
                r[name].healthy = False
                await r.until_ready(name, False)
            answer = await r.post(STREAM)
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert answer.json["error"]["type"] == "unavailable"


PREFILL_FAILURES = {
    "500": Behaviour("error", status=500),
    "503": Behaviour("error", status=503),
    "401": Behaviour("error", status=401),
    "dies": Behaviour("die"),
}


class TestPrefillFails:
    @pytest.mark.parametrize("body", [STREAM, WHOLE])
    @pytest.mark.parametrize("case", PREFILL_FAILURES)
    async def test_before_the_first_byte_decode_serves_it_alone(self, case: str, body: dict[str, object]) -> None:
        async with rig() as r:
            r["p0"].behaviour["prefill"] = PREFILL_FAILURES[case]
            r["d0"].behaviour["decode"] = Behaviour("hang")  # waits for KV that never comes
            answer = await r.post(body, policy="split", x_request_id="pf")
            assert answer.status == 200
            assert answer.decision["choice"] == "local"
            assert answer.decision["reason"] == "prefill_failed"
            assert answer.decision["prefill"] is None
            await happens(r["d0"].departed["decode"])
            assert r["d0"].roles() == ["decode", "local"]
            assert await r.metric("retries_total", reason="prefill_failed") == 1
            assert await r.metric("upstream_errors_total", worker="p0", leg="prefill") == 1
            assert "p0" in (await r.record("pf"))["happened"]["error"]

    async def test_refused_connection(self) -> None:
        slow_checks = Limits(poll_interval_s=60)  # the router does not know yet
        async with rig(limits=slow_checks) as r:
            await r["p0"].stop()
            r["d0"].behaviour["decode"] = Behaviour("hang")
            answer = await r.post(STREAM, policy="split")
            assert answer.text == "Hello world"
            assert answer.decision["reason"] == "prefill_failed"
            await r.until_ready("p0", False)  # the failure itself had it checked at once

    async def test_after_the_first_byte_it_is_only_recorded(self) -> None:
        async with rig() as r:
            gate = asyncio.Event()
            r["p0"].behaviour["prefill"] = Behaviour("die", hold=gate)
            r["d0"].behaviour["decode"] = Behaviour("stall", after=1)
            async with r.open(STREAM, policy="split", x_request_id="mid") as response:
                await response.content.readuntil(b"\n\n")
                gate.set()
                await r.until("/decisions/mid", lambda _: True)
                async with asyncio.timeout(PATIENCE_S):
                    while not await r.metric("upstream_errors_total", worker="p0"):
                        pass
            assert r["d0"].roles() == ["decode"]

    async def test_clients_own_mistake_gets_decodes_answer(self) -> None:
        async with rig() as r:
            mistake = {"message": "max_tokens must be positive", "type": "invalid_request_error"}
            for name, role in (("p0", "prefill"), ("d0", "local")):
                r[name].behaviour[role] = Behaviour("error", status=400, error=mistake)
            r["d0"].behaviour["decode"] = Behaviour("hang")
            answer = await r.post(STREAM, policy="split")
            assert answer.status == 400
            assert answer.error == "max_tokens must be positive"
            health = (await r.get("/health")).json
            assert health["workers"]["p0"]["suspect"] is False

    async def test_decode_then_fails_too(self) -> None:
        async with rig(*three()) as r:
            r["p0"].behaviour["prefill"] = Behaviour("die")
            for name in ("p0", "d0", "d1"):
                r[name].behaviour |= {"decode": Behaviour("hang"), "local": Behaviour("die")}
            answer = await r.post(STREAM, policy="split")
            # prefill_failed -> local on d0, which dies -> on d1 and p0, which die too: no further attempt.
            assert answer.status == 502
            assert "answer" in answer.error or "connection" in answer.error


DECODE_FAILURES = {
    "500": Behaviour("error", status=500),
    "503": Behaviour("error", status=503),
    "429": Behaviour("error", status=429),
    "wrong signature": Behaviour("error", status=401),
    "params not understood": Behaviour("error", status=400, error={"message": "v9", "param": "kv_transfer_params"}),
    "dies before the head": Behaviour("die"),
    "ends without a token": Behaviour("end_early"),
    "starts with an error event": Behaviour("event"),
}


class TestDecodeFails:
    @pytest.mark.parametrize("policy", ["local", "split"])
    @pytest.mark.parametrize("case", DECODE_FAILURES)
    async def test_before_the_first_byte_retried_once_elsewhere(self, case: str, policy: str) -> None:
        async with rig(*three()) as r:
            r["d0"].behaviour = dict.fromkeys(("decode", "local"), DECODE_FAILURES[case])
            r["p0"].behaviour["prefill"] = Behaviour("hang")
            answer = await r.post(STREAM, policy=policy)
            assert answer.text == "Hello world"
            assert (answer.decision["decode"], answer.decision["reason"]) == ("d1", "decode_failed")
            assert await r.metric("retries_total", reason="decode_failed") == 1
            if policy == "split":
                await happens(r["p0"].departed["prefill"])

    async def test_silence_before_the_first_byte_has_a_deadline(self) -> None:
        async with rig(*three(), first_byte_timeout_s=1.0) as r:
            r["d0"].behaviour["local"] = Behaviour("head")
            answer = await r.post(STREAM)
            assert answer.decision["decode"] == "d1"
            await happens(r["d0"].departed["local"])

    async def test_two_retries_at_most(self) -> None:
        async with rig(*three(), StubWorker("d2", "decode")) as r:
            for worker in r.workers.values():
                worker.behaviour["local"] = Behaviour("error", status=500)
            answer = await r.post(STREAM)
            assert answer.status == 502
            assert "the stub says no" in answer.error
            assert sum(len(worker.seen) for worker in r.workers.values()) == 3
            assert "x-tollbridge-decision" in answer.headers
            assert await r.metric("requests_total", outcome="error") == 1

    async def test_full_queue_everywhere_stays_429(self) -> None:
        async with rig() as r:
            for worker in r.workers.values():
                worker.behaviour["local"] = Behaviour("error", status=429)
            answer = await r.post(WHOLE)
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert (await r.get("/health")).json["workers"]["d0"]["suspect"] is False

    @pytest.mark.parametrize("mode", ["die", "end_early"])
    async def test_mid_stream_gets_an_error_event_and_no_done(self, mode: str) -> None:
        async with rig(*three()) as r:
            r["d0"].names_ids = False
            r["d0"].behaviour["local"] = Behaviour(mode, after=2)  # type: ignore[arg-type]
            answer = await r.post(STREAM, x_request_id="mid")
            assert answer.status == 200
            assert answer.events[-1]["error"]["type"] == "upstream_error"
            assert "d0" in answer.events[-1]["error"]["message"]
            assert "no_token_ids" in answer.events[-1]["error"]["message"]
            assert await r.metric("continuations_total", outcome="no_token_ids") == 1
            assert "[DONE]" not in answer.events
            assert len(answer.events) == 3
            assert r["d1"].seen == []
            assert (await r.record("mid"))["happened"]["status"] == "error"

    async def test_silence_mid_stream_has_a_deadline(self) -> None:
        async with rig(idle_timeout_s=0.2) as r:
            r["d0"].names_ids = False
            r["d0"].behaviour["local"] = Behaviour("stall", after=2)
            answer = await r.post(STREAM)
            assert "sent nothing for 0.2 s" in answer.events[-1]["error"]["message"]
            await happens(r["d0"].departed["local"])

    @pytest.mark.parametrize("mode", ["die", "end_early"])
    async def test_mid_stream_failure_leaves_no_prefill_running(self, mode: str) -> None:
        async with rig() as r:
            r["p0"].behaviour["prefill"] = Behaviour("hang")
            r["d0"].behaviour["decode"] = Behaviour(mode, after=1)  # type: ignore[arg-type]
            answer = await r.post(STREAM, policy="split")
            assert answer.text == "Hello world"
            await happens(r["p0"].departed["prefill"])
            assert await r.metric("split_unverified_total") == 0  # it failed: that says nothing about the split

    async def test_clients_mistake_passes_unchanged(self) -> None:
        async with rig() as r:
            error = {"message": "too long", "type": "context_length_exceeded", "param": "prompt", "code": 400}
            r["d0"].behaviour["local"] = Behaviour("error", status=400, error=error)
            answer = await r.post(STREAM)
            assert (answer.status, answer.json) == (400, {"error": error})
            assert r["p0"].seen == []

    async def test_one_failure_is_not_for_ever(self) -> None:
        async with rig() as r:
            r["d0"].behaviour["local"] = Behaviour("die")
            await r.post(WHOLE)
            r["d0"].behaviour.clear()
            await r.until("/health", lambda health: not health["workers"]["d0"]["suspect"])
            await r.until_ready("d0")
            assert (await r.post(WHOLE)).decision["decode"] == "d0"


async def load_of(r: Rig) -> int:
    workers = (await r.get("/fleet")).json["workers"]
    return sum(worker["num_prefills"] + worker["num_decodes"] for worker in workers)


async def test_nothing_is_in_flight_when_all_is_over() -> None:
    async with rig(*three()) as r:
        r["d0"].behaviour["local"] = Behaviour("die", after=1)
        r["p0"].behaviour["prefill"] = Behaviour("error")
        await asyncio.gather(*(r.post(STREAM, policy=policy) for policy in ("local", "split") * 10))
        assert await load_of(r) == 0
        assert await r.metric("in_flight_requests") == 0


async def test_prefill_failing_just_when_decode_speaks_never_garbles_an_answer() -> None:
    """Both orders of the race occur; each answer is whole, from one attempt."""
    async with rig() as r:
        for _ in range(20):
            gate = asyncio.Event()
            r["p0"].behaviour["prefill"] = Behaviour("die", hold=gate)
            r["d0"].behaviour["decode"] = Behaviour(hold=gate)
            requests = [asyncio.create_task(r.post(STREAM, policy="split")) for _ in range(4)]
            await happens(r["p0"].arrived["prefill"])
            await happens(r["d0"].arrived["decode"])
            gate.set()
            for answer in await asyncio.gather(*requests):
                assert answer.text == "Hello world"
                assert answer.events[-1] == "[DONE]"
                assert len(answer.events) == 5
                assert answer.decision["reason"] in ("forced", "prefill_failed", "no_ready_prefill")
        assert await load_of(r) == 0
