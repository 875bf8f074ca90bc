"""The I/O threads of one side, and the pairs of workers that they serve.

A pair of workers shares one TCP connection or several, its *lanes*. The first lane carries the control frames, and DATA
like the others; it lives in the first thread, lane n in thread n modulo the number of threads, so threads are bounded
by the configuration and not by the number of peers. Books know pairs, by the number of the first lane. A frame may take
any lane: whoever has room takes the next one, so a transfer is striped over lanes in proportion to what each moves.

A pair lives and dies as one: when a lane that has joined is lost, so are the others and all transfers of the pair, and
the next transfer dials anew. A lane that cannot even join is given up alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from tollbridge.clock import Clock
from tollbridge.transfer.channel import Tls
from tollbridge.transfer.connection import Connection
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.stage import Stage
from tollbridge.transfer.switchboard import Owner, Switchboard
from tollbridge.transfer.tally import Verdict


class Lanes:
    """See the top of the file. The monitor's Wire. Pairs change inside a turn of the monitor only."""

    def __init__(
        self,
        owner: Owner,
        options: TransferOptions,
        clock: Clock,
        stage: Stage,
        *,
        tls: Tls | None,
        incarnation: int,
        name: str,
    ) -> None:
        self._stage = stage
        self._pairs: dict[int, tuple[Connection, ...]] = {}  # by the number of the first lane
        numbers = itertools.count(1)
        self.boards = [
            Switchboard(
                owner, options, clock, tls=tls, incarnation=incarnation, numbers=numbers, index=index, name=name
            )
            for index in range(options.streams or 1)
        ]
        self.first = self.boards[0]

    # ── any thread ──

    def start(self) -> None:
        for board in self.boards:
            board.start()

    def stop(self) -> None:
        """End the threads and join them, the first one last. Idempotent."""
        for board in reversed(self.boards):
            board.stop()

    def request_stop(self) -> None:
        """Let all threads end soon: one of them has failed."""
        for board in self.boards:
            board.request_stop()

    def post(self, task: Callable[[], None]) -> None:
        """Run `task` in the first thread soon."""
        self.first.post(task)

    def call(self, task: Callable[[], None]) -> None:
        """Run `task` in the first thread and return when it has run."""
        self.first.call(task)

    def connections(self) -> list[Connection]:
        return [connection for board in self.boards for connection in board.connections()]

    def num_connections_by_medium(self) -> dict[str, int]:
        """Count the connections that have joined their pair."""
        return dict(Counter(lane.medium for lanes in list(self._pairs.values()) for lane in lanes))

    def of(self, pair: int) -> tuple[Connection, ...]:
        """Return the lanes that have joined; empty once the pair is lost."""
        return self._pairs.get(pair, ())

    def goodput_bytes_per_s(self, pair: int) -> float:
        """Return what the lanes of a pair moved together while they had something to send; 0: not known yet."""
        return sum(lane.meter.bytes_per_s for lane in self.of(pair))

    @property
    def best_goodput_bytes_per_s(self) -> float:
        """The best of all pairs."""
        return max(map(self.goodput_bytes_per_s, list(self._pairs)), default=0.0)

    # ── Wire ──

    def emit(self, connection: int, frame: bytes) -> None:
        self.first.emit(connection, frame)

    def medium(self, connection: int) -> str:
        return next((lane.medium for lane in self.of(connection)), "")

    def release(self, connection: int, transfer: bytes) -> None:
        for lane in self.of(connection):
            lane.release(transfer)
        self._stage.settle(transfer)

    def settle(self, connection: int, transfer: bytes) -> None:
        for lane in self.of(connection):
            lane.settle(transfer)

    # ── inside a turn ──

    def join(self, connection: Connection) -> None:
        """Add a lane to its pair, or begin one."""
        connection.joined = True
        self._stage.join()
        self._pairs[connection.pair] = (*self.of(connection.pair), connection)

    def wake(self, pair: int) -> None:
        """Let two lanes that looked for frames in vain look again; they wake others when there is more."""
        for lane in [lane for lane in self.of(pair) if lane.hungry][:2]:
            lane.hungry = False
            self.boards[lane.home].flush_soon(lane.number)

    def flush_at(self, connection: Connection, when_s: float) -> None:
        """Let a lane look for frames at `when_s`. In its own thread."""
        self.boards[connection.home].flush_at(connection.number, when_s)

    def part(self, connection: Connection, verdict: Verdict) -> None:
        """Take a lost lane out, and its pair with it. Not inside a turn; when its transfers let go of their blocks."""
        if not connection.joined:
            return
        connection.joined = False
        self._stage.leave()
        for lane in self._pairs.pop(connection.pair, ()):
            if lane is not connection:
                self.boards[lane.home].drop_soon(lane, verdict)

    def move(self, connection: Connection) -> None:
        """Bring a lane to the thread of its number. In the first thread, where the listener accepted it."""
        if not self.of(connection.pair):
            return  # the pair was lost meanwhile, and this lane will be dropped here
        home = connection.place.lane % len(self.boards)
        if home != connection.home:
            self.first.give(connection, self.boards[home])
