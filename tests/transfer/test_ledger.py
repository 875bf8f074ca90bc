"""Once in, once out, each end told once."""

from __future__ import annotations

import pytest

from tests.transfer.harness import new_id
from tollbridge.errors import TransferError
from tollbridge.transfer.base import TransferEnd
from tollbridge.transfer.frames import HEADER_BYTES
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.tally import Tally, Verdict


def end_of(transfer_id: str, verdict: Verdict, tally: Tally | None = None) -> TransferEnd:
    return (tally or Tally()).report(transfer_id, "receive", verdict, num_tokens=7, now_s=10.0)


def test_a_life() -> None:
    ledger, told = Ledger("tcp"), list[int]()
    ledger.set_listener(lambda: told.append(1))
    transfer_id = new_id()
    ledger.begin(transfer_id)
    assert ledger.active() == {transfer_id}
    assert ledger.statistics(1).active == 1
    end = end_of(transfer_id, Verdict("done"))
    ledger.end(end)
    assert told == [1]
    assert ledger.active() == frozenset()
    with pytest.raises(TransferError, match="already active"):
        ledger.begin(transfer_id)  # the engine has not heard of the end
    assert (ledger.poll(), ledger.poll()) == ([end], [])
    ledger.begin(transfer_id)
    ledger.check()


def test_nothing_ends_twice_or_without_having_begun() -> None:
    ledger, transfer_id = Ledger("tcp"), new_id()
    end = end_of(transfer_id, Verdict("failed", "checksum"))
    with pytest.raises(AssertionError, match="without being active"):
        ledger.end(end)
    ledger.begin(transfer_id)
    ledger.end(end)
    with pytest.raises(AssertionError, match="ended twice"):
        ledger.end(end)
    assert ledger.statistics(0).failures_by_reason == {"checksum": 1}


def test_closed() -> None:
    ledger = Ledger("tcp")
    ledger.close()
    with pytest.raises(TransferError, match="this medium is closed"):
        ledger.begin(new_id())


def test_what_a_tally_reports() -> None:
    tally = Tally(opened_s=1.0)
    tally.control(20)
    tally.frame(1000)
    tally.moved(3.0)
    tally.frame(500)
    tally.moved(4.0)
    end = end_of("0f" * 16, Verdict("done"), tally)
    assert (end.wait_s, end.wire_s, end.total_s) == (2.0, 1.0, 9.0)
    assert (end.payload_bytes, end.num_frames, end.num_tokens) == (1500, 2, 7)
    assert end.wire_bytes == 1500 + 3 * HEADER_BYTES + 20
    assert end_of("0f" * 16, Verdict("failed", "stalled"), tally).num_tokens == 0


def test_goodput_is_of_the_last_transfers() -> None:
    ledger, transfer_id = Ledger("tcp"), new_id()
    assert ledger.statistics(0).goodput_bytes_per_s == 0
    tally = Tally(opened_s=1.0, first_byte_s=2.0, last_byte_s=4.0, payload_bytes=1000, num_frames=1)
    ledger.begin(transfer_id)
    ledger.end(end_of(transfer_id, Verdict("done"), tally))
    assert ledger.statistics(0).goodput_bytes_per_s == 500
