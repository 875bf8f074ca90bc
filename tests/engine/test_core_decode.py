"""The decode role: what is asked for, what becomes of what comes, and who owns the blocks in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.fakes import BLOCK_SIZE, NUM_LAYERS, TOKEN_BYTES, Gate, Worker, kv_of, prompt_of, reference
from tests.engine.scripted import ScriptedReceiver
from tests.engine.test_core import transfer
from tollbridge.clock import ManualClock
from tollbridge.transfer.base import LoadRequest, content_digest
from tollbridge.wire.params import WorkerReport

ONE, TWO = "1" * 32, "2" * 32


@pytest.fixture
def receiver() -> ScriptedReceiver:
    return ScriptedReceiver()


@pytest.fixture
def worker(receiver: ScriptedReceiver) -> Iterator[Worker]:
    with Worker(receiver=receiver) as worker:
        yield worker
        worker.engine.check()


def load_of(receiver: ScriptedReceiver, transfer_id: str) -> LoadRequest:
    load = receiver.wait("open", transfer_id)[2]
    assert isinstance(load, LoadRequest)
    return load


def deliver(worker: Worker, receiver: ScriptedReceiver, prompt: list[int], transfer_id: str) -> None:
    """Write the right KV where the load asked for it, and end the load done."""
    load = load_of(receiver, transfer_id)
    for layer in range(NUM_LAYERS):
        kv = b""
        for token in prompt:
            kv += kv_of(kv, token, layer)
        for position in range(load.first_token, load.first_token + load.num_tokens):
            view = worker.runner.memory.views(layer, load.block_table, position, 1)[0]
            view[:] = kv[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES]
    receiver.end(transfer_id, "done", num_tokens=load.num_tokens)


def report_of(answer: object) -> WorkerReport:
    report = answer.wait().report  # type: ignore[attr-defined]
    assert isinstance(report, WorkerReport)
    return report


def test_a_load_asks_for_all_but_the_last_token(worker: Worker, receiver: ScriptedReceiver) -> None:
    prompt = prompt_of(14)
    answer = worker.submit(prompt, transfer=transfer("decode", ONE), cache_salt="s")
    load = load_of(receiver, ONE)
    assert (load.first_token, load.num_tokens, load.host, load.port) == (0, 13, "127.0.0.1", 1)
    assert load.digest == content_digest(prompt, cache_salt="s")
    assert len(load.block_table) == 4
    statistics = worker.engine.statistics()
    assert (statistics.num_parked, statistics.num_waiting, statistics.num_running) == (1, 0, 0)
    assert statistics.waiting_prefill_tokens == 1
    assert not worker.runner.plans
    worker.engine.check()
    deliver(worker, receiver, prompt, ONE)
    report = report_of(answer)
    assert answer.token_ids == reference(prompt, max_tokens=6)
    assert [chunk.first_token for chunk in worker.runner.plans[0].chunks] == [13]
    assert (report.role, report.loaded_tokens, report.computed_tokens, report.cached_tokens) == ("decode", 13, 1, 0)
    assert report.transfer is not None and report.transfer.outcome == "done"
    assert worker.engine.statistics().prompt_tokens_by_source == {
        "local_compute": 1,
        "local_cache_hit": 0,
        "external_kv_transfer": 13,
    }


def test_a_load_skips_what_is_cached_here(worker: Worker, receiver: ScriptedReceiver) -> None:
    prompt = prompt_of(22)
    worker.submit(prompt[:13]).wait()
    answer = worker.submit(prompt, transfer=transfer("decode", ONE))
    load = load_of(receiver, ONE)
    assert (load.first_token, load.num_tokens) == (12, 9)
    deliver(worker, receiver, prompt, ONE)
    report = report_of(answer)
    assert (report.cached_tokens, report.loaded_tokens, report.computed_tokens) == (12, 9, 1)
    assert answer.token_ids == reference(prompt, max_tokens=6)


def test_loaded_blocks_are_cached(worker: Worker, receiver: ScriptedReceiver) -> None:
    prompt = prompt_of(14)
    answer = worker.submit(prompt, transfer=transfer("decode", ONE))
    deliver(worker, receiver, prompt, ONE)
    answer.wait()
    again = worker.submit(prompt)
    assert report_of(again).cached_tokens == 12
    assert again.token_ids == reference(prompt, max_tokens=6)


@pytest.mark.parametrize("prompt", [[5], prompt_of(3 * BLOCK_SIZE + 1)])
def test_who_lacks_nothing_says_so_and_runs_at_once(
    worker: Worker, receiver: ScriptedReceiver, prompt: list[int]
) -> None:
    worker.submit(prompt).wait()
    answer = worker.submit(prompt, transfer=transfer("decode", ONE))
    report = report_of(answer)
    assert (load_of(receiver, ONE).num_tokens, report.loaded_tokens) == (0, 0)
    assert report.transfer is None
    assert answer.token_ids == reference(prompt, max_tokens=6)
    receiver.end(ONE, "done")


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_what_does_not_come_is_recomputed(worker: Worker, receiver: ScriptedReceiver, outcome: str) -> None:
    prompt = prompt_of(22)
    worker.submit(prompt[:9]).wait()
    answer = worker.submit(prompt, transfer=transfer("decode", ONE))
    load_of(receiver, ONE)
    receiver.end(ONE, outcome, reason="peer_lost", detail="Gone.")
    report = report_of(answer)
    assert answer.token_ids == reference(prompt, max_tokens=6)
    assert (report.cached_tokens, report.loaded_tokens, report.computed_tokens) == (8, 0, 14)
    assert report.transfer is not None and report.transfer.reason == "peer_lost"
    assert worker.engine.statistics().kv_recomputed_tokens_total == 13


def test_what_was_refused_is_not_cached(worker: Worker, receiver: ScriptedReceiver) -> None:
    """A receiver that wrote half the KV, or wrong KV, and failed, leaves nothing that a later request could hit."""
    prompt = prompt_of(22)
    first = worker.submit(prompt, request_id="x", transfer=transfer("decode", ONE))
    load = load_of(receiver, ONE)
    for view in worker.runner.memory.views(0, load.block_table, 0, 21):
        view[:] = bytes(len(view))
    worker.engine.abort("x")
    first.wait()
    receiver.end(ONE, "cancelled")
    second = worker.submit(prompt)
    assert report_of(second).cached_tokens == 0
    assert second.token_ids == reference(prompt, max_tokens=6)


def test_abort_while_parked_frees_blocks_only_at_the_end(worker: Worker, receiver: ScriptedReceiver) -> None:
    answer = worker.submit(prompt_of(14), request_id="x", transfer=transfer("decode", ONE))
    load_of(receiver, ONE)
    worker.engine.abort("x")
    last = answer.wait()
    assert last.finish_reason == "abort" and last.report is not None and last.report.computed_tokens == 0
    receiver.wait("cancel", ONE)
    statistics = worker.engine.statistics()
    assert (statistics.num_free_blocks, statistics.num_pinned_blocks, statistics.num_parked) == (60, 4, 0)
    worker.engine.check()
    receiver.end(ONE, "cancelled")
    worker.submit([1]).wait()
    assert worker.engine.statistics().num_free_blocks == 64


def test_a_load_that_ends_done_after_its_abort_is_dropped(worker: Worker, receiver: ScriptedReceiver) -> None:
    answer = worker.submit(prompt_of(14), request_id="x", transfer=transfer("decode", ONE))
    load_of(receiver, ONE)
    worker.engine.abort("x")
    answer.wait()
    receiver.end(ONE, "done")
    worker.submit([1]).wait()
    assert worker.engine.statistics().num_free_blocks == 64


def test_abort_before_the_opening_lets_the_prefill_worker_go(receiver: ScriptedReceiver) -> None:
    with Worker(receiver=receiver, num_blocks=8) as worker:
        gate = Gate()
        worker.runner.before = gate
        busy = worker.submit(prompt_of(20), max_tokens=5)
        gate.wait_arrived(1)
        answer = worker.submit(prompt_of(20, start=1), request_id="x", transfer=transfer("decode", ONE))
        worker.engine.abort("x")
        gate.let_through()
        answer.wait()
        assert load_of(receiver, ONE).num_tokens == 0
        receiver.end(ONE, "done")
        busy.wait()


def test_a_parked_request_does_not_stop_the_others(worker: Worker, receiver: ScriptedReceiver) -> None:
    parked = worker.submit(prompt_of(14), transfer=transfer("decode", ONE))
    load_of(receiver, ONE)
    for i in range(3):
        worker.submit(prompt_of(9, start=i)).wait()
    assert not parked.outputs
    deliver(worker, receiver, prompt_of(14), ONE)
    parked.wait()


def test_a_load_without_room_waits_and_is_passed(receiver: ScriptedReceiver) -> None:
    with Worker(receiver=receiver, num_blocks=12) as worker:
        first = worker.submit(prompt_of(33), transfer=transfer("decode", ONE))
        load_of(receiver, ONE)
        second = worker.submit(prompt_of(33, start=1), transfer=transfer("decode", TWO))
        small = worker.submit(prompt_of(5), max_tokens=2)
        small.wait()
        assert receiver.names(TWO) == []
        deliver(worker, receiver, prompt_of(33), ONE)
        first.wait()
        deliver(worker, receiver, prompt_of(33, start=1), TWO)
        second.wait()
        assert first.token_ids == reference(prompt_of(33), max_tokens=6)
        assert second.token_ids == reference(prompt_of(33, start=1), max_tokens=6)


def test_parked_blocks_survive_a_full_cache(receiver: ScriptedReceiver) -> None:
    with Worker(receiver=receiver, num_blocks=12) as worker:
        parked = worker.submit(prompt_of(21), transfer=transfer("decode", ONE))
        load_of(receiver, ONE)
        local = worker.submit(prompt_of(8, start=3), max_tokens=40, request_id="local")
        local.wait_tokens(17)  # 6 blocks are left to it: 24 tokens of KV, and one more drawn
        worker.engine.check()
        assert worker.engine.statistics().num_parked == 1
        deliver(worker, receiver, prompt_of(21), ONE)
        parked.wait(), local.wait()
        assert parked.token_ids == reference(prompt_of(21), max_tokens=6)
        assert local.token_ids == reference(prompt_of(8, start=3), max_tokens=40)
        assert worker.engine.statistics().preemptions_total >= 1


def test_a_report_tells_queue_and_prefill_apart_from_the_transfer(receiver: ScriptedReceiver) -> None:
    clock = ManualClock(100.0)
    with Worker(receiver=receiver, clock=clock) as worker:
        answer = worker.submit(prompt_of(14), arrival_s=99.0, transfer=transfer("decode", ONE))
        load_of(receiver, ONE)
        worker.engine.statistics()  # waits for the step that opened it
        clock.advance(5.0)
        worker.runner.before = lambda plan: clock.advance(0.5)
        deliver(worker, receiver, prompt_of(14), ONE)
        report = report_of(answer)
        assert (report.queue_s, report.prefill_s) == (1.0, 0.5)


def test_shutdown_while_parked(receiver: ScriptedReceiver) -> None:
    worker = Worker(receiver=receiver)
    answer = worker.submit(prompt_of(14), transfer=transfer("decode", ONE))
    load_of(receiver, ONE)
    worker.engine.shutdown()
    assert answer.last.finish_reason == "abort" and receiver.closed
    worker.assert_empty()
