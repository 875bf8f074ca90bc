"""The worker's half: what reaches the medium, and which ids are reported, exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.vllm.fakes import BLOCK, Medium, end, transfer_id
from tollbridge.errors import TransferError
from tollbridge.vllm.blocks import Pieces
from tollbridge.vllm.orders import Chunk, LoadOrder, SendOrder, ShedOrder, StepOrders
from tollbridge.vllm.ready import AtOnce, LayerReady
from tollbridge.vllm.worker import StepResults, WorkerSide

LAYERS = {"layers.0.attn": 0, "layers.1.attn": 1}


class Later:
    """A GPU: what is issued is computed when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.closed = False

    def after(self, publish: Callable[[], None]) -> None:
        self.waiting.append(publish)

    def compute(self) -> None:
        waiting, self.waiting = self.waiting, []
        for publish in waiting:
            publish()

    def close(self) -> None:
        self.closed = True


def worker(
    sender: Medium | None, receiver: Medium | None, ready: LayerReady | None = None, *, tp_rank: int = 0
) -> WorkerSide:
    return WorkerSide(
        sender=sender,
        receiver=receiver,
        layers=LAYERS,
        pieces=Pieces(BLOCK),
        ready=ready or AtOnce(),
        tp_rank=tp_rank,
    )


def send_order(number: int = 1, num_tokens: int = 10) -> SendOrder:
    return SendOrder(request_id=f"p{number}", transfer_id=transfer_id(number), digest=b"d", num_tokens=num_tokens)


def load_order(number: int = 1, first_token: int = 0, num_tokens: int = 9) -> LoadOrder:
    return LoadOrder(
        request_id=f"d{number}",
        transfer_id=transfer_id(number),
        host="h",
        port=7801,
        digest=b"d",
        first_token=first_token,
        num_tokens=num_tokens,
        block_table=(5, 6, 7) if num_tokens else (),
    )


def chunk(end_token: int, number: int = 1) -> Chunk:
    return Chunk(request_id=f"p{number}", block_table=(1, 2, 3), end_token=end_token)


def run(side: WorkerSide, orders: StepOrders, *, forward: bool = True) -> StepResults:
    """One step, in the order of vLLM 0.31."""
    side.begin(orders)
    side.begin(orders)  # bind_connector_metadata repeats what handle_preemptions began
    if forward:
        for name in LAYERS:
            side.layer_saved(name)
    side.start_loads()
    side.sweep()
    results = side.finish()
    side.check()
    return results


class TestSend:
    def test_each_layer_is_published_when_saved_and_swept(self) -> None:
        sender = Medium()
        run(worker(sender, None), StepOrders(sends=[send_order()], chunks=[chunk(10)]))
        key = transfer_id(1)
        assert sender.calls == [
            ("register", key, 3),
            ("publish", key, 3, 0),
            ("publish", key, 3, 1),
            ("publish", key, 3, None),
        ]

    def test_a_partial_block_waits_for_the_end_of_the_prompt(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        run(side, StepOrders(sends=[send_order(num_tokens=10)], chunks=[chunk(3)]))
        assert [call for call in sender.calls if call[0] == "publish"] == []
        run(side, StepOrders(chunks=[chunk(9)]))
        assert sender.calls[-1] == ("publish", transfer_id(1), 2, None)
        run(side, StepOrders(chunks=[chunk(10)]))
        assert sender.calls[-1] == ("publish", transfer_id(1), 3, None)

    def test_the_sweep_alone_publishes_what_hooks_missed(self) -> None:
        sender = Medium()
        run(worker(sender, None), StepOrders(sends=[send_order()], chunks=[chunk(10)]), forward=False)
        assert sender.calls[1:] == [("publish", transfer_id(1), 3, None)]

    def test_a_layer_of_another_cache_is_ignored(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        side.begin(StepOrders(sends=[send_order()], chunks=[chunk(10)]))
        side.layer_saved("indexer")
        assert len(sender.calls) == 1

    def test_an_end_is_reported_once_closed(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        run(side, StepOrders(sends=[send_order()], chunks=[chunk(10)]))
        sender.ends = [end(1)]
        assert run(side, StepOrders()).sent == set()  # the request still lives
        assert run(side, StepOrders(send_closes=["p1"])).sent == {"p1"}
        assert run(side, StepOrders()).sent == set()

    def test_a_closed_send_is_reported_when_it_ends(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        run(side, StepOrders(sends=[send_order()], chunks=[chunk(10)]))
        assert run(side, StepOrders(send_closes=["p1"])).sent == set()
        sender.ends = [end(1)]
        assert run(side, StepOrders()).sent == {"p1"}

    def test_nothing_is_published_after_the_end(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        run(side, StepOrders(sends=[send_order()], chunks=[chunk(4)]))
        sender.ends = [end(1, outcome="cancelled")]
        run(side, StepOrders())
        sender.calls.clear()
        run(side, StepOrders(chunks=[chunk(10)]))
        assert sender.calls == []

    def test_a_registration_that_fails_is_reported_too(self) -> None:
        sender = Medium(error=TransferError("in use"))
        side = worker(sender, None)
        run(side, StepOrders(sends=[send_order()], chunks=[chunk(10)]))
        assert run(side, StepOrders(send_closes=["p1"])).sent == {"p1"}
        assert sender.calls == []

    def test_without_a_sender(self) -> None:
        side = worker(None, Medium())
        run(side, StepOrders(sends=[send_order()], chunks=[chunk(10)], rewinds=["p1"]))
        results = run(side, StepOrders(send_closes=["p1"], send_cancels=[("p1", "aborted")]))
        assert results.sent == {"p1"}

    def test_aborted_before_its_first_step(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        run(side, StepOrders(sends=[send_order()], send_cancels=[("p1", "aborted")], send_closes=["p1"]))
        assert [call[0] for call in sender.calls] == ["register", "cancel"]
        sender.ends = [end(1, outcome="cancelled")]
        assert run(side, StepOrders()).sent == {"p1"}

    def test_finished_sends_are_given_up_after_this_steps_ends(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        shed = ShedOrder(transfer_ids=(transfer_id(1),), max_blocks=2, unsent_too=True)
        run(side, StepOrders(sends=[send_order()], send_closes=["p1"], shed=shed))
        assert [call[0] for call in sender.calls] == ["register", "shed"]
        assert sender.calls[1][1:] == ((transfer_id(1),), 2, True)
        run(worker(None, Medium()), StepOrders(shed=shed))  # nothing to give up

    def test_orders_for_unknown_ids_are_ignored(self) -> None:
        sender = Medium()
        orders = StepOrders(rewinds=["x"], send_cancels=[("x", "")], send_closes=["x"], chunks=[chunk(10, number=9)])
        assert run(worker(sender, Medium()), orders).sent == set()
        assert sender.calls == []


class TestPreemption:
    def test_rewind_comes_first(self) -> None:
        sender = Medium()
        side = worker(sender, None)
        run(side, StepOrders(sends=[send_order()], chunks=[chunk(10)]))
        sender.calls.clear()
        run(side, StepOrders(rewinds=["p1"], chunks=[chunk(4)]))
        assert [call[:1] + call[2:] for call in sender.calls] == [
            ("rewind",),
            ("publish", 1, 0),
            ("publish", 1, 1),
            ("publish", 1, None),
        ]

    def test_what_was_issued_before_a_rewind_is_not_published_after_it(self) -> None:
        sender, later = Medium(), Later()
        side = worker(sender, None, later)
        run(side, StepOrders(sends=[send_order()], chunks=[chunk(10)]))
        run(side, StepOrders(rewinds=["p1"]))
        later.compute()
        assert [call[0] for call in sender.calls] == ["register", "rewind"]
        run(side, StepOrders(chunks=[chunk(4)]))
        later.compute()
        assert sender.calls[-1] == ("publish", transfer_id(1), 1, None)


class TestLoad:
    def test_blocks_are_asked_for(self) -> None:
        receiver = Medium()
        run(worker(None, receiver, tp_rank=1), StepOrders(loads=[load_order(first_token=4, num_tokens=5)]))
        (load,) = receiver.loads
        assert (load.first_token, load.num_tokens, load.port) == (1, 2, 7802)

    def test_a_load_is_opened_once_per_step(self) -> None:
        receiver = Medium()
        side = worker(None, receiver)
        side.begin(orders := StepOrders(loads=[load_order()]))
        side.start_loads()
        side.begin(orders)
        side.start_loads()
        assert len(receiver.loads) == 1

    def test_done(self) -> None:
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order()]))
        receiver.ends = [end(1, "receive", num_tokens=3)]
        results = run(side, StepOrders())
        assert (results.received, results.failed, results.failed_blocks) == ({"d1"}, set(), set())
        assert results.ends["d1"].num_tokens == 9  # tokens, not blocks
        assert run(side, StepOrders()).received == set()

    def test_failed(self) -> None:
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order(first_token=4, num_tokens=5)]))
        receiver.ends = [end(1, "receive", "failed", "stalled")]
        results = run(side, StepOrders())
        assert (results.received, results.failed, results.failed_blocks) == ({"d1"}, {"d1"}, {6, 7})
        data = side.tally.take()
        assert data is not None
        assert data["recomputed_tokens"] == 5
        assert data["failures"] == {"receive:stalled": 1}

    def test_cancelled_is_reported_but_not_as_a_failure(self) -> None:
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order()]))
        run(side, StepOrders(load_cancels=[("d1", "gone")]))
        assert receiver.calls == [("cancel", transfer_id(1))]
        receiver.ends = [end(1, "receive", "cancelled")]
        results = run(side, StepOrders())
        assert (results.received, results.failed) == ({"d1"}, set())

    def test_a_peer_that_cancels_is_a_failure(self) -> None:
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order()]))
        receiver.ends = [end(1, "receive", "cancelled", "peer_cancelled")]
        assert run(side, StepOrders()).failed == {"d1"}

    def test_a_cancel_that_comes_too_late(self) -> None:
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order()]))
        receiver.ends = [end(1, "receive")]
        run(side, StepOrders())
        assert run(side, StepOrders(load_cancels=[("d1", "gone")])).received == set()
        assert receiver.calls == []

    def test_an_empty_load_is_not_reported(self) -> None:
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order(num_tokens=0)]))
        assert receiver.loads[0].num_tokens == 0
        receiver.ends = [end(1, "receive")]
        assert run(side, StepOrders()).received == set()

    @pytest.mark.parametrize("error", [TransferError("in use"), ValueError("short table")])
    def test_a_load_that_cannot_be_opened_fails(self, error: Exception) -> None:
        side = worker(None, Medium(error=error))
        assert run(side, StepOrders(loads=[load_order()])).failed == {"d1"}

    def test_a_range_that_begins_inside_a_block_fails(self) -> None:
        receiver = Medium()
        assert run(worker(None, receiver), StepOrders(loads=[load_order(first_token=2, num_tokens=3)])).failed == {"d1"}
        assert receiver.loads == []

    def test_without_a_receiver(self) -> None:
        side = worker(Medium(), None)
        assert run(side, StepOrders(loads=[load_order()], load_cancels=[("x", "")])).failed == {"d1"}


def test_close_stops_callbacks_first() -> None:
    sender, receiver, later = Medium(), Medium(), Later()
    worker(sender, receiver, later).close()
    assert later.closed
    assert sender.closed
    assert receiver.closed


class TestIdleSteps:
    """With nothing to compute, a step waits a moment for what is parked; see worker.py."""

    def test_an_end_during_the_step_is_reported_by_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tollbridge.vllm.worker._IDLE_WAIT_S", 60.0)
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order()]))
        side.begin(StepOrders(is_idle=True))
        ending = threading.Thread(target=receiver.end_now, args=(end(1, "receive"),))
        ending.start()
        assert side.finish().received == {"d1"}
        ending.join()

    def test_a_step_that_computes_does_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tollbridge.vllm.worker._IDLE_WAIT_S", 3600.0)
        side = worker(None, Medium())
        assert run(side, StepOrders(loads=[load_order()])).received == set()

    def test_nothing_is_waited_for_when_nothing_is_parked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tollbridge.vllm.worker._IDLE_WAIT_S", 3600.0)
        side = worker(Medium(), Medium())
        assert run(side, StepOrders(is_idle=True)).received == set()

    def test_an_end_before_the_step_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tollbridge.vllm.worker._IDLE_WAIT_S", 3600.0)
        receiver = Medium()
        side = worker(None, receiver)
        run(side, StepOrders(loads=[load_order(1), load_order(2)]))
        receiver.end_now(end(1, "receive"))
        assert run(side, StepOrders(is_idle=True)).received == {"d1"}
