"""What plain TCP can do between paged GPU memory of two processes: the ceiling of `transfer-gpu`.

No protocol, no checksum, no ends, no other transfer: a thread per stream gathers 2 MiB of a layer's blocks, copies
them to pinned memory two pieces ahead, and calls `sendall`; its counterpart receives, copies to the GPU and scatters.
Both sides know the order of the pieces.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.support.gpu_kv import GpuPool

PIECE_BLOCKS = 64
NUM_SLOTS = 3
BUFFER_BYTES = 8 * 1024 * 1024

Piece = tuple[int, int, int]  # request, layer, first block


def pieces(pool: GpuPool, num_requests: int, stream: int, streams: int) -> list[Piece]:
    """Return the pieces of one stream, in their order."""
    every = (
        (request, layer, first)
        for request in range(num_requests)
        for layer in range(pool.num_layers)
        for first in range(0, pool.request_blocks, PIECE_BLOCKS)
    )
    return [piece for number, piece in enumerate(every) if number % streams == stream]


class _Lane:
    """One stream's side stream, pinned slots and events."""

    def __init__(self, pool: GpuPool) -> None:
        import torch

        cuda: Any = torch.cuda
        self.stream = cuda.Stream()
        self.slots = [
            torch.empty((PIECE_BLOCKS, pool.block_bytes), dtype=torch.uint8, pin_memory=True) for _ in range(NUM_SLOTS)
        ]
        self.views = [slot.numpy().reshape(-1).data for slot in self.slots]
        self.events = [cuda.Event() for _ in range(NUM_SLOTS)]


def send(pool: GpuPool, layers: Sequence[Any], tables: Sequence[Any], sockets: Sequence[socket.socket]) -> None:
    """Send all requests once over `sockets`, and wait until the other side has them."""

    def run(sock: socket.socket, mine: Sequence[Piece], lane: _Lane) -> None:
        for number in _staged_ahead(mine, lane, lambda piece, slot: _gather(layers, tables, piece, slot)):
            sock.sendall(lane.views[number % NUM_SLOTS][: _piece_bytes(pool, mine[number])])
        sock.recv(1)

    _each(pool, len(tables), sockets, run)


def receive(pool: GpuPool, layers: Sequence[Any], tables: Sequence[Any], sockets: Sequence[socket.socket]) -> float:
    """Receive all requests once; return the seconds from asking until all is in GPU memory."""
    import torch

    def run(sock: socket.socket, mine: Sequence[Piece], lane: _Lane) -> None:
        for number, (request, layer, first) in enumerate(mine):
            slot = number % NUM_SLOTS
            lane.events[slot].synchronize()
            _fill(sock, lane.views[slot][: _piece_bytes(pool, mine[number])])
            with torch.cuda.stream(lane.stream):
                blocks = tables[request][first : first + PIECE_BLOCKS]
                layers[layer].index_copy_(0, blocks, lane.slots[slot][: len(blocks)].to("cuda", non_blocking=True))
                lane.events[slot].record()
        lane.stream.synchronize()
        sock.sendall(b"k")

    begun_s = time.perf_counter()
    for sock in sockets:
        sock.sendall(b"?")
    _each(pool, len(tables), sockets, run)
    return time.perf_counter() - begun_s


def await_question(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.recv(1)


def tune(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return sock


def _staged_ahead(mine: Sequence[Piece], lane: _Lane, stage: Callable[[Piece, Any], None]) -> Iterator[int]:
    """Yield the number of each piece when it is in its slot, the following ones being on their way."""
    import torch

    def start(number: int) -> None:
        if number < len(mine):
            with torch.cuda.stream(lane.stream):
                stage(mine[number], lane.slots[number % NUM_SLOTS])
                lane.events[number % NUM_SLOTS].record()

    for number in range(NUM_SLOTS - 1):
        start(number)
    for number in range(len(mine)):
        start(number + NUM_SLOTS - 1)
        lane.events[number % NUM_SLOTS].synchronize()
        yield number


def _gather(layers: Sequence[Any], tables: Sequence[Any], piece: Piece, slot: Any) -> None:
    request, layer, first = piece
    blocks = tables[request][first : first + PIECE_BLOCKS]
    slot[: len(blocks)].copy_(layers[layer].index_select(0, blocks), non_blocking=True)


def _piece_bytes(pool: GpuPool, piece: Piece) -> int:
    return min(PIECE_BLOCKS, pool.request_blocks - piece[2]) * pool.block_bytes


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        received = sock.recv_into(view)
        if received == 0:
            raise ConnectionError("the peer left")
        view = view[received:]


def _each(
    pool: GpuPool,
    num_requests: int,
    sockets: Sequence[socket.socket],
    run: Callable[[socket.socket, Sequence[Piece], _Lane], None],
) -> None:
    count = len(sockets)
    jobs = [(sock, pieces(pool, num_requests, index, count), _lane(pool, index)) for index, sock in enumerate(sockets)]
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


_LANES: dict[int, _Lane] = {}


def _lane(pool: GpuPool, index: int) -> _Lane:
    """Return a lane that earlier measurements have used: allocating pinned memory takes longer than sending it."""
    if index not in _LANES:
        _LANES[index] = _Lane(pool)
    return _LANES[index]
