from __future__ import annotations

import pytest

from tests.sched.build import BLOCK_SIZE, add, make_scheduler, shape, step
from tollbridge.errors import ContextLengthError
from tollbridge.sched.scheduler import Schedule, Scheduler
from tollbridge.sched.sequence import State, TokenSequence
from tollbridge.sched.waiting import MAX_OVERTAKES


def test_nothing_to_do_is_idle() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule().is_idle


def test_a_prompt_in_chunks_then_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    sequence = add(scheduler, "a", 14)
    plans = [shape(step(scheduler)) for _ in range(5)]
    assert plans == [[("a", 0, 6)], [("a", 6, 6)], [("a", 12, 2)], [("a", 14, 1)], [("a", 15, 1)]]
    assert sequence.token_ids[14:] == [14, 15, 16]


def test_the_budget_goes_to_decodes_then_to_the_oldest_prefill() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 3)
    step(scheduler)
    add(scheduler, "b", 10)
    add(scheduler, "c", 10)
    assert shape(step(scheduler)) == [("a", 3, 1), ("b", 0, 7)]
    assert shape(step(scheduler)) == [("a", 4, 1), ("b", 7, 3), ("c", 0, 4)]
    assert shape(step(scheduler)) == [("a", 5, 1), ("b", 10, 1), ("c", 4, 6)]


def test_the_batch_has_at_most_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    sequences = [add(scheduler, name, 2) for name in "abc"]
    step(scheduler)
    assert [sequence.state for sequence in sequences] == [State.RUNNING, State.RUNNING, State.WAITING]
    scheduler.finish(sequences[0])
    step(scheduler)
    assert sequences[2].state is State.RUNNING


def test_hits_are_what_was_computed_not_what_was_scheduled() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", 13, start=0)
    schedule = scheduler.schedule()
    twin = add(scheduler, "b", 13, start=0)
    assert schedule.plan is not None
    scheduler.commit(schedule.plan, [])
    assert shape(step(scheduler)) == [("a", 10, 3), ("b", 8, 5)]
    assert twin.num_hit_tokens == 8


def test_the_whole_prompt_is_never_a_hit() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "a", 8, start=0)
    step(scheduler)
    scheduler.finish(first)
    second = add(scheduler, "b", 8, start=0)
    assert shape(step(scheduler)) == [("b", 4, 4)]
    assert second.num_hit_tokens == 4


def test_the_latest_arrival_is_preempted_and_resumes_from_its_own_cache() -> None:
    preempted: list[tuple[str, int]] = []

    def before_preempt(sequence: TokenSequence) -> None:
        preempted.append((sequence.request_id, len(sequence.block_table)))

    scheduler = make_scheduler(num_blocks=6, before_preempt=before_preempt)
    old, young = add(scheduler, "old", 7), add(scheduler, "young", 6)
    for _ in range(7):
        step(scheduler)
    assert preempted == [("young", 3)], "the hook is called while it still has its blocks"
    assert (old.state, young.state) == (State.RUNNING, State.WAITING)
    assert young.num_tokens == 6 + 6 and young.num_computed_peak == 11
    scheduler.finish(old)
    schedule = step(scheduler)
    assert schedule.admitted == [young]
    assert shape(schedule) == [("young", 8, 4)], "its first two blocks were still in the prefix cache"
    assert scheduler.statistics().preemptions_total == 1


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, "a", 8)
    step(scheduler)
    late = add(scheduler, "b", 4 * BLOCK_SIZE)
    step(scheduler)
    assert late.state is State.WAITING
    small = add(scheduler, "c", 1)
    step(scheduler)
    assert small.state is State.WAITING, "first come, first served"


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=30)
    scheduler.check_fits(16, 1)
    with pytest.raises(ContextLengthError, match="KV cache holds 16 tokens"):
        scheduler.check_fits(16, 2)
    with pytest.raises(ContextLengthError, match="context is 30 tokens"):
        scheduler.check_fits(30, 1)


def test_a_remote_sequence_parks_with_all_its_blocks() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 9, remote=True)
    schedule = step(scheduler)
    assert schedule.parked == [sequence] and schedule.plan is None and not schedule.is_idle
    assert (sequence.state, len(sequence.block_table), sequence.num_lacking) == (State.PARKED, 3, 8)
    assert step(scheduler).is_idle
    scheduler.loaded(sequence, accepted=True)
    scheduler.check()
    assert shape(step(scheduler)) == [("a", 8, 1)]


def test_a_refused_load_is_computed_behind_the_local_hit() -> None:
    scheduler = make_scheduler()
    scheduler.finish(_computed(scheduler, "a", 6))
    sequence = add(scheduler, "b", 9, start=0, remote=True)
    step(scheduler)
    assert (sequence.num_hit_tokens, sequence.num_lacking) == (4, 4)
    scheduler.loaded(sequence, accepted=False)
    assert shape(step(scheduler)) == [("b", 4, 5)]


def test_a_remote_sequence_that_lacks_nothing_is_not_parked() -> None:
    scheduler = make_scheduler()
    scheduler.finish(_computed(scheduler, "a", 9))
    sequence = add(scheduler, "b", 9, start=0, remote=True)
    schedule = step(scheduler)
    assert schedule.admitted == [sequence] and not schedule.parked
    assert shape(schedule) == [("b", 8, 1)]


def test_parking_needs_no_place_in_the_batch_but_running_does() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    local = add(scheduler, "a", 3)
    remote = add(scheduler, "b", 9, remote=True)
    assert step(scheduler).parked == [remote]
    scheduler.loaded(remote, accepted=True)
    step(scheduler)
    assert remote.state is State.READY and scheduler.statistics().num_waiting == 1
    scheduler.finish(local)
    assert shape(step(scheduler)) == [("b", 8, 1)]


def test_parked_blocks_are_not_preempted() -> None:
    scheduler = make_scheduler(num_blocks=5)
    local = add(scheduler, "a", 7)
    remote = add(scheduler, "b", 8, remote=True)
    for _ in range(10):
        schedule = step(scheduler)
    assert schedule.is_idle, "the local one gave way to what is parked"
    assert (local.state, remote.state) == (State.WAITING, State.PARKED)
    scheduler.loaded(remote, accepted=True)
    step(scheduler)
    scheduler.finish(remote)
    step(scheduler)
    assert local.state is State.RUNNING


def test_a_load_without_room_is_passed_and_then_served() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2)
    running = add(scheduler, "first", 8)
    step(scheduler)
    big = add(scheduler, "big", 28, remote=True)
    passed = 0
    for i in range(3 * MAX_OVERTAKES):
        late = add(scheduler, f"late{i}", 4)
        step(scheduler)
        if late.state is not State.RUNNING:
            break
        passed += 1
        scheduler.finish(late)
    assert passed == MAX_OVERTAKES
    assert big.state is State.WAITING
    scheduler.finish(running)
    assert step(scheduler).parked == [big]


def test_a_load_is_revoked_when_an_awaited_prefill_has_no_room_and_nothing_runs() -> None:
    scheduler = make_scheduler(num_blocks=6)
    running = add(scheduler, "running", 3)
    step(scheduler)
    old, young = add(scheduler, "old", 8, remote=True), add(scheduler, "young", 8, remote=True)
    step(scheduler)
    local = add(scheduler, "local", 9)
    add(scheduler, "sent", 9, awaited=True)
    assert step(scheduler).revoked is None, "something runs"
    scheduler.finish(running)
    schedule = step(scheduler)
    assert schedule.revoked is young and schedule.is_idle
    assert young.state is State.PARKED
    assert step(scheduler).revoked is None, "one at a time"
    scheduler.loaded(young, accepted=False)
    scheduler.check()
    assert shape(step(scheduler)) == [("young", 0, 8)], "older than the others, it is computed here first"
    scheduler.finish(young)
    assert shape(step(scheduler)) == [("local", 0, 9)]
    assert (old.state, local.state) == (State.PARKED, State.RUNNING)


def test_a_load_is_not_revoked_for_a_local_request() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, "load", 20, remote=True)
    step(scheduler)
    add(scheduler, "local", 20)
    assert step(scheduler).revoked is None


@pytest.mark.parametrize("accepted", [True, False])
def test_a_revoked_load_may_end_otherwise(accepted: bool) -> None:
    scheduler = make_scheduler(num_blocks=6)
    load = add(scheduler, "load", 20, remote=True)
    step(scheduler)
    add(scheduler, "sent", 20, awaited=True)
    assert step(scheduler).revoked is load
    if accepted:
        scheduler.loaded(load, accepted=True)
        assert shape(step(scheduler)) == [("load", 19, 1)]
    else:
        scheduler.finish(load)
        assert shape(step(scheduler)) == [("sent", 0, 16)]


@pytest.mark.parametrize("state", ["waiting", "parked", "ready", "running"])
def test_finish_in_any_state_gives_the_blocks_back(state: str) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    if state == "ready":
        add(scheduler, "busy", 2)
    sequence = add(scheduler, "a", 9, remote=state in ("parked", "ready"))
    if state != "waiting":
        step(scheduler)
    if state == "ready":
        scheduler.loaded(sequence, accepted=True)
    assert sequence.state.value == state
    scheduler.finish(sequence)
    assert not sequence.block_table
    scheduler.check()


def test_a_pinned_sequence_keeps_the_blocks_of_its_prompt() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 6)
    for _ in range(8):
        step(scheduler)
    assert len(sequence.block_table) == 4
    scheduler.finish(sequence, pin=True)
    scheduler.check()
    statistics = scheduler.statistics()
    assert (sequence.state, statistics.num_pinned, statistics.num_pinned_blocks) == (State.PINNED, 1, 2)
    scheduler.unpin(sequence)
    scheduler.check()
    assert scheduler.statistics().num_pinned_blocks == 0


def test_without_blocks_there_is_nothing_to_pin() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 6)
    scheduler.finish(sequence, pin=True)
    assert sequence.state is State.FINISHED


def test_waiting_prefill_tokens_count_what_will_be_computed_here() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "a", 10)
    add(scheduler, "b", 5)
    add(scheduler, "c", 20, remote=True)
    assert scheduler.statistics().waiting_prefill_tokens == 10 + 5 + 1
    step(scheduler)
    assert scheduler.statistics().waiting_prefill_tokens == 6 + 5 + 1
    for _ in range(4):
        step(scheduler)
    assert scheduler.statistics().waiting_prefill_tokens == 1


def _computed(scheduler: object, name: str, length: int) -> TokenSequence:
    sequence = add(scheduler, name, length, start=0)  # type: ignore[arg-type]
    step(scheduler)  # type: ignore[arg-type]
    return sequence


def test_who_has_the_higher_priority_is_admitted_first_and_preempted_last() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8, max_num_seqs=3)
    low, high = add(scheduler, "low", 8, priority=1), add(scheduler, "high", 8, priority=-1)
    assert shape(step(scheduler)) == [("high", 0, 8)]
    step(scheduler)
    assert (low.state, high.state) == (State.RUNNING, State.RUNNING)
    preempted = []
    for _ in range(9):
        preempted += step(scheduler).preempted
    assert preempted == [low], "the older one, but less urgent"


def test_a_prompt_to_be_scored_takes_nothing_from_the_cache() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "first", 9, start=0)
    step(scheduler)
    scheduler.finish(first)
    scored = add(scheduler, "scored", 9, start=0)
    scored.scores_prompt = True
    (chunk,) = step(scheduler).plan.chunks  # type: ignore[union-attr]
    assert (chunk.first_token, chunk.all_logits, chunk.num_rows) == (0, True, 9)
    scheduler.finish(scored)
    assert shape(step_of(scheduler, add(scheduler, "plain", 9, start=0))) == [("plain", 8, 1)]


def step_of(scheduler: Scheduler, sequence: TokenSequence) -> Schedule:
    schedule = step(scheduler)
    assert sequence.state is State.RUNNING
    return schedule
