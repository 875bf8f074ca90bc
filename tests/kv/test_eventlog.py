from __future__ import annotations

from tollbridge.kv.eventlog import EventLog
from tollbridge.wire.events import AllBlocksCleared, BlockRemoved


def removed(value: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[value])


def test_take_returns_events_once_in_order() -> None:
    log = EventLog()
    log.append(removed(1))
    log.append(removed(2))
    assert log.take() == [removed(1), removed(2)]
    assert log.take() == []


def test_beyond_the_bound_the_past_becomes_one_clear() -> None:
    log = EventLog(capacity=3)
    for value in range(4):
        log.append(removed(value))
    assert log.num_overflows == 1
    assert log.take() == [AllBlocksCleared(), removed(3)]
