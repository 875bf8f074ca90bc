"""No worker waits for another for ever: two-sided traffic on small caches, without any deadline."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.sched.build import BLOCK_SIZE
from tests.sched.cluster import Cluster

NUM_BLOCKS = 8
MAX_TOKENS = 6


class TwoSided(RuleBasedStateMachine):
    """Legs arrive in any order, steps and messages interleave in any order; in the end everything must end."""

    @initialize(num_workers=st.integers(1, 3), fraction=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def start(self, num_workers: int, fraction: float) -> None:
        self.cluster = Cluster(num_workers, NUM_BLOCKS, max_pinned_fraction=fraction)
        self.legs: list[object] = []
        self.count = 0

    @rule(
        data=st.data(),
        length=st.integers(1, NUM_BLOCKS * BLOCK_SIZE - MAX_TOKENS + 1),
        max_tokens=st.integers(1, MAX_TOKENS),
        fresh=st.booleans(),
        role=st.sampled_from(["split", "split", "split", "local"]),
    )
    def arrive(self, data: st.DataObject, length: int, max_tokens: int, fresh: bool, role: str) -> None:
        workers = st.integers(0, len(self.cluster.workers) - 1)
        self.count += 1
        start = 1000 * self.count if fresh else 0  # otherwise it shares its prefix with others
        prompt = list(range(start, start + length))
        if role == "local":
            self.cluster.local(data.draw(workers), prompt, max_tokens)
        else:
            self.legs += self.cluster.split(data.draw(workers), data.draw(workers), prompt, max_tokens)

    @precondition(lambda self: self.legs)
    @rule(index=st.integers(0, 100))
    def send_leg(self, index: int) -> None:
        self.legs.pop(index % len(self.legs))()  # type: ignore[operator]

    @rule(number=st.integers(0, 2))
    def step(self, number: int) -> None:
        self.cluster.step(number % len(self.cluster.workers))

    @precondition(lambda self: self.cluster.messages)
    @rule(index=st.integers(0, 100))
    def deliver(self, index: int) -> None:
        self.cluster.deliver(index)

    @precondition(lambda self: self.cluster.transfers)
    @rule(index=st.integers(0, 100))
    def ship(self, index: int) -> None:
        self.cluster.ship(self.cluster.transfers[index % len(self.cluster.transfers)])

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for leg in self.legs:
            leg()  # type: ignore[operator]
        self.cluster.settle()


TwoSided.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTwoSided = TwoSided.TestCase


def inverted(**rules: bool) -> Cluster:
    """Prefill is full of finished sends that decode has no room to open; decode is full of loads whose prefill waits.

    Six splits of three blocks each on workers of eight: prefill gets them in one order, decode in the other.
    """
    cluster = Cluster(2, NUM_BLOCKS, **rules)
    prompts = [list(range(1000 * n, 1000 * n + 3 * BLOCK_SIZE)) for n in range(6)]
    legs = [cluster.split(0, 1, prompt, 2) for prompt in prompts]
    for prefill, _ in legs:
        prefill()
    for _, decode in reversed(legs):
        decode()
    for _ in range(10):
        cluster.step(0)
        cluster.step(1)
    return cluster


def test_inverted_order_is_a_deadlock_without_the_rules() -> None:
    """What today's rules mend; only a deadline would end it."""
    cluster = inverted(bounded=False, sheds=False)
    assert cluster.workers[0].scheduler.statistics().num_pinned == 2
    assert cluster.workers[1].scheduler.statistics().num_parked == 2
    with pytest.raises(AssertionError, match="deadlock"):
        cluster.settle()


@pytest.mark.parametrize("rules", [{"bounded": False}, {"sheds": False}, {}], ids=["starved", "bound", "both"])
def test_inverted_order_ends(rules: dict[str, bool]) -> None:
    inverted(**rules).settle()


def test_loads_that_wait_for_pinned_blocks_on_both_workers() -> None:
    """Each holds sends for the other one's loads, which find no room: nobody is awaited, and still nobody must wait."""
    cluster = Cluster(2, NUM_BLOCKS, max_pinned_fraction=1.0)
    legs = [cluster.split(n, 1 - n, list(range(1000 * n, 1000 * n + 7 * BLOCK_SIZE)), 2) for n in range(2)]
    for prefill, _ in legs:
        prefill()
    for _ in range(10):
        cluster.step(0)
        cluster.step(1)
    assert [worker.scheduler.statistics().num_pinned_blocks for worker in cluster.workers] == [7, 7]
    for _, decode in legs:
        decode()
    cluster.settle()
