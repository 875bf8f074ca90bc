"""A ring in shared memory, for two workers of one host: prefill copies into it, decode out of it.

Decode makes a file of random name in /dev/shm, readable and writable for its user alone, and names it under the MACs of
the handshake. Prefill opens and maps it; then decode removes the name, so that nobody finds it later and nothing is
left behind when both are killed. That prefill could open it is what shows that the two share a host: containers of one
host usually do not share /dev/shm.

A payload is copied twice, from the cache and into it, in one call each that releases the GIL (rows.py). A slot is small
enough to stay in a CPU's cache between the two.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_intdigest

from tollbridge.errors import TransferError
from tollbridge.transfer.messages import Ring
from tollbridge.transfer.placed import Credits, Slots
from tollbridge.transfer.stage import Parcel

SHM = "shm"
FOLDER = Path("/dev/shm")  # noqa: S108 - a folder for all users; the file in it is for one
NUM_SLOTS = 4
SLOT_BYTES = 2 * 1024 * 1024

_PREFIX = "tollbridge-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class ShmInlet:
    """Implements placed.Inlet. TransferError when this machine has no shared memory to give."""

    medium = SHM

    def __init__(self, *, granule_bytes: int) -> None:
        self._slot_bytes = max(SLOT_BYTES, granule_bytes)
        self._path = FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
        size = NUM_SLOTS * self._slot_bytes
        try:
            memory = _make(self._path, size)
        except OSError as error:
            self._remove()
            raise TransferError(f"No ring of {size >> 20} MiB could be made in {FOLDER} ({error}).") from None
        self._slots = Slots(memoryview(memory), num_slots=NUM_SLOTS, slot_bytes=self._slot_bytes)
        self.payload = self._slots.payload
        self.advance = self._slots.advance

    def ring(self) -> Ring:
        return Ring(medium=SHM, name=self._path.name, num_slots=NUM_SLOTS, slot_bytes=self._slot_bytes)

    def taken(self) -> None:
        self._remove()

    def close(self) -> None:
        self._slots.close()
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


class ShmOutlet:
    """Implements placed.Outlet. TransferError when the ring is not on this host, or not what it was said to be."""

    medium = SHM

    def __init__(self, ring: Ring) -> None:
        if not _NAME.fullmatch(ring.name):
            raise TransferError("The peer named a file that is no ring of ours.")
        self.max_payload_bytes = ring.slot_bytes
        try:
            self._memory = memoryview(_open(FOLDER / ring.name, ring.num_slots * ring.slot_bytes))
        except OSError as error:
            raise TransferError(f"The peer's ring is not in {FOLDER} here ({error.strerror}).") from None
        self._credits = Credits(ring.num_slots)
        self._checksum = 0
        self.has_room = self._credits.has_room
        self.freed = self._credits.freed

    def begin(self, parcel: Parcel) -> None:
        offset = self._credits.take() * self.max_payload_bytes
        target = self._memory[offset : offset + parcel.num_bytes]
        parcel.copy_to(target)
        self._checksum = xxh3_64_intdigest(target)

    def maybe_placed(self) -> int | None:
        return self._checksum

    def settle(self) -> None:
        """A copy is over when it returns."""

    def close(self) -> None:
        self._memory = memoryview(b"")


def _make(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # or a full /dev/shm would kill us at the first touch
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _open(path: Path, size: int) -> mmap.mmap:
    """Map a ring. TransferError unless it is a file of our user, for that user alone, and has this size."""
    fd = os.open(path, _FLAGS)
    try:
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not ours or status.st_size != size:
            raise TransferError("The peer's ring belongs to another user, is open to others, or has another size.")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
