"""The medium in a process of its own: what the contract suite cannot see, because it is about the process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.transfer.fake_device import DeviceMemory, FakeCopier, FakeDevice
from tests.transfer.harness import DIGEST, FINGERPRINT, WAIT_S, Cache, Pair, make_pair, new_id
from tollbridge.errors import ConfigError, StartupError, TransferError
from tollbridge.transfer import lent, outboard
from tollbridge.transfer.base import Reason
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.orders import Abandon
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


def rewound(pair: Pair, transfer_id: str) -> None:
    pair.sender.rewind(transfer_id)


def filled(pair: Pair, transfer_id: str) -> None:
    """Say more than the pipe holds."""
    for _ in range(2000):
        sender_of(pair).outboard.tell(Abandon(new_id(), "x" * 1000))


@pytest.mark.parametrize("medium", ["process", "remote"])
@pytest.mark.parametrize(("do", "what"), [(rewound, "gave no answer"), (filled, "took no order")])
def test_an_io_process_that_is_stopped_does_not_stop_the_engine(
    medium: str,
    do: Callable[[Pair, str], None],
    what: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outboard.Outboard, "_watch", lambda self: None)  # it may ask first, and be told nothing
    pair, transfer_id = make_pair(medium, TransferOptions(answer_timeout_s=0.4)), new_id()
    pid = sender_of(pair).outboard.pid
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    os.kill(pid, signal.SIGSTOP)
    do(pair, transfer_id)
    end = pair.sent.wait(transfer_id)
    assert (end.outcome, end.reason) == ("failed", Reason.IO_LOST)
    assert f"{what} for 0.4 s and was ended" in end.detail
    assert "restart the worker" in caplog.text
    assert not _is_running(pid)
    with pytest.raises(TransferError, match="closed"):  # so the engine serves locally from now on
        pair.sender.register(new_id(), digest=DIGEST, num_tokens=100)
    pair.close()


def test_a_load_ends_when_the_io_process_is_stopped_and_nobody_asks(pair: Pair) -> None:
    transfer_id = new_id()
    side = OutboardReceiver(pair.receive_cache.memory, FINGERPRINT, TransferOptions(answer_timeout_s=0.4))
    ended = threading.Event()
    side.set_listener(ended.set)
    os.kill(side.outboard.pid, signal.SIGSTOP)
    side.open(pair.load(transfer_id, TABLE, 100))
    assert ended.wait(WAIT_S)
    (end,) = side.poll()
    assert (end.outcome, end.reason, end.side) == ("failed", Reason.IO_LOST, "receive")
    side.close()


def test_an_io_process_that_was_paused_with_its_engine_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one part of the deadline passes while nobody runs; here each part passes at once but the last."""
    pair, transfer_id = make_pair("process"), new_id()
    answers, parts = sender_of(pair).outboard._answers, list[float]()

    class Paused:
        def get(self, timeout: float) -> object:
            parts.append(timeout)
            return answers.get(timeout=0 if len(parts) < 2 else timeout)

        put = answers.put

    monkeypatch.setattr(sender_of(pair).outboard, "_answers", Paused())
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.sender.rewind(transfer_id)
    assert sum(parts) < TransferOptions().answer_timeout_s
    assert pair.sender.statistics().active == 1
    pair.close()


def _refuse(*_: object, **__: object) -> None:
    raise OSError("The ring of 4096 bytes could not be pinned (CUDA error 2).")


def test_a_ring_that_cannot_be_pinned_leaves_the_kv_to_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    memory = Cache(64, 16, seed=1, device=device).memory
    monkeypatch.setattr(lent.LentRing, "__init__", _refuse)
    with caplog.at_level(logging.WARNING, logger="tollbridge"):
        made = (
            make_sender(memory, FINGERPRINT, TransferOptions()),
            make_receiver(memory, FINGERPRINT, TransferOptions()),
        )
    assert (type(made[0]), type(made[1])) == (TcpSender, TcpReceiver)
    assert [side.statistics().io for side in made] == ["threads", "threads"]
    assert caplog.text.count("could not be pinned (CUDA error 2)") == 2
    for make in (make_sender, make_receiver):
        with pytest.raises(StartupError, match=r"CUDA error 2.*set transfer.io to auto or threads"):
            make(memory, FINGERPRINT, TransferOptions(io="process"))
    for side in made:
        side.close()
    device.close()


@pytest.mark.parametrize("make", [OutboardSender, OutboardReceiver])
def test_nothing_is_left_of_a_start_without_a_process(make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    cache = Cache(64, 16, seed=1, device=device)
    gc.collect()
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(outboard.subprocess, "Popen", _refuse)
    with pytest.raises(OSError, match="could not be pinned"):
        make(cache.memory, FINGERPRINT, TransferOptions())
    gc.collect()  # the ring goes with its last view
    assert set(threading.enumerate()) <= before[0] and len(os.listdir("/proc/self/fd")) <= before[1]
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
