"""The load of one worker: reports and what happened since, against what is really there."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tollbridge.router.load import Load, Report, Transfer, Work

TOLD = Report(
    kv_bytes_per_token=10.0,
    num_running=3,
    num_waiting=2,
    waiting_prefill_tokens=1000,
    free_kv_tokens=5000,
    num_sending=2,
    sending_bytes=900.0,
    num_receiving=0,
)


def told(report: Report = TOLD, asked_s: float = 10.0) -> Load:
    load = Load()
    load.told(report, asked_s)
    return load


def test_a_worker_that_said_nothing_has_what_we_sent() -> None:
    load = Load()
    load.begin(Work(prefill_tokens=100, kv_tokens=120, sent_s=1.0))
    load.begin(Work(prefill_tokens=50, num_streams=0, sent_s=1.0))
    now = load.figures()
    assert (now.waiting_prefill_tokens, now.num_running, now.free_kv_tokens) == (150, 2, None)
    assert (now.num_sending, now.num_receiving) == (0, 0)


def test_what_others_sent_is_in_the_report() -> None:
    now = told().figures()
    assert (now.waiting_prefill_tokens, now.num_running, now.free_kv_tokens) == (1000, 3, 5000)
    assert (now.num_sending, now.sending_bytes) == (2, 900.0)


def test_a_later_request_is_added_and_leaves_again() -> None:
    load = told()
    work = Work(prefill_tokens=200, kv_tokens=300, sent_s=10.5)
    load.begin(work)
    assert load.figures().waiting_prefill_tokens == 1200
    assert (load.figures().num_running, load.figures().free_kv_tokens) == (4, 4700)
    load.prefilled(work)
    load.prefilled(work)
    assert load.figures().waiting_prefill_tokens == 1000
    load.end(work)
    assert (load.figures().num_running, load.figures().free_kv_tokens) == (3, 5000)


def test_an_earlier_request_is_taken_off_when_it_ends() -> None:
    load = Load()
    work = Work(prefill_tokens=200, kv_tokens=300, sent_s=9.0)
    load.begin(work)
    load.told(msgspec.structs.replace(TOLD, total_kv_tokens=5200), 10.0)
    assert load.figures().waiting_prefill_tokens == 1000
    load.prefilled(work)
    assert load.figures().waiting_prefill_tokens == 800
    load.end(work)
    assert (load.figures().num_running, load.figures().free_kv_tokens) == (2, 5200), "no more than there is"
    load.told(TOLD, 11.0)  # the next report has it all
    assert (load.figures().waiting_prefill_tokens, load.figures().num_running) == (1000, 3)


def test_what_waited_when_the_worker_spoke_and_has_its_first_token_since_is_a_stream() -> None:
    load = Load()
    works = [Work(prefill_tokens=10, sent_s=9.0) for _ in range(5)]
    for work in works:
        load.begin(work)
    load.told(msgspec.structs.replace(TOLD, num_running=1, num_waiting=4), 10.0)
    assert load.figures().num_running == 1
    for work in works[:3]:
        load.prefilled(work)
    assert load.figures().num_running == 3
    load.end(works[0])
    assert load.figures().num_running == 2


def test_a_prefill_leg_hides_no_stream() -> None:
    """Sent before the report or after it: what runs, less the legs of this router, is what decodes."""
    load, leg = Load(), Work(prefill_tokens=10, num_streams=0, sent_s=10.5)
    load.told(Report(num_running=1), 10.0)
    load.begin(leg)
    assert load.figures().num_running - 1 == 1
    load.told(Report(num_running=2), 11.0)
    assert load.figures().num_running - 1 == 1
    load.end(leg)
    assert load.figures().num_running == 1, "the report still has the leg"


def test_a_stream_of_ours_counts_beside_legs_that_only_waited() -> None:
    load, stream = Load(), Work(sent_s=9.0)
    legs = [Work(prefill_tokens=10, num_streams=0, sent_s=9.0) for _ in range(3)]
    for work in (stream, *legs):
        load.begin(work)
    load.prefilled(stream)
    load.told(Report(num_running=1, num_waiting=3), 10.0)
    assert load.figures().num_running - len(legs) == 1


def test_several_choices_are_several_streams() -> None:
    load, work = told(), Work(num_streams=4, sent_s=10.5)
    load.begin(work)
    assert (load.figures().num_running, load.num_streams) == (7, 0)
    load.prefilled(work)
    assert load.num_streams == 4
    load.told(msgspec.structs.replace(TOLD, num_running=7), 11.0)
    load.end(work)
    assert (load.figures().num_running, load.num_streams) == (3, 0)


def test_figures_are_never_negative() -> None:
    load = Load()
    work = Work(prefill_tokens=5000, sent_s=9.0)
    load.begin(work)
    load.told(msgspec.structs.replace(TOLD, num_running=0), 10.0)
    load.end(work)
    load.begin(Work(kv_tokens=9999, sent_s=11.0))
    now = load.figures()
    assert (now.waiting_prefill_tokens, now.num_running, now.free_kv_tokens) == (0, 1, 0)


def test_a_worker_that_does_not_say_how_much_waits() -> None:
    """vLLM: ours is known; of the two that wait one is ours, the other is a mean prompt."""
    load = Load()
    load.begin(Work(prefill_tokens=300, sent_s=9.0))
    load.told(Report(num_waiting=2, mean_prompt_tokens=80.0), 10.0)
    assert load.figures().waiting_prefill_tokens == 380
    load.begin(Work(prefill_tokens=7, sent_s=11.0))
    assert load.figures().waiting_prefill_tokens == 387


@pytest.mark.parametrize("outward", [True, False])
def test_transfers(outward: bool) -> None:
    report = Report(kv_bytes_per_token=10.0, num_sending=2, sending_bytes=900.0, num_receiving=2, receiving_bytes=900.0)

    def now() -> tuple[int, float]:
        figures = load.figures()
        return (
            (figures.num_sending, figures.sending_bytes)
            if outward
            else (figures.num_receiving, figures.receiving_bytes)
        )

    load = Load()
    early, late = Transfer(num_tokens=30, sent_s=9.0), Transfer(num_tokens=20, sent_s=11.0)
    load.begin_transfer(early, outward=outward)
    assert now() == (1, 0.0), "bytes need a report"
    load.told(report, 10.0)
    assert now() == (2, 900.0)
    load.begin_transfer(late, outward=outward)
    assert now() == (3, 1100.0)
    load.end_transfer(early, outward=outward)
    assert now() == (2, 800.0)
    load.end_transfer(late, outward=outward)
    assert now() == (1, 600.0)


def test_ours_count_even_when_the_worker_has_not_opened_them() -> None:
    load = Load()
    load.begin_transfer(Transfer(num_tokens=30, sent_s=9.0), outward=True)
    load.told(Report(num_sending=0), 10.0)
    assert load.figures().num_sending == 1


class Worlds(RuleBasedStateMachine):
    """A worker that two routers share: right after a report with nothing in between, both see the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.loads = [Load(), Load()]
        self.works: list[tuple[Load, Work]] = []

    def tick(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def truth(self) -> tuple[int, int]:
        waiting = sum(work.prefill_tokens for _, work in self.works if not work.prefilled)
        return waiting, sum(work.num_streams or 1 for _, work in self.works)

    @rule(router=st.integers(0, 1), tokens=st.integers(0, 1000), num_streams=st.integers(0, 3))
    def send(self, router: int, tokens: int, num_streams: int) -> None:
        work = Work(prefill_tokens=tokens, num_streams=num_streams, sent_s=self.tick())
        self.loads[router].begin(work)
        self.works.append((self.loads[router], work))

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        load, work = data.draw(st.sampled_from(self.works))
        load.prefilled(work)

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        load, work = self.works.pop(data.draw(st.integers(0, len(self.works) - 1)))
        load.end(work)

    @rule()
    def report(self) -> None:
        waiting, running = self.truth()
        at_s = self.tick()
        for load in self.loads:
            load.told(Report(num_running=running, waiting_prefill_tokens=waiting), at_s)
            assert (load.figures().waiting_prefill_tokens, load.figures().num_running) == (waiting, running)

    @invariant()
    def holds(self) -> None:
        for load in self.loads:
            load.check()


TestWorlds = Worlds.TestCase
TestWorlds.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_it_is_settled_when_another_report_would_say_the_same() -> None:
    load, work = Load(), Work(prefill_tokens=5, kv_tokens=5, sent_s=1.0)
    assert load.is_settled
    load.begin(work)
    assert not load.is_settled
    load.told(Report(num_running=1), 2.0)
    load.end(work)
    assert not load.is_settled  # the report still counts it
    load.told(Report(), 3.0)
    assert load.is_settled
