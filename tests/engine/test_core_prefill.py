"""The prefill role: what is published, when, and how long the blocks stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.fakes import BLOCK_SIZE, NUM_LAYERS, Gate, Worker, prompt_of, reference
from tests.engine.scripted import ScriptedSender
from tests.engine.test_core import transfer
from tollbridge.errors import RequestError, TransferError, UnsupportedError
from tollbridge.transfer.base import content_digest

ONE, TWO = "1" * 32, "2" * 32


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender()


@pytest.fixture
def worker(sender: ScriptedSender) -> Iterator[Worker]:
    with Worker(sender=sender, max_num_batched_tokens=10) as worker:
        yield worker
        worker.engine.check()


def published(sender: ScriptedSender, transfer_id: str) -> list[tuple[int, int | None]]:
    return [call[3:] for call in sender.calls if call[:2] == ("publish", transfer_id)]


def test_each_layer_of_each_chunk_is_published_as_it_is_computed(worker: Worker, sender: ScriptedSender) -> None:
    prompt = prompt_of(14)
    answer = worker.submit(prompt, max_tokens=1, transfer=transfer("prefill", ONE), cache_salt="s")
    report = answer.wait().report
    assert sender.calls[0] == ("register", ONE, content_digest(prompt, cache_salt="s"), 14)
    layers = range(NUM_LAYERS)
    assert published(sender, ONE) == [*((10, i) for i in layers), (10, None), *((14, i) for i in layers), (14, None)]
    assert report is not None and report.role == "prefill" and report.transfer is None
    assert answer.token_ids == reference(prompt, max_tokens=1)


def test_a_prefix_hit_is_published_at_admission(worker: Worker, sender: ScriptedSender) -> None:
    prompt = prompt_of(9)
    worker.submit(prompt).wait()
    worker.submit(prompt, max_tokens=1, transfer=transfer("prefill", ONE)).wait()
    assert published(sender, ONE) == [(8, None), *((9, i) for i in range(NUM_LAYERS)), (9, None)]


def test_only_the_prompt_is_published(worker: Worker, sender: ScriptedSender) -> None:
    answer = worker.submit(prompt_of(5), max_tokens=9, transfer=transfer("prefill", ONE))
    answer.wait()
    assert {num_tokens for num_tokens, _ in published(sender, ONE)} == {5}
    assert answer.token_ids == reference(prompt_of(5), max_tokens=9)


@pytest.mark.parametrize("outcome", ["done", "failed", "cancelled"])
def test_blocks_stay_pinned_until_the_send_ends(worker: Worker, sender: ScriptedSender, outcome: str) -> None:
    worker.submit(prompt_of(9), max_tokens=8, transfer=transfer("prefill", ONE)).wait()
    statistics = worker.engine.statistics()
    assert statistics.num_pinned_blocks == 3  # those of the prompt; the generated tokens' went
    assert statistics.num_free_blocks == 61 and statistics.num_running == 0
    worker.engine.check()
    sender.end(ONE, outcome)
    worker.submit([1]).wait()
    assert worker.engine.statistics().num_free_blocks == 64


def test_a_send_that_ends_first_pins_nothing(worker: Worker, sender: ScriptedSender) -> None:
    gate = Gate()
    worker.runner.before = gate
    answer = worker.submit(prompt_of(20), max_tokens=1, transfer=transfer("prefill", ONE))
    gate.wait_arrived(1)
    sender.end(ONE, "cancelled")
    gate.let_through()
    answer.wait()
    assert {num_tokens for num_tokens, _ in published(sender, ONE)} == {10}
    assert worker.engine.statistics().num_free_blocks == 64


def test_abort_cancels_the_send_and_waits_for_its_end(worker: Worker, sender: ScriptedSender) -> None:
    gate = Gate()
    worker.runner.before = gate
    answer = worker.submit(prompt_of(20), request_id="x", transfer=transfer("prefill", ONE))
    gate.wait_arrived(1)
    worker.engine.abort("x")
    gate.let_through()
    assert answer.wait().finish_reason == "abort"
    sender.wait("cancel", ONE)
    assert worker.engine.statistics().num_pinned_blocks == 5
    sender.end(ONE, "cancelled")
    worker.submit([1]).wait()
    assert worker.engine.statistics().num_pinned_blocks == 0


def test_abort_while_waiting_pins_nothing(sender: ScriptedSender) -> None:
    gate = Gate()
    with Worker(sender=sender, max_num_seqs=1) as worker:
        worker.runner.before = gate
        worker.submit(prompt_of(3))
        gate.wait_arrived(1)
        answer = worker.submit(prompt_of(20), request_id="x", transfer=transfer("prefill", ONE))
        worker.engine.abort("x")
        gate.let_through()
        assert answer.wait().finish_reason == "abort"
        assert sender.names(ONE) == ["register", "cancel"]
        assert worker.engine.statistics().num_pinned_blocks == 0


def test_a_model_error_cancels_the_send(
    worker: Worker, sender: ScriptedSender, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(plan: Any) -> None:
        raise MemoryError

    worker.runner.before = fail
    answer = worker.submit(prompt_of(20), transfer=transfer("prefill", ONE))
    assert answer.wait().finish_reason == "error"
    assert "model failed" in sender.wait("cancel", ONE)[2]
    assert worker.engine.statistics().num_pinned_blocks == 5


def test_preemption_rewinds_before_the_blocks_go(sender: ScriptedSender) -> None:
    with Worker(sender=sender, num_blocks=10, max_num_seqs=4) as worker:
        held: list[int] = []
        rewind = sender.rewind

        def rewind_and_look(transfer_id: str) -> None:
            rewind(transfer_id)
            held.append(worker.engine._loop._pool.num_free)

        sender.rewind = rewind_and_look  # type: ignore[method-assign]
        old = worker.submit(prompt_of(8), max_tokens=24)
        young = worker.submit(prompt_of(8, start=1), max_tokens=20, transfer=transfer("prefill", ONE))
        old.wait(), young.wait()
        assert old.token_ids == reference(prompt_of(8), max_tokens=24)
        assert young.token_ids == reference(prompt_of(8, start=1), max_tokens=20)
        assert worker.engine.statistics().preemptions_total >= 1
        assert held == [0] * len(held) and held
        names = sender.names(ONE)
        after = names[len(names) - names[::-1].index("rewind") :]
        assert "publish" in after, "what was taken back must be published again"
        num_published = [call[3] for call in sender.calls if call[0] == "publish"]
        assert max(num_published) == 8 and num_published[-1] == 8


def test_two_sends_in_one_step(worker: Worker, sender: ScriptedSender) -> None:
    gate = Gate()
    worker.runner.before = gate
    first = worker.submit([1], max_tokens=2)
    gate.wait_arrived(1)
    answers = [
        worker.submit(prompt_of(4, start=i), max_tokens=1, transfer=transfer("prefill", name))
        for i, name in enumerate((ONE, TWO), 1)
    ]
    gate.let_through()
    for answer in [first, *answers]:
        answer.wait()
    order = [call[1:2] + call[4:] for call in sender.calls if call[0] == "publish" and call[4] is not None]
    assert order == [(name, layer) for layer in range(NUM_LAYERS) for name in (ONE, TWO)]
    tables = {call[1]: call[2] for call in sender.calls if call[0] == "publish"}
    assert not set(tables[ONE]) & set(tables[TWO]) and BLOCK_SIZE == 4


def test_a_transfer_id_serves_one_request(worker: Worker, sender: ScriptedSender) -> None:
    worker.submit(prompt_of(4), max_tokens=1, transfer=transfer("prefill", ONE)).wait()
    with pytest.raises(RequestError, match="already has a prefill request"):
        worker.submit(prompt_of(4), transfer=transfer("prefill", ONE))
    sender.end(ONE, "done")
    worker.submit([1]).wait()
    worker.submit(prompt_of(4), max_tokens=1, transfer=transfer("prefill", ONE)).wait()


def test_roles_that_cannot_be_served_are_refused(worker: Worker) -> None:
    with pytest.raises(UnsupportedError, match="decode role"):
        worker.submit([1], transfer=transfer("decode", ONE))
    with pytest.raises(UnsupportedError, match="tensor parallel size 2"):
        worker.submit([1], transfer=transfer("prefill", ONE, tp_size=2))


def test_a_sender_that_refuses_ends_its_request_only(worker: Worker, sender: ScriptedSender) -> None:
    def register(transfer_id: str, **kwargs: Any) -> None:
        raise TransferError("No.")

    sender.register = register  # type: ignore[method-assign]
    last = worker.submit(prompt_of(4), transfer=transfer("prefill", ONE)).wait()
    assert (last.finish_reason, last.error) == ("error", "No.")
    again = worker.submit(prompt_of(4), transfer=transfer("prefill", ONE))
    assert again.wait().error == "No.", "its transfer id must be free again"
    worker.submit(prompt_of(4)).wait()


def test_shutdown_closes_the_sender_and_frees_the_blocks(sender: ScriptedSender) -> None:
    worker = Worker(sender=sender)
    worker.submit(prompt_of(9), max_tokens=1, transfer=transfer("prefill", ONE)).wait()
    assert worker.engine.statistics().num_pinned_blocks == 3
    worker.engine.shutdown()
    assert sender.closed
    worker.assert_empty()


def test_a_send_that_nobody_will_fetch_is_cancelled(worker: Worker, sender: ScriptedSender) -> None:
    worker.submit(prompt_of(9), max_tokens=1, transfer=transfer("prefill", ONE)).wait()
    worker.engine.release_send(TWO)  # unknown: ignored
    worker.engine.release_send(ONE)
    sender.wait("cancel", ONE)
    assert sender.names(TWO) == []
    sender.end(ONE, "cancelled")
    worker.submit([1]).wait()
    assert worker.engine.statistics().num_free_blocks == 64
    worker.engine.release_send(ONE)  # ended: ignored
    worker.submit([1]).wait()
    assert sender.names(ONE).count("cancel") == 1
