"""The storm without sockets, threads or time: the real TCP medium on the network of network.py.

A run is a function of its seed. Raises AssertionError at the first wrong byte, missing or second end, leaked block, or
transfer that failed though nothing had hit it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tests.transfer.harness import FINGERPRINT
from tests.transfer.storm.engines import RECEIVE_BLOCK, SEND_BLOCK, DecodeEngine, PrefillEngine, Transfer
from tests.transfer.storm.lane import Lane
from tests.transfer.storm.network import SimNetwork
from tests.transfer.storm.scenes import Counts, Scene
from tests.transfer.storm.seams import shut, simulated, turn
from tollbridge.clock import ManualClock
from tollbridge.transfer.base import Fingerprint
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.switchboard import Switchboard
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

PORT = 7801
TURN_S = 0.02
OPTIONS = TransferOptions(
    heartbeat_s=0.2,
    progress_timeout_s=2.0,
    unknown_timeout_s=2.0,
    open_timeout_s=2.5,
    handshake_timeout_s=2.0,
    min_frame_bytes=64,
    max_frame_bytes=128,
)


@dataclass(frozen=True, kw_only=True)
class StormResult:
    """What a storm has seen: everything that it checks has held."""

    seed: int
    num_transfers: int
    counts: Counts
    prefill_outcomes: Counter[str]
    decode_outcomes: Counter[str]
    num_untouched: int  # transfers that nothing had hit; all were done
    seconds: float


class Simulation:
    """Two processes and some lanes between them."""

    def __init__(self, seed: int, *, wanted: int = 200, num_lanes: int = 8, num_streams: int = 1) -> None:
        self.rng = random.Random(seed)
        self._options = replace(OPTIONS, streams=num_streams)
        self._seed = seed
        self.counts = Counts(wanted)
        self.clock = ManualClock()
        self._lanes: list[Lane] = []
        self.network = SimNetwork(self.rng, self._lane_of)
        self._num_transfers = self._num_untouched = 0
        self._prefill_outcomes: Counter[str] = Counter()
        self._decode_outcomes: Counter[str] = Counter()
        with simulated(self.network, PORT):
            self.prefill, self.decode = self._new_prefill(), self._new_decode()
        self._lanes += [Lane(self, number) for number in range(num_lanes)]

    def run(self, num_transfers: int) -> StormResult:
        """Play scenes until `num_transfers` have ended and every count is as wanted."""
        with simulated(self.network, PORT):
            return self._run(num_transfers)

    def _run(self, num_transfers: int) -> StormResult:
        begun_s = time.perf_counter()
        while self._num_transfers < num_transfers or self.counts.least < self.counts.wanted:
            assert self._num_transfers < 3 * num_transfers + 1000, f"these are too rare: {self.counts.lacking()}"
            self._turn()
        self._end()
        return StormResult(
            seed=self._seed,
            num_transfers=self._num_transfers,
            counts=self.counts,
            prefill_outcomes=self._prefill_outcomes + self.prefill.outcomes,
            decode_outcomes=self._decode_outcomes + self.decode.outcomes,
            num_untouched=self._num_untouched,
            seconds=time.perf_counter() - begun_s,
        )

    # ── the lanes ──

    def register(self, transfer: Transfer) -> None:
        self.prefill.register(transfer)

    def open(self, transfer: Transfer) -> None:
        self.decode.open(transfer, (transfer.host, PORT))

    def over(self, transfers: list[Transfer], scene: Scene) -> None:
        """Take transfers that have ended on both sides."""
        self._num_transfers += len(transfers)
        for transfer in transfers:
            ends = transfer.send_end, transfer.receive_end
            if transfer.hurt or transfer.prefill_died or transfer.decode_died or None in ends:
                continue
            self._num_untouched += 1
            assert {end.outcome for end in ends if end} == {"done"}, f"failed though nothing hit it ({scene}): {ends}"

    def kill_prefill(self, *, silently: bool) -> None:
        """End the prefill process and start another at the same address."""
        for transfer in self._transfers():
            if transfer.registered or transfer.opened:
                self.counts.hit("prefill killed", transfer.prefill_state, transfer.decode_state)
        for lane in self._lanes:
            lane.hurt()
        for link in self._links():
            link.prefill.closed = True
            link.stalled, link.decode.reset = silently, not silently
        self.prefill.died()
        self._prefill_outcomes += self.prefill.outcomes
        self.prefill = self._new_prefill()

    def kill_decode(self, *, silently: bool) -> None:
        """End the decode process and start another."""
        for transfer in self._transfers():
            if transfer.opened:
                self.counts.hit("decode killed", transfer.prefill_state, transfer.decode_state)
        for lane in self._lanes:
            lane.hurt()
        for link in self._links():
            link.decode.closed = True
            link.stalled, link.prefill.reset = silently, not silently
        self.decode.died()
        self._decode_outcomes += self.decode.outcomes
        self.decode = self._new_decode()

    # ── inside ──

    def _turn(self) -> None:
        self.clock.advance(TURN_S)
        for lane in self._lanes:
            next(lane.script)
        for engine, side in ((self.decode, self.decode.receiver), (self.prefill, self.prefill.sender)):
            boards = _boards(side)
            for board in self.rng.sample(boards, len(boards)):
                turn(board)
            engine.poll()
        self.network.pump()
        if self.rng.random() < 0.25:
            self.decode.check_memory()

    def _end(self) -> None:
        """Close both sides: what is still under way ends as cancelled, and nothing is left."""
        for engine, side in ((self.prefill, self.prefill.sender), (self.decode, self.decode.receiver)):
            side.check()
            side.close()
            for board in reversed(_boards(side)):
                shut(board)
            engine.poll()
            assert not engine.live, "transfers without an end"
            engine.blocks.check_empty()
            assert side.statistics().active == 0
        self.decode.check_memory()

    def _transfers(self) -> list[Transfer]:
        return [transfer for lane in self._lanes for transfer in lane.transfers]

    def _links(self) -> list[Any]:
        return [link for links in self.network.links.values() for link in links]

    def _lane_of(self, host: str) -> Lane:
        return self._lanes[int(host.split(".")[2])]

    def _new_prefill(self) -> PrefillEngine:
        rng = random.Random(self.rng.getrandbits(64))
        engine = PrefillEngine(rng, None)  # type: ignore[arg-type]
        engine.sender = TcpSender(engine.cache.memory, _fingerprint(SEND_BLOCK), self._options, clock=self.clock)
        return engine

    def _new_decode(self) -> DecodeEngine:
        rng = random.Random(self.rng.getrandbits(64))
        engine = DecodeEngine(rng, None)  # type: ignore[arg-type]
        engine.receiver = TcpReceiver(engine.cache.memory, _fingerprint(RECEIVE_BLOCK), self._options, clock=self.clock)
        return engine


def _boards(side: Any) -> list[Switchboard]:
    boards: list[Switchboard] = side._side.lanes.boards
    return boards


def _fingerprint(block_size: int) -> Fingerprint:
    return msgspec.structs.replace(FINGERPRINT, block_size=block_size)
