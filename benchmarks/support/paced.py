"""A worker that computes nothing and streams 50 chunks a second to each client, each chunk written by itself.

    python -m benchmarks.support.paced [NUM_EVENTS]      # prints its port

Streams are spread over ten phases of a tick of 20 ms, so that they do not all write at once.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import cast

import uvloop

from benchmarks.support.trivial import _chunked, _events

PHASES, PHASE_S = 10, 0.002


class Paced(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, pieces: list[bytes], phases: list[dict[Paced, int]], turn: itertools.count[int]) -> None:
        self._pieces, self._phases, self._turn = pieces, phases, turn
        self._mine: dict[Paced, int] = {}
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._mine.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if len(self._buffer) < end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]):
            return
        self._buffer = b""
        self._mine = self._phases[next(self._turn) % PHASES]
        self._mine[self] = 0

    def step(self) -> None:
        """Write the next chunk."""
        at = self._mine[self]
        self._transport.write(self._pieces[at])
        if at + 1 == len(self._pieces):
            del self._mine[self]
        else:
            self._mine[self] = at + 1


def pieces_of(num_events: int) -> list[bytes]:
    """Return the chunks of an answer; the head goes with the first, the end with the last."""
    events = _events(num_events, ids=False)
    framed = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    head = _chunked([])[: -len(b"0\r\n\r\n")]
    return [head + framed[0], *framed[1:-2], framed[-2] + framed[-1] + b"0\r\n\r\n"]


async def _serve(num_events: int) -> None:
    loop = asyncio.get_running_loop()
    pieces, turn = pieces_of(num_events), itertools.count()
    phases: list[dict[Paced, int]] = [{} for _ in range(PHASES)]
    server = await loop.create_server(lambda: Paced(pieces, phases, turn), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    due_s = loop.time()
    for phase in itertools.cycle(phases):
        due_s += PHASE_S
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        for stream in list(phase):
            stream.step()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
