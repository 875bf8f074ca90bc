"""The medium in a process of its own: what the contract suite cannot see, because it is about the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.fake_device import DeviceMemory, FakeCopier, FakeDevice
from tests.transfer.harness import DIGEST, FINGERPRINT, WAIT_S, Cache, Pair, make_pair, new_id
from tollbridge.errors import ConfigError, StartupError, TransferError
from tollbridge.transfer.base import Reason
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.outboard import OutboardReceiver, OutboardSender, make_receiver, make_sender
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

TABLE = list(range(8))


@pytest.fixture(params=["process", "remote"])  # the I/O process has the cache, or a ring beside it
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = make_pair(request.param)
    yield made
    made.receiver.close()
    made.sender.close()
    for device in devices_of(made):
        device.close()


def devices_of(pair: Pair) -> list[FakeDevice]:
    memories = (pair.send_cache.memory, pair.receive_cache.memory)
    return [memory.device for memory in memories if isinstance(memory, DeviceMemory)]


def sender_of(pair: Pair) -> OutboardSender:
    assert isinstance(pair.sender, OutboardSender)
    return pair.sender


def test_when_the_io_process_dies_its_transfers_fail_and_the_medium_is_closed(pair: Pair) -> None:
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    os.kill(sender_of(pair).outboard.pid, signal.SIGKILL)
    end = pair.sent.wait(transfer_id)
    assert (end.outcome, end.reason, end.side) == ("failed", Reason.IO_LOST, "send")
    assert "exit status -9" in end.detail
    with pytest.raises(TransferError, match="closed"):
        pair.sender.register(new_id(), digest=DIGEST, num_tokens=100)
    pair.sender.rewind(transfer_id)  # returns: nobody reads
    assert pair.sender.statistics().num_connections == 0
    pair.sender.check()


@pytest.mark.parametrize("side", [0, 1])
def test_when_the_device_fails_the_transfers_of_that_side_fail(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("remote")

    def fail(work: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(devices_of(pair)[side], "copy", fail)
    monkeypatch.setattr(FakeCopier, "close", fail)  # a device that has failed says so again and again
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    pair.sender.publish(transfer_id, TABLE, 100)
    ends = pair.ends(transfer_id)
    assert [end.outcome for end in ends] == ["failed", "failed"]
    assert (ends[side].reason, ends[1 - side].reason) == (Reason.IO_LOST, Reason.PEER_LOST)
    for each in (pair.receiver, pair.sender):
        each.close()
    for device in devices_of(pair):
        device.close()


def test_a_ring_that_is_too_small_is_refused() -> None:
    device = FakeDevice()
    cache = Cache(8, 16, seed=1, device=device)
    with pytest.raises(ConfigError, match="needs 4: raise"):
        OutboardSender(cache.memory, FINGERPRINT, TransferOptions(ring_bytes=4096))
    device.close()


def test_decode_hears_that_prefills_io_process_died(pair: Pair) -> None:
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    deadline_s = time.monotonic() + WAIT_S
    while pair.sender.statistics().num_connections == 0 and time.monotonic() < deadline_s:
        pair.received.collect()
    os.kill(sender_of(pair).outboard.pid, signal.SIGKILL)
    assert pair.received.wait(transfer_id).reason == Reason.PEER_LOST


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_is_the_engines_to_obey(pair: Pair, number: signal.Signals) -> None:
    os.kill(sender_of(pair).outboard.pid, number)
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    pair.sender.publish(transfer_id, TABLE, 100)
    assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]


def test_the_io_process_ends_with_its_engine(tmp_path: Path) -> None:
    code = (
        "import os, sys; from tests.transfer.harness import make_pair; pair = make_pair('process');"
        "print(pair.sender.outboard.pid, pair.receiver.outboard.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, check=False, text=True)
    deadline_s = time.monotonic() + WAIT_S
    for pid in map(int, done.stdout.split()):
        while _is_running(pid):
            assert time.monotonic() < deadline_s, f"the I/O process {pid} outlived its engine"
    assert len(done.stdout.split()) == 2


def test_what_the_medium_refuses_is_refused_here(pair: Pair) -> None:
    cache = Cache(8, 16, seed=1)
    with pytest.raises(ConfigError, match="TOLLBRIDGE_SECRET"):
        OutboardSender(cache.memory, FINGERPRINT, TransferOptions(bind_host="0.0.0.0"))
    with pytest.raises(StartupError, match="cannot be bound"):
        OutboardSender(cache.memory, FINGERPRINT, TransferOptions(bind_port=pair.sender.address[1]))


def test_closing_ends_what_is_active_and_the_process(pair: Pair) -> None:
    transfer_id, pid = new_id(), sender_of(pair).outboard.pid
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.sender.close()
    assert (end := pair.sent.wait(transfer_id)).outcome == "cancelled" and end.reason == Reason.SHUTDOWN
    assert not _is_running(pid)
    pair.sender.close()


def test_a_process_is_chosen_where_memory_can_be_shared() -> None:
    shared, own = Cache(8, 16, seed=1), Cache(8, 16, seed=1)
    own.memory.shared_fd = None
    kinds = {
        (memory is shared.memory, io): _kinds(memory, TransferOptions(io=io))
        for memory in (shared.memory, own.memory)
        for io in ("auto", "threads")
    }
    assert kinds[True, "auto"] == (OutboardSender, OutboardReceiver)
    assert {kinds[True, "threads"], kinds[False, "auto"], kinds[False, "threads"]} == {(TcpSender, TcpReceiver)}
    with pytest.raises(ConfigError, match="can be shared"):
        make_sender(own.memory, FINGERPRINT, TransferOptions(io="process"))


def _kinds(memory: object, options: TransferOptions) -> tuple[type, type]:
    sides = make_sender(memory, FINGERPRINT, options), make_receiver(memory, FINGERPRINT, options)  # type: ignore[arg-type]
    for side in sides:
        side.close()
    return type(sides[0]), type(sides[1])


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
