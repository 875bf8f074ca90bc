"""Sends that have ended and still hold blocks: counted, bounded, released, and given up when others starve."""

from __future__ import annotations

from typing import Any

from tests.vllm.fakes import SECRET, ended, kv_params, request, scheduled, transfer_id
from tollbridge.clock import ManualClock
from tollbridge.vllm.admission import Admission
from tollbridge.vllm.orders import ShedOrder, StepOrders
from tollbridge.vllm.pinned import Pinned
from tollbridge.vllm.scheduler import SchedulerSide


def scheduler(max_pinned_blocks: int = 4) -> SchedulerSide:
    admission = Admission(secret=SECRET, clock=ManualClock(1_000.0), tp_size=1, sends=True, loads=True)
    return SchedulerSide(admission, max_pinned_blocks=max_pinned_blocks)


def step(side: SchedulerSide, **what: Any) -> StepOrders:
    orders = side.step(scheduled(**what))
    side.check()
    return orders


def pin(side: SchedulerSide, number: int, blocks: list[int]) -> None:
    """Run a prefill leg to its end."""
    vllm_request = request(f"p{number}", kv_params("prefill", number), num_tokens=8)
    side.queued(vllm_request)
    step(side, new=[(f"p{number}", 0, 8, blocks)])
    side.finished(ended(vllm_request))


class TestPinned:
    def test_shared_blocks_count_once(self) -> None:
        pinned = Pinned(max_blocks=3)
        pinned.add("a", "ta", [1, 2])
        pinned.add("b", "tb", [2, 3])
        pinned.check()
        assert (len(pinned), pinned.num_blocks) == (2, 3)
        assert pinned.over_bound() is None
        assert pinned.remove("a") == "ta"
        pinned.check()
        assert pinned.num_blocks == 2
        assert pinned.remove("a") == ""

    def test_over_the_bound(self) -> None:
        pinned = Pinned(max_blocks=3)
        pinned.add("a", "ta", [1, 2])
        pinned.add("b", "tb", [3, 4])
        assert pinned.over_bound() == ShedOrder(transfer_ids=("ta", "tb"), max_blocks=3, unsent_too=True)

    def test_no_bound(self) -> None:
        pinned = Pinned()
        pinned.add("a", "ta", [1, 2])
        assert pinned.over_bound() is None
        assert pinned.make_room() == ShedOrder(transfer_ids=("ta",), max_blocks=1, unsent_too=False)

    def test_nothing_pinned(self) -> None:
        assert Pinned(max_blocks=1).make_room() is None


class TestBound:
    def test_within_it_nothing_is_given_up(self) -> None:
        side = scheduler()
        pin(side, 1, [1, 2])
        pin(side, 2, [3, 4])
        assert step(side).shed is None

    def test_beyond_it_the_worker_is_told(self) -> None:
        side = scheduler()
        for number in (1, 2, 3):
            pin(side, number, [2 * number, 2 * number + 1])
        expected = tuple(map(transfer_id, (1, 2, 3)))
        assert step(side).shed == ShedOrder(transfer_ids=expected, max_blocks=4, unsent_too=True)
        assert step(side).shed is None  # once
        side.reported(["p3"], [], {})
        assert side.gauges()["pinned_blocks"] == 4


class TestStarved:
    def test_what_waits_behind_pinned_blocks_gets_them(self) -> None:
        side = scheduler(max_pinned_blocks=100)
        pin(side, 1, [1, 2])
        side.queued(request("big", None))
        step(side)  # the close
        assert step(side).shed == ShedOrder(transfer_ids=(transfer_id(1),), max_blocks=1, unsent_too=False)

    def test_not_while_something_runs(self) -> None:
        side = scheduler()
        pin(side, 1, [1, 2])
        side.queued(request("big", None))
        assert step(side, cached=[("other", 9, 1, None)]).shed is None

    def test_not_while_something_loads(self) -> None:
        side = scheduler()
        pin(side, 1, [1, 2])
        load = request("d", kv_params("decode", 9))
        side.queued(load)
        side.allocated("d", [5, 6], 9)
        load.status.name = "WAITING_FOR_REMOTE_KVS"
        side.queued(request("big", None))
        assert step(side).shed is None

    def test_not_for_what_waits_for_no_blocks(self) -> None:
        side = scheduler()
        pin(side, 1, [1, 2])
        grammar = request("json", None)
        grammar.status.name = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
        side.queued(grammar)
        assert step(side).shed is None

    def test_a_preempted_request_waits_again(self) -> None:
        side = scheduler()
        side.queued(request("big", None, num_tokens=4))
        step(side, new=[("big", 0, 4, [7])])
        pin(side, 1, [1, 2])
        assert step(side).shed is None
        assert step(side, preempted=["big"]).shed is not None


class TestRelease:
    def test_a_pinned_send_is_cancelled(self) -> None:
        side = scheduler()
        pin(side, 1, [1, 2])
        step(side)
        side.queued(request("r", kv_params("release", 1), num_tokens=1))
        assert [request_id for request_id, _ in step(side).send_cancels] == ["p1"]

    def test_what_has_ended_or_was_never_here(self) -> None:
        side = scheduler()
        vllm_request = request("r", kv_params("release", 1), num_tokens=1)
        side.queued(vllm_request)
        assert not step(side).send_cancels
        assert side.finished(ended(vllm_request)) == (False, None)

    def test_only_the_router_can_sign_for_it(self) -> None:
        side = scheduler()
        pin(side, 1, [1, 2])
        forged = kv_params("release", 1)
        forged["tollbridge"]["sig"] = "0" * 64
        side.queued(request("r", forged))
        assert not step(side).send_cancels


class TestGauges:
    def test_only_changes_are_told(self) -> None:
        side = scheduler()
        assert side.gauges() == {"pinned_blocks": 0, "max_pinned_blocks": 4, "waiting_prefill_tokens": 0}
        assert side.gauges() == {}
        pin(side, 1, [1, 2])
        assert side.gauges() == {"pinned_blocks": 2}

    def test_prompt_tokens_that_wait(self) -> None:
        side = scheduler()
        for name in ("a", "b"):
            side.queued(request(name, None, num_tokens=10))
        assert side.gauges()["waiting_prefill_tokens"] == 20
        step(side, new=[("a", 4, 3, [1, 2])])  # a hit of 4, a chunk of 3
        assert side.gauges() == {"waiting_prefill_tokens": 13}
        step(side, cached=[("a", 7, 3, None)])
        step(side, cached=[("a", 10, 1, None)])  # decoding
        assert side.gauges() == {"waiting_prefill_tokens": 10}
        step(side, preempted=["a"])
        assert side.gauges() == {"waiting_prefill_tokens": 20}
        step(side, cached=[("a", 8, 2, [3])], resumed=["a"])
        assert side.gauges() == {"waiting_prefill_tokens": 10}

    def test_tokens_that_are_loaded_do_not_wait(self) -> None:
        side = scheduler()
        side.queued(request("d", kv_params("decode")))
        side.allocated("d", [5, 6], 9)
        assert side.gauges()["waiting_prefill_tokens"] == 1

    def test_a_request_that_leaves_is_news_for_one_step(self) -> None:
        side = scheduler()
        vllm_request = request("a", None)
        side.queued(vllm_request)
        step(side)
        assert not side.pending
        side.finished(ended(vllm_request, "FINISHED_ABORTED"))
        assert side.pending
        step(side)
        assert side.gauges()["waiting_prefill_tokens"] == 0
        assert not side.pending
