"""What a worker waits for before it is told to stop."""

from __future__ import annotations

import pytest

from tollbridge.deploy.drain import busy, drain

IDLE = '# HELP x\nvllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
PINNED = IDLE + "vllm:tollbridge_pinned_blocks 3.0\nvllm:tollbridge_max_pinned_blocks 64.0\n"


class Worker:
    """Metrics in turn, and a clock that moves when somebody sleeps."""

    def __init__(self, *metrics: str) -> None:
        self.metrics, self.now_s, self.reads = list(metrics), 0.0, 0

    def read(self) -> str:
        self.reads += 1
        return self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]

    def drain(self, handoff_s: float = 60) -> bool:
        return drain(self.read, propagation_s=5, handoff_s=handoff_s, sleep=self.sleep, now=lambda: self.now_s)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_the_bound_is_not_counted() -> None:
    assert busy(PINNED) == 3
    assert busy(IDLE) == 0


def test_routers_get_time_to_let_go_first() -> None:
    worker = Worker(IDLE)
    assert worker.drain()
    assert 5 < worker.now_s < 8


def test_kv_that_decode_has_still_to_fetch_is_waited_for() -> None:
    worker = Worker(*[PINNED] * 20, IDLE)
    assert worker.drain()
    assert worker.reads > 20


def test_a_request_between_two_queues_does_not_count_as_idle() -> None:
    assert Worker(IDLE, IDLE, PINNED, IDLE).drain()


def test_it_ends_at_the_deadline() -> None:
    worker = Worker(PINNED)
    assert not worker.drain(handoff_s=30)
    assert 35 <= worker.now_s < 37


@pytest.mark.parametrize("answer", ["", "nothing about requests 1\n"])
def test_a_worker_that_does_not_say_is_not_kept_alive(answer: str) -> None:
    worker = Worker(answer)
    assert not worker.drain()
    assert worker.now_s == 5


def test_a_worker_that_is_gone_is_not_kept_alive() -> None:
    def read() -> str:
        raise ConnectionRefusedError

    assert not drain(read, propagation_s=0, handoff_s=60, sleep=lambda _: None)
