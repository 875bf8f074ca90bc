"""A ring that prefill writes to by NIXL: RDMA where there is some, else whatever UCX finds. Needs `pip install nixl`.

Decode registers a ring of its host memory with its NIXL agent and names it in the handshake, with the agent's metadata.
Prefill posts a WRITE per frame, gathered from the registered cache (or from the pinned ring of a GPU) without a copy,
and sends the header when NIXL says that it is done. What is not registered, such as an encoded payload, is copied to a
registered scratch first.

Ends. A transfer that ends while its payload is on the way waits for that write: a moment on a link that works. When it
takes longer than `_SETTLE_S`, the peer is as good as dead: the write is aborted, the peer's agent is removed, and the
connection ends.

Rings are registered once and kept for the life of the side, in a pool: a late write of a peer that was lost hits memory
that is a ring, perhaps of another connection by now, where the checksum finds it.

NIXL tells nobody when a write is done, so it is asked: for a moment at once, then every millisecond by the I/O thread.
Its own progress thread is off: it keeps a core busy day and night. What UCX does in software, connecting and, over
TCP, writing into the ring, then needs a hand on decode's side: `Pump` lends it while transfers are open, and sleeps
otherwise.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tollbridge.errors import ConfigError, TransferError
from tollbridge.transfer.messages import Ring
from tollbridge.transfer.placed import Credits, Slots
from tollbridge.transfer.rows import as_bytes
from tollbridge.transfer.stage import Parcel

logger = logging.getLogger(__name__)

NIXL = "nixl"
NUM_SLOTS = 4
SLOT_BYTES = 2 * 1024 * 1024

_INFINIBAND = Path("/sys/class/infiniband")
_LOOK_S = 0.002  # how long to wait at once for a write
_NAP_S = 20e-6
_SETTLE_S = 2.0
_IDLE_NAP_S = 0.001
_HOT_S = 0.02  # since the last payload: more of them are on their way
_LINGER_S = 3.0  # after the last transfer, longer than _SETTLE_S: a write of one that ended early wants to finish
_ABORT_S = 0.2
_TURNS = 16  # of UCX at a time, each takes in some 64 KiB over TCP


def require_nixl() -> None:
    """ConfigError unless the package is installed."""
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("transfer.media nixl needs the package nixl: pip install 'tollbridge[nixl]', or use auto.")


def has_fast_link(infiniband: Path = _INFINIBAND) -> bool:
    """Return whether the package is installed and this machine has an RDMA port that is up."""
    if importlib.util.find_spec("nixl") is None:
        return False
    states = infiniband.glob("*/ports/*/state")
    return any("ACTIVE" in path.read_text(encoding="ascii", errors="replace") for path in states)


class NixlAgent:
    """The NIXL agent of one side: of prefill with the memory that it reads (`regions`), of decode with its rings.

    Thread-safe. `busy` says whether payloads are expected.
    """

    def __init__(self, regions: Sequence[memoryview], busy: Callable[[], bool]) -> None:
        api = _package()
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False, sync_mode=strict)
        self._lock = threading.Lock()
        self._regions = [(_address(region), len(region)) for region in regions]
        self._rings: list[RingMemory] = []  # of connections that are gone
        self._peers: Counter[str] = Counter()  # connections by the peer's agent
        try:
            self.agent: Any = api.nixl_agent(f"tollbridge-{secrets.token_hex(8)}", config)
            for address, size in self._regions:
                self.register(address, size)
        except Exception as error:  # noqa: BLE001 - the package raises what it likes, here and below
            raise ConfigError(f"transfer.media nixl: NIXL with UCX could not start here ({error}).") from None
        self.pump = Pump(self.turn, busy)

    def turn(self) -> None:
        """Let UCX go on with what it has to do."""
        for _ in range(_TURNS):
            self.agent.update_notifs()

    def inlet(self, *, granule_bytes: int) -> NixlInlet:
        """Make a ring, or take one of a connection that is gone."""
        slot_bytes = max(SLOT_BYTES, granule_bytes)
        with self._lock:
            memory = self._rings.pop(0) if self._rings else None
        try:
            if memory is None:
                array = np.zeros(NUM_SLOTS * slot_bytes, dtype=np.uint8)
                memory = RingMemory(array, self.register(array.ctypes.data, array.nbytes))
            return NixlInlet(self, memory, slot_bytes)
        except Exception as error:  # noqa: BLE001
            raise TransferError(f"NIXL could not register a ring ({error}).") from None

    def outlet(self, ring: Ring) -> NixlOutlet:
        """Connect to the agent of `ring`."""
        try:
            return NixlOutlet(self, ring)
        except Exception as error:  # noqa: BLE001
            raise TransferError(f"NIXL could not reach the peer's agent ({error}).") from None

    def register(self, address: int, size: int) -> Any:
        """Show memory to the NIC; return NIXL's descriptors of it."""
        return self.agent.register_memory([(address, size, 0, "")], "DRAM")

    def meet(self, metadata: bytes) -> str:
        """Learn of a peer's agent and one of its rings; return its name."""
        name = self.agent.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        with self._lock:
            self._peers[name] += 1
        return str(name)

    def part(self, peer: str, *, broken: bool) -> None:
        """Forget a peer's agent with its last connection, or at once when it is broken: its writes are aborted."""
        with self._lock:
            self._peers[peer] -= 1
            goes = broken or self._peers[peer] <= 0
        if goes and self.agent is not None:
            with suppress(Exception):  # it may have gone already
                self.agent.remove_remote_agent(peer)

    def give_back(self, memory: RingMemory) -> None:
        with self._lock:
            self._rings.append(memory)

    def is_registered(self, address: int, size: int) -> bool:
        """Whether a NIC may read these bytes of a cache."""
        return any(start <= address and address + size <= start + length for start, length in self._regions)

    def close(self) -> None:
        """End the agent, and all writes to and from here with it."""
        self.pump.close()
        self.agent = None
        self._rings.clear()


class RingMemory(NamedTuple):
    """The memory of a ring, and NIXL's descriptors of it."""

    array: Any
    descriptors: Any


class Pump:
    """A thread that calls `turn` again and again while `busy` says so, and a little longer.

    `stir` it when `busy` may have changed.
    """

    def __init__(self, turn: Callable[[], None], busy: Callable[[], bool]) -> None:
        self._turn = turn
        self._busy = busy
        self._stirred = threading.Event()
        self._closed = False
        self._moved_s = self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def stir(self) -> None:
        self._stirred.set()

    def moved(self) -> None:
        """A payload has come."""
        self._moved_s = time.monotonic()

    def close(self) -> None:
        self._closed = True
        self.stir()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._stirred.wait()
            self._stirred.clear()
            self._busy_s = time.monotonic()
            while not self._closed and self._wanted(time.monotonic()):
                self._turn()
                hot = time.monotonic() - self._moved_s < _HOT_S
                time.sleep(_NAP_S if hot else _IDLE_NAP_S)

    def _wanted(self, now_s: float) -> bool:
        if self._busy():
            self._busy_s = now_s
        return now_s - self._busy_s < _LINGER_S


class NixlInlet:
    """Implements placed.Inlet."""

    medium = NIXL

    def __init__(self, agent: NixlAgent, memory: RingMemory, slot_bytes: int) -> None:
        self._agent = agent
        self._memory: RingMemory | None = memory
        self._slot_bytes = slot_bytes
        self._address = int(memory.array.ctypes.data)
        # the way to this agent and the key of this ring, of no other
        self._metadata = agent.agent.get_partial_agent_metadata(memory.descriptors, True, ["UCX"])
        self._slots = Slots(memoryview(memory.array), num_slots=NUM_SLOTS, slot_bytes=slot_bytes)
        self.payload = self._slots.payload

    def advance(self) -> int:
        self._agent.pump.moved()
        return self._slots.advance()

    def ring(self) -> Ring:
        return Ring(
            medium=NIXL,
            num_slots=NUM_SLOTS,
            slot_bytes=self._slot_bytes,
            agent=self._metadata,
            address=self._address,
        )

    def taken(self) -> None:
        """Nothing to hide: whoever reaches UCX needs more than a name."""

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._agent.give_back(memory)


class NixlOutlet:
    """Implements placed.Outlet."""

    medium = NIXL

    def __init__(self, agent: NixlAgent, ring: Ring) -> None:
        self.max_payload_bytes = ring.slot_bytes
        self._agent = agent
        self._address = ring.address
        self._peer: str | None = agent.meet(ring.agent)
        self._scratch: Any = None  # for what is not registered
        self._credits = Credits(ring.num_slots)
        self._handle: Any = None  # of the write that is under way
        self._checksum = 0
        self._error = ""
        self.has_room = self._credits.has_room
        self.freed = self._credits.freed

    def begin(self, parcel: Parcel) -> None:
        slot = self._address + self._credits.take() * self.max_payload_bytes
        self._checksum, views = parcel.load()
        sources = self._sources(views)
        sizes = sources[:, 1]
        targets = np.zeros_like(sources)
        targets[:, 0] = slot + np.cumsum(sizes) - sizes
        targets[:, 1] = sizes
        try:
            self._post(sources, targets)
        except Exception as error:  # noqa: BLE001
            self._error = str(error)
        self._look(_LOOK_S)

    def maybe_placed(self) -> int | None:
        self._look(0.0)
        if self._error:
            raise OSError(f"NIXL could not write to the peer ({self._error})")
        return self._checksum if self._handle is None else None

    def settle(self) -> None:
        self._look(_SETTLE_S)
        if self._handle is not None:
            logger.warning("NIXL did not finish a write within %g s: the connection to its peer ends.", _SETTLE_S)
            self._error = "no progress"
            self._leave()

    def close(self) -> None:
        self._look(_ABORT_S)
        self._leave()

    # ── inside ──

    def _sources(self, views: Sequence[memoryview]) -> Any:
        """Return [address, bytes, device] of each view; of one copy when a NIC may not read them."""
        found = np.array([(_address(view), len(view), 0) for view in views], dtype=np.uint64)
        if all(self._agent.is_registered(int(address), int(size)) for address, size, _ in found):
            return found
        if self._scratch is None:
            self._scratch = np.zeros(self.max_payload_bytes, dtype=np.uint8)
            self._agent.register(self._scratch.ctypes.data, self._scratch.nbytes)
        data = b"".join(views)
        self._scratch[: len(data)] = as_bytes(memoryview(data))
        return np.array([(self._scratch.ctypes.data, len(data), 0)], dtype=np.uint64)

    def _post(self, sources: Any, targets: Any) -> None:
        agent = self._agent.agent
        local, remote = agent.get_xfer_descs(sources, "DRAM"), agent.get_xfer_descs(targets, "DRAM")
        self._handle = agent.initialize_xfer("WRITE", local, remote, self._peer)
        self._note(agent.transfer(self._handle))

    def _look(self, patience_s: float) -> None:
        """Ask how the write is going, for so long."""
        deadline_s = time.monotonic() + patience_s
        while self._handle is not None:
            try:
                self._ask()
            except Exception as error:  # noqa: BLE001
                self._error = str(error)
                self._drop_handle()
            if time.monotonic() >= deadline_s:
                return
            time.sleep(_NAP_S)

    def _ask(self) -> None:
        for _ in range(_TURNS):  # each lets UCX go on
            if self._handle is not None:
                self._note(self._agent.agent.check_xfer_state(self._handle))

    def _note(self, state: str) -> None:
        if state == "PROC":
            return
        if state != "DONE":
            self._error = f"it ended {state}"
        self._drop_handle()

    def _drop_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(Exception):  # an aborted write says so
                handle.release()

    def _leave(self) -> None:
        """Abort what is under way, and part from the peer's agent."""
        broken = self._handle is not None
        self._drop_handle()
        peer, self._peer = self._peer, None
        if peer is not None:
            self._agent.part(peer, broken=broken)


def _package() -> Any:
    """Import the package, and let its log go where ours goes: it writes to stdout, where a worker's ready line is."""
    raises = logging.raiseExceptions
    from nixl import _api as api

    logging.raiseExceptions = raises
    package = logging.getLogger("nixl")
    package.handlers.clear()
    package.propagate = True
    package.setLevel(logging.WARNING)
    return api


def _address(view: memoryview) -> int:
    return int(as_bytes(view).__array_interface__["data"][0])
