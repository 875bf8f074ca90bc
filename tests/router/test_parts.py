"""The small pure parts: verification, the ring of decisions, bounded labels, transfer ids, failures of an answer."""

from __future__ import annotations

import pytest

from tollbridge.config.cluster import WorkerConfig
from tollbridge.router import legs
from tollbridge.router.decisions import Decisions
from tollbridge.router.fleet import Leg, Worker
from tollbridge.router.metrics import Codes
from tollbridge.router.upstream import failure_in_event, failure_of
from tollbridge.router.verify import verify_split
from tollbridge.router.work import tokens_to_move, work_of
from tollbridge.wire.decision import Choice, Decision, DecisionRecord, Happened
from tollbridge.wire.params import TransferReport, WorkerReport, verify

WORKER = Worker(config=WorkerConfig(name="w"), url="http://w")


def report(prompt: int, cached: int, loaded: int, **transfer: str) -> WorkerReport:
    told = TransferReport(transfer_id="t", side="receive", **transfer) if transfer else None  # type: ignore[arg-type]
    return WorkerReport(role="decode", prompt_tokens=prompt, cached_tokens=cached, loaded_tokens=loaded, transfer=told)


@pytest.mark.parametrize(
    ("told", "verified", "reason"),
    [
        (None, False, "no_report"),
        (report(100, 0, 99), True, ""),
        (report(100, 40, 59), True, ""),
        (report(100, 99, 0), True, ""),  # it lacked nothing
        (report(1, 0, 0), True, ""),
        (report(100, 0, 0), False, "no_transfer"),
        (report(100, 0, 0, outcome="failed", reason="checksum"), False, "checksum"),
        (report(100, 0, 0, outcome="cancelled"), False, "cancelled"),
        (report(100, 0, 98, outcome="done"), False, "partial"),
        (report(100, 90, 0, outcome="done", reason="vetoed"), False, "vetoed"),  # it was quicker to compute
    ],
)
def test_verify_split(told: WorkerReport | None, verified: bool, reason: str) -> None:
    verdict = verify_split(told)
    assert (verdict.verified, verdict.reason) == (verified, reason)
    assert bool(verdict.why) is not verified


def test_the_workers_sentence_ends_with_one_full_stop() -> None:
    told = report(100, 0, 0, outcome="failed", reason="peer_lost", detail="The peer went away.")
    assert verify_split(told).why.endswith("computed the rest: The peer went away.")


def record(name: str) -> DecisionRecord:
    decision = Decision(id=name, policy="local", choice="local", decode="d", reason="policy", why="")
    return DecisionRecord(at=0.0, decision=decision, happened=Happened())


def test_ring_of_decisions_is_bounded() -> None:
    ring = Decisions(3)
    for name in ("a", "b", "c", "a", "d"):
        ring.add(record(name))
        ring.check()
    assert [entry.decision.id for entry in ring.recent(9)] == ["d", "a", "c"]
    assert ring.maybe_get("b") is None
    assert ring.statistics().recorded_total == 5


def test_labels_are_bounded() -> None:
    codes = Codes(2)
    assert [codes.label(c) for c in ("a", "B", "a b", "", "b", "c", "a", "x" * 41)] == [
        "a", "other", "other", "other", "b", "other", "a", "other",
    ]  # fmt: skip


def test_both_legs_are_signed_and_expire() -> None:
    one, two = legs.params_for(("prefill", "decode"), transfer_id="t", kv=("h", 1), expires=100.0, secret=b"s")
    for leg in (one, two):
        verify(leg, b"s", now_s=99.0)
    assert one.sig != two.sig
    assert len({legs.new_transfer_id() for _ in range(100)}) == 100
    assert len(legs.new_transfer_id()) == 32


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b"", None),
        (400, b'{"error": {"message": "no"}}', None),
        (400, b'{"error": {"message": "no", "param": "kv_transfer_params"}}', 502),
        (401, b"", 502),
        (404, b'{"error": {"message": "no such model"}}', None),
        (404, b'{"detail": "Not Found"}', 404),
        (429, b'{"error": "full"}', 429),
        (500, b"<html>", 502),
        (503, b'{"error": {"message": "loading"}}', 503),
    ],
)
def test_failure_of_an_answer(status: int, body: bytes, expected: int | None) -> None:
    failure = failure_of(WORKER, status, body)
    assert (failure.status if failure else None) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "x"}}', 502),
        (b'{"error": {"message": "x", "code": 400}}', None),
        (b'{"error": {"message": "x", "code": "weird"}}', 502),
        (b"broken", 502),
    ],
)
def test_failure_in_an_event(body: bytes, expected: int | None) -> None:
    failure = failure_in_event(WORKER, body)
    assert (failure.status if failure else None) == expected


@pytest.mark.parametrize(
    ("choice", "leg", "prefill_tokens", "kv_tokens"),
    [("split", "prefill", 70, 70), ("split", "decode", 1, 60), ("local", "decode", 70, 70)],
)
def test_work_of_a_leg(choice: Choice, leg: Leg, prefill_tokens: int, kv_tokens: int) -> None:
    terms = {"prompt_tokens": 100.0, "cached_tokens": 30.0, "decode_cached_tokens": 40.0}
    decision = Decision(id="r", policy="x", choice=choice, decode="d", reason="policy", why="", terms=terms)
    assert work_of(decision, leg) == {"prefill_tokens": prefill_tokens, "kv_tokens": kv_tokens}
    assert tokens_to_move(decision) == 59  # decode computes the last one itself


def test_work_of_a_prompt_that_nobody_knows() -> None:
    decision = Decision(id="r", policy="x", choice="split", decode="d", reason="policy", why="")
    assert work_of(decision, "decode") == {"prefill_tokens": 0, "kv_tokens": 0}
    assert tokens_to_move(decision) == 0
