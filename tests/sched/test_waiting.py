from __future__ import annotations

from tests.sched.build import make_sequence
from tollbridge.sched.sequence import TokenSequence
from tollbridge.sched.waiting import MAX_OVERTAKES, MAX_PASSED, WaitingQueues


def queues_of(*names: str) -> WaitingQueues:
    """Names that start with r are remote."""
    queues = WaitingQueues()
    for order, name in enumerate(names):
        sequence = make_sequence(name, [1], remote=name.startswith("r"))
        sequence.order = order
        queues.push(sequence)
    return queues


def place(queues: WaitingQueues, *fitting: str) -> list[str]:
    placed: list[str] = []

    def try_place(sequence: TokenSequence) -> bool:
        if sequence.request_id not in fitting:
            return False
        placed.append(sequence.request_id)
        return True

    queues.place(try_place)
    queues.check()
    return placed


def test_order_of_arrival_across_both_queues() -> None:
    queues = queues_of("l0", "r1", "r2", "l3")
    assert len(queues) == 4
    assert place(queues, "l0", "r1", "r2", "l3") == ["l0", "r1", "r2", "l3"]
    assert len(queues) == 0 and list(queues) == []


def test_each_queue_is_first_come_first_served() -> None:
    assert place(queues_of("l0", "l1"), "l1") == []
    assert place(queues_of("r0", "r1"), "r1") == []


def test_a_blocked_head_lets_the_other_queue_pass() -> None:
    assert place(queues_of("r0", "l1", "r2", "l3"), "l1", "r2", "l3") == ["l1", "l3"]
    assert place(queues_of("l0", "r1", "l2", "r3"), "r1", "l2", "r3") == ["r1", "r3"]


def test_it_is_passed_a_bounded_number_of_times() -> None:
    names = ["r0", *(f"l{i}" for i in range(MAX_OVERTAKES + 5))]
    queues = queues_of(*names)
    placed = []
    for name in names[1:]:
        placed += place(queues, name)
    assert placed == names[1 : MAX_OVERTAKES + 1]
    assert place(queues, *names) == ["r0", *names[MAX_OVERTAKES + 1 :]]


def test_being_served_first_by_age_is_not_passing() -> None:
    queues = queues_of("l0", "l1", "r2")
    assert place(queues, "l0", "l1") == ["l0", "l1"]
    (remote,) = queues
    assert remote.num_overtakes == 0


def test_who_comes_back_goes_before_later_ones() -> None:
    queues = queues_of("l0", "l1", "l2")
    first = next(iter(queues))
    first.num_overtakes = 3
    queues.remove(first)
    queues.push(first)
    assert [sequence.request_id for sequence in queues] == ["l0", "l1", "l2"]
    assert first.num_overtakes == 0


def push(queues: WaitingQueues, name: str, order: int, priority: int) -> TokenSequence:
    sequence = make_sequence(name, [1], priority=priority)
    sequence.order = order
    queues.push(sequence)
    return sequence


def test_priority_goes_before_arrival() -> None:
    queues = WaitingQueues()
    for order, priority in enumerate([0, 5, -1, 0]):
        push(queues, f"{priority}/{order}", order, priority)
    assert place(queues, "0/0", "5/1", "-1/2", "0/3") == ["-1/2", "0/0", "0/3", "5/1"]


def test_a_low_priority_is_late_not_never() -> None:
    queues, served = WaitingQueues(), 0
    push(queues, "patient", 0, 9)
    while True:
        name = f"urgent{served}"
        push(queues, name, served + 1, 0)
        if "patient" in place(queues, name):  # it would not fit: nobody else may go either
            raise AssertionError
        if len(queues) == 2:
            break
        served += 1
    assert served == MAX_PASSED
    assert place(queues, "patient", f"urgent{served}") == ["patient", f"urgent{served}"]


def test_the_older_ones_of_a_queue_do_not_count_each_other() -> None:
    queues = WaitingQueues()
    old, young = push(queues, "old", 0, 0), push(queues, "young", 1, 3)
    assert place(queues, "old") == ["old"]
    assert (old.num_passed, young.num_passed) == (0, 0)
