"""The scheduler's half: the life of sends and loads, in every order that vLLM may bring it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.fakes import SECRET, end, ended, kv_params, request, scheduled, transfer_id
from tollbridge.clock import ManualClock
from tollbridge.transfer.base import content_digest
from tollbridge.vllm.admission import Admission
from tollbridge.vllm.orders import Chunk, StepOrders
from tollbridge.vllm.scheduler import SchedulerSide


@pytest.fixture
def side() -> SchedulerSide:
    admission = Admission(secret=SECRET, clock=ManualClock(1_000.0), tp_size=1, sends=True, loads=True)
    return SchedulerSide(admission)


def step(side: SchedulerSide, **what: Any) -> StepOrders:
    orders = side.step(scheduled(**what))
    side.check()
    return orders


class TestPrefill:
    def test_a_send_is_announced_before_it_is_scheduled(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), num_tokens=10))
        (send,) = step(side).sends
        assert (send.request_id, send.transfer_id, send.num_tokens) == ("p", transfer_id(1), 10)
        assert send.digest == content_digest(range(10))
        assert not step(side)

    def test_the_salt_is_part_of_the_digest(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), cache_salt="tenant"))
        assert step(side).sends[0].digest == content_digest(range(10), cache_salt="tenant")

    def test_chunks_carry_the_whole_table(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), num_tokens=10))
        assert step(side, new=[("p", 0, 4, [7])]).chunks == [Chunk(request_id="p", block_table=(7,), end_token=4)]
        assert step(side, cached=[("p", 4, 4, [9])]).chunks == [Chunk(request_id="p", block_table=(7, 9), end_token=8)]
        assert step(side, cached=[("p", 8, 2, [3])]).chunks[0].block_table == (7, 9, 3)

    def test_a_step_without_new_blocks(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), num_tokens=10))
        step(side, new=[("p", 0, 2, [7])])
        assert step(side, cached=[("p", 2, 2, None)]).chunks[0].block_table == (7,)

    def test_a_prefix_hit_goes_with_the_first_chunk(self, side: SchedulerSide) -> None:
        vllm_request = request("p", kv_params("prefill"), num_tokens=10)
        side.queued(vllm_request)
        assert step(side, new=[("p", 8, 2, [1, 2, 3])]).chunks[0].end_token == 10
        _, report = side.finished(ended(vllm_request))
        assert report is not None
        assert report["tollbridge"]["cached_tokens"] == 8
        assert report["tollbridge"]["computed_tokens"] == 2

    def test_generated_tokens_are_not_published(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), num_tokens=4))
        step(side, new=[("p", 0, 4, [1])])
        assert not step(side, cached=[("p", 4, 1, [2])]).chunks

    def test_speculated_tokens_do_not_count(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), num_tokens=4))
        assert step(side, new=[("p", 0, 7, [1, 2])]).chunks[0].end_token == 4

    def test_preemption_starts_over(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), num_tokens=10))
        step(side, new=[("p", 0, 8, [1, 2])])
        assert step(side, preempted=["p"]).rewinds == ["p"]
        orders = step(side, cached=[("p", 0, 4, [5])], resumed=["p"])
        assert orders.chunks == [Chunk(request_id="p", block_table=(5,), end_token=4)]

    def test_preempted_and_resumed_in_one_step(self, side: SchedulerSide) -> None:
        side.queued(request("p", kv_params("prefill"), num_tokens=10))
        step(side, new=[("p", 0, 8, [1, 2])])
        orders = step(side, preempted=["p"], cached=[("p", 0, 8, [6, 7])], resumed=["p"])
        assert orders.rewinds == ["p"]
        assert orders.chunks[0].block_table == (6, 7)

    def test_blocks_stay_until_the_worker_has_reported(self, side: SchedulerSide) -> None:
        vllm_request = request("p", kv_params("prefill"), num_tokens=4)
        side.queued(vllm_request)
        step(side, new=[("p", 0, 4, [1])])
        assert side.finished(ended(vllm_request))[0] is True
        assert side.pending
        orders = step(side)
        assert orders.send_closes == ["p"]
        assert not orders.send_cancels
        assert side.pending
        side.reported(["p"], [], {})
        assert not side.pending

    @pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
    def test_an_early_end_cancels(self, side: SchedulerSide, status: str) -> None:
        vllm_request = request("p", kv_params("prefill"), num_tokens=10)
        side.queued(vllm_request)
        step(side, new=[("p", 0, 4, [1])])
        assert side.finished(ended(vllm_request, status))[0] is True
        orders = step(side)
        assert [request_id for request_id, _ in orders.send_cancels] == ["p"]
        assert orders.send_closes == ["p"]

    def test_an_abort_before_the_first_step_is_announced_and_cancelled(self, side: SchedulerSide) -> None:
        vllm_request = request("p", kv_params("prefill"))
        side.queued(vllm_request)
        assert side.finished(ended(vllm_request, "FINISHED_ABORTED"))[0] is True
        orders = step(side)
        assert orders.sends
        assert orders.send_cancels
        assert orders.send_closes

    def test_a_request_preempted_in_its_last_step_has_no_kv(self, side: SchedulerSide) -> None:
        vllm_request = request("p", kv_params("prefill"), num_tokens=4)
        side.queued(vllm_request)
        step(side, new=[("p", 0, 4, [1])])
        step(side, preempted=["p"])
        side.finished(ended(vllm_request))
        assert step(side).send_cancels

    def test_preempted_and_then_aborted(self, side: SchedulerSide) -> None:
        """vLLM has freed the blocks, and names the preemption only after the end of the request."""
        vllm_request = request("p", kv_params("prefill"), num_tokens=4)
        side.queued(vllm_request)
        step(side, new=[("p", 0, 4, [1])])
        side.finished(ended(vllm_request, "FINISHED_ABORTED"))
        assert step(side, preempted=["p", "stranger"]).rewinds == ["p"]

    def test_an_id_is_used_once(self, side: SchedulerSide) -> None:
        first, second = (request(name, kv_params("prefill")) for name in ("p", "q"))
        side.queued(first)
        side.queued(second)
        assert [send.request_id for send in step(side).sends] == ["p"]
        blocks_stay, report = side.finished(ended(second))
        assert blocks_stay is False
        assert report is not None
        assert report["tollbridge"]["transfer"]["reason"] == "declined"


class TestDecode:
    def test_everything_but_the_last_token_is_lacking(self, side: SchedulerSide) -> None:
        side.queued(request("d", kv_params("decode"), num_tokens=10))
        assert side.lacking("d", 0) == 9
        assert side.lacking("d", 8) == 1
        assert side.lacking("d", 0) == 9  # asked again: nothing has happened

    def test_a_load_is_opened_once(self, side: SchedulerSide) -> None:
        side.queued(request("d", kv_params("decode"), num_tokens=10))
        assert side.lacking("d", 4) == 5
        side.allocated("d", [1, 2, 3], 5)
        (load,) = step(side).loads
        assert (load.first_token, load.num_tokens, load.block_table) == (4, 5, (1, 2, 3))
        assert (load.host, load.port) == ("127.0.0.1", 7801)
        side.allocated("d", [1, 2, 3], 0)  # after the arrival
        assert side.lacking("d", 0) == 0  # after a preemption
        assert not step(side).loads

    def test_the_load_is_reported(self, side: SchedulerSide) -> None:
        vllm_request = request("d", kv_params("decode"), num_tokens=10)
        side.queued(vllm_request)
        side.lacking("d", 4)
        side.allocated("d", [1, 2, 3], 5)
        side.reported([], ["d"], {"d": end(1, "receive", num_tokens=5)})
        blocks_stay, report = side.finished(ended(vllm_request))
        assert blocks_stay is False
        assert report is not None
        assert {key: report["tollbridge"][key] for key in ("cached_tokens", "loaded_tokens", "computed_tokens")} == {
            "cached_tokens": 4,
            "loaded_tokens": 5,
            "computed_tokens": 1,
        }

    def test_a_failed_load_counts_as_computed(self, side: SchedulerSide) -> None:
        vllm_request = request("d", kv_params("decode"), num_tokens=10)
        side.queued(vllm_request)
        side.lacking("d", 0)
        side.allocated("d", [1, 2, 3], 9)
        side.reported([], ["d"], {"d": end(1, "receive", "failed", "stalled")})
        _, report = side.finished(ended(vllm_request))
        assert report is not None
        assert report["tollbridge"]["computed_tokens"] == 10
        assert report["tollbridge"]["transfer"]["reason"] == "stalled"

    @pytest.mark.parametrize("num_computed", [9, 8])
    def test_nothing_to_load_tells_prefill(self, side: SchedulerSide, num_computed: int) -> None:
        side.queued(request("d", kv_params("decode"), num_tokens=num_computed + 1))
        assert side.lacking("d", num_computed) == 0
        side.allocated("d", [1, 2, 3], 0)
        (load,) = step(side).loads
        assert (load.num_tokens, load.block_table) == (0, ())

    def test_vllm_may_decline_to_load(self, side: SchedulerSide) -> None:
        """Prompt log-probabilities make vLLM compute everything, whatever we offered."""
        side.queued(request("d", kv_params("decode"), num_tokens=10))
        assert side.lacking("d", 0) == 9
        side.allocated("d", [1, 2, 3], 0)
        assert step(side).loads[0].num_tokens == 0

    def test_an_abort_before_the_blocks_tells_prefill(self, side: SchedulerSide) -> None:
        vllm_request = request("d", kv_params("decode"))
        side.queued(vllm_request)
        assert side.finished(ended(vllm_request, "FINISHED_ABORTED"))[0] is False
        assert step(side).loads[0].num_tokens == 0

    def test_an_abort_while_loading_cancels_and_waits_for_the_worker(self, side: SchedulerSide) -> None:
        vllm_request = request("d", kv_params("decode"), num_tokens=10)
        side.queued(vllm_request)
        side.lacking("d", 0)
        side.allocated("d", [1, 2, 3], 9)
        step(side)
        side.finished(ended(vllm_request, "FINISHED_ABORTED"))
        assert [request_id for request_id, _ in step(side).load_cancels] == ["d"]
        side.reported([], ["d"], {"d": end(1, "receive", "cancelled")})
        assert not step(side)

    def test_an_abort_after_the_arrival_cancels_nothing(self, side: SchedulerSide) -> None:
        vllm_request = request("d", kv_params("decode"), num_tokens=10)
        side.queued(vllm_request)
        side.lacking("d", 0)
        side.allocated("d", [1, 2, 3], 9)
        step(side)
        side.reported([], ["d"], {})
        side.finished(ended(vllm_request, "FINISHED_ABORTED"))
        assert not step(side)

    def test_siblings_wait_for_their_leader(self, side: SchedulerSide) -> None:
        leader, sibling = (request(name, kv_params("decode"), num_tokens=10) for name in ("d0", "d1"))
        side.queued(leader)
        side.queued(sibling)
        assert side.lacking("d1", 0) is None
        assert side.lacking("d0", 0) == 9
        side.allocated("d0", [1, 2, 3], 9)
        assert side.lacking("d1", 0) is None
        side.reported([], ["d0"], {"d0": end(1, "receive", num_tokens=9)})
        assert side.lacking("d1", 8) == 0
        side.allocated("d1", [1, 2, 4], 0)
        assert [load.request_id for load in step(side).loads] == ["d0"]
        _, of_leader = side.finished(ended(leader))
        _, of_sibling = side.finished(ended(sibling))
        assert of_leader is not None
        assert of_leader["tollbridge"]["loaded_tokens"] == 9
        assert of_sibling == of_leader  # one answer has one report

    @pytest.mark.parametrize("is_gone", [False, True])
    def test_a_sibling_that_comes_late_does_not_load_again(self, side: SchedulerSide, is_gone: bool) -> None:
        """The engine gets the choices of one request one by one: the first may have its KV before the last comes."""
        leader, sibling = (request(name, kv_params("decode"), num_tokens=10) for name in ("d0", "d1"))
        side.queued(leader)
        assert side.lacking("d0", 0) == 9
        side.allocated("d0", [1, 2, 3], 9)
        side.reported([], ["d0"], {"d0": end(1, "receive", num_tokens=9)})
        if is_gone:
            _, of_leader = side.finished(ended(leader))
        side.queued(sibling)
        assert side.lacking("d1", 8) == 0
        side.allocated("d1", [1, 2, 4], 0)
        assert [load.request_id for load in step(side).loads] == ["d0"]
        if not is_gone:
            _, of_leader = side.finished(ended(leader))
        _, of_sibling = side.finished(ended(sibling))
        assert of_sibling == of_leader
        side.check()

    def test_only_the_latest_transfers_are_remembered(self, side: SchedulerSide) -> None:
        for number in range(600):
            leader = request(f"d{number}", kv_params("decode", number), num_tokens=10)
            side.queued(leader)
            side.finished(ended(leader, "FINISHED_ABORTED"))
            step(side)
        side.check()
        for number, lacking in ((0, 9), (599, 0)):
            side.queued(request(f"late{number}", kv_params("decode", number), num_tokens=10))
            assert side.lacking(f"late{number}", 0) == lacking

    def test_a_leader_that_dies_frees_its_siblings(self, side: SchedulerSide) -> None:
        leader, sibling = (request(name, kv_params("decode"), num_tokens=10) for name in ("d0", "d1"))
        side.queued(leader)
        side.queued(sibling)
        side.finished(ended(leader, "FINISHED_ABORTED"))
        assert side.lacking("d1", 0) == 0
        side.finished(ended(sibling))
        assert len(step(side).loads) == 1

    def test_another_prompt_under_the_same_id_is_local(self, side: SchedulerSide) -> None:
        side.queued(request("d0", kv_params("decode"), num_tokens=10))
        side.queued(request("d1", kv_params("decode"), num_tokens=11))
        assert side.lacking("d1", 0) == 0


class TestLocal:
    def test_a_request_without_params(self, side: SchedulerSide) -> None:
        vllm_request = request("l", None)
        side.queued(vllm_request)
        assert side.lacking("l", 0) == 0
        side.allocated("l", [1], 0)
        assert not step(side, new=[("l", 0, 10, [1, 2, 3])])
        assert side.finished(ended(vllm_request)) == (False, None)

    @pytest.mark.parametrize(
        ("params", "sentence"),
        [
            (kv_params("decode", expires=999.0), "expired"),
            ({"tollbridge": {**kv_params("decode")["tollbridge"], "port": 1}}, "signature"),
            ({"tollbridge": {"v": 1}}, "malformed"),
            ({"tollbridge": 7}, "malformed"),
            ({"do_remote_decode": True}, "one key"),
            (kv_params("decode", tp_size=2), "tensor parallel"),
        ],
    )
    def test_params_not_to_be_trusted(self, side: SchedulerSide, params: object, sentence: str) -> None:
        vllm_request = request("d", params)
        side.queued(vllm_request)
        assert side.lacking("d", 0) == 0
        blocks_stay, report = side.finished(ended(vllm_request))
        assert blocks_stay is False
        assert report is not None
        assert sentence in report["tollbridge"]["transfer"]["detail"]

    @pytest.mark.parametrize(
        "changes",
        [
            {"lora_request": object()},
            {"mm_features": [object()]},
            {"prompt_token_ids": None},
            {"prompt_embeds": object()},
            {"pooling_params": object()},
            {"resumable": True},
        ],
    )
    def test_what_cannot_be_split(self, side: SchedulerSide, changes: dict[str, object]) -> None:
        for role in ("prefill", "decode"):
            side.queued(request(role, kv_params(role), **changes))
            assert side.lacking(role, 0) == 0
        assert not step(side)

    def test_a_role_that_kv_role_forbids(self) -> None:
        admission = Admission(secret=SECRET, clock=ManualClock(1_000.0), tp_size=1, sends=False, loads=True)
        side = SchedulerSide(admission)
        side.queued(request("p", kv_params("prefill")))
        assert not step(side)
