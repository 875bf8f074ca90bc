"""Tasks behind fences: in order, none after `forget`, none after `close`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.transfer.fake_device import FakeDevice
from tests.transfer.harness import WAIT_S
from tollbridge.transfer.gate import Gate
from tollbridge.transfer.stage import PASSED

A, B = b"a" * 16, b"b" * 16


class Rig:
    def __init__(self) -> None:
        self.device = FakeDevice()
        self.posted: list[str] = []
        self.gate = Gate(lambda task: task(), name="gate")
        self.told = threading.Event()

    def after(self, key: bytes, what: str) -> None:
        self.gate.after(key, self.device.issue(), lambda: self.posted.append(what))

    def finish(self) -> list[str]:
        """Let the device go on, and return what was posted when all has been."""
        self.gate.after(b"last", self.device.issue(), self.told.set)
        self.device.resume()
        assert self.told.wait(WAIT_S)
        return self.posted


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.device.close()
    rig.gate.close()


def test_what_has_passed_needs_no_thread(rig: Rig) -> None:
    before = set(threading.enumerate())
    rig.gate.after(A, PASSED, lambda: rig.posted.append("at once"))
    assert rig.posted == ["at once"]
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile


def test_order(rig: Rig) -> None:
    rig.device.hold()
    for number in range(20):
        rig.after(A if number % 2 else B, str(number))
    rig.gate.after(A, PASSED, lambda: rig.posted.append("behind the others"))
    assert rig.posted == []
    assert rig.finish() == [*map(str, range(20)), "behind the others"]


def test_forget(rig: Rig) -> None:
    rig.device.hold()
    rig.after(A, "first of a")
    rig.after(B, "b")
    rig.after(A, "second of a")
    assert rig.device.held_up.wait(WAIT_S)  # the gate is waiting for the first one already
    rig.gate.forget(A)
    rig.after(A, "third of a")
    assert rig.finish() == ["b", "third of a"]


def test_close_drops_the_rest(rig: Rig) -> None:
    rig.device.hold()
    rig.after(A, "never")
    assert rig.device.held_up.wait(WAIT_S)
    closing = threading.Thread(target=rig.gate.close)
    closing.start()
    rig.device.resume()
    closing.join(WAIT_S)
    rig.after(A, "never either")
    rig.gate.close()
    assert "never either" not in rig.posted or rig.posted == ["never either"]


def test_a_device_that_fails(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def done(self) -> bool:
            return False

        def wait(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    rig.gate.after(A, Broken(), lambda: rig.posted.append("never"))
    assert rig.gate._thread is not None
    rig.gate._thread.join(WAIT_S)
    assert rig.posted == []
    assert "The device failed" in caplog.text
