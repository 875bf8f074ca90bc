"""The storm over real sockets and threads: pairs of TCP media with the fault proxy of tests/support in between.

What the simulation cannot show: races of the engine's thread with the I/O threads, and the kernel's own pieces.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tests.support import kv_proxy
from tests.support.kv_proxy import Fault, KvProxy
from tests.transfer.harness import DIGEST, FINGERPRINT, NUM_LAYERS, OTHER_DIGEST, Cache, Mailbox
from tollbridge.transfer.base import LoadRequest, TransferEnd
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

NUM_TOKENS, NUM_BLOCKS, TOKEN_BYTES = 64, 16, 32
FIRST_TOKEN = 16
OPTIONS = TransferOptions(
    heartbeat_s=0.05,
    progress_timeout_s=2.0,
    unknown_timeout_s=1.5,
    open_timeout_s=1.5,
    handshake_timeout_s=20.0,
    min_frame_bytes=256,
    max_frame_bytes=512,
)
NUM_FRAMES = NUM_LAYERS * (NUM_TOKENS - FIRST_TOKEN) * TOKEN_BYTES // 512
HARMLESS = frozenset({"none", "duplicated", "reordered", "slow reader", "rewind"})

# How a transfer begins, by the states that a fault then finds.
SHAPES = ("unknown", "queued", "computing", "sending", "not opened")


@dataclass(kw_only=True)
class Trial:
    """One transfer with its fault."""

    transfer_id: str
    shape: str
    fault: str
    table: list[int]
    load_table: list[int]
    truth: np.ndarray


@dataclass(kw_only=True)
class SocketStormResult:
    num_transfers: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (fault, shape)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: SocketStormResult) -> None:
        self.num_transfers += other.num_transfers
        self.counts += other.counts
        self.outcomes += other.outcomes


class SocketLane:
    """A pair with its proxy; plays one trial after the other in the calling thread."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._send = Cache(NUM_BLOCKS, 16, seed=seed, token_bytes=TOKEN_BYTES)
        self._receive = Cache(NUM_BLOCKS, 16, seed=seed + 1, token_bytes=TOKEN_BYTES)
        self._sender = TcpSender(self._send.memory, FINGERPRINT, OPTIONS)
        self._proxy = KvProxy(self._sender.address)
        self._receiver = TcpReceiver(self._receive.memory, FINGERPRINT, OPTIONS)
        self._sent, self._received = Mailbox(self._sender), Mailbox(self._receiver)
        self._calm = True
        self.result = SocketStormResult()

    def play(self, fault: str, shape: str) -> None:
        """Run one transfer under `fault`. Raises AssertionError when a promise is broken."""
        trial = self._trial(fault, shape)
        before = self._receive.slots.copy()
        self._proxy.fault = self._frame_fault(fault)
        self._begin(trial)
        if shape not in ("unknown", "sending"):
            self._strike(trial)
            self._complete(trial)
        else:
            self._complete(trial)
            self._strike(trial)
        sent, received = self._ends(trial)
        self._proxy.resume()
        self._proxy.fault = kv_proxy.forward
        self._judge(trial, before, sent, received)

    def close(self) -> None:
        for side in (self._receiver, self._sender):
            side.check()
            side.close()
            assert side.statistics().active == 0 and side.statistics().num_connections == 0
        self._proxy.close()

    # ── inside ──

    def _trial(self, fault: str, shape: str) -> Trial:
        rng = self._rng
        truth = np.frombuffer(rng.randbytes(NUM_LAYERS * NUM_TOKENS * TOKEN_BYTES), dtype=np.uint8)
        return Trial(
            transfer_id=f"{rng.getrandbits(128):032x}",
            shape=shape,
            fault=fault,
            table=rng.sample(range(NUM_BLOCKS), 4),
            load_table=rng.sample(range(NUM_BLOCKS), 4),
            truth=truth.reshape(NUM_LAYERS, NUM_TOKENS, TOKEN_BYTES),
        )

    def _frame_fault(self, fault: str) -> Fault:
        nth = self._rng.randrange(NUM_FRAMES - 1)
        faults: dict[str, Callable[[], Fault]] = {
            "payload flip": lambda: kv_proxy.corrupt_payload(nth),
            "header flip": lambda: kv_proxy.corrupt_header(nth),
            "duplicated": kv_proxy.duplicate_data,
            "reordered": kv_proxy.reorder_data,
            "truncated": lambda: kv_proxy.shorten(nth, self._rng.randint(1, 60)),
            "cut in frame": lambda: kv_proxy.truncate(nth, self._rng.randrange(500)),
            "slow reader": lambda: kv_proxy.slow(0.002),
        }
        return faults.get(fault, lambda: kv_proxy.forward)()

    def _begin(self, trial: Trial) -> None:
        if trial.shape != "not opened":
            self._open(trial)
        if trial.shape != "unknown":
            self._register(trial)
        if trial.shape in ("computing", "not opened"):
            self._compute(trial, self._rng.randint(FIRST_TOKEN + 1, NUM_TOKENS - 1), self._rng.choice([None, 0, 1]))

    def _complete(self, trial: Trial) -> None:
        if trial.shape == "unknown":
            self._register(trial)
        self._compute(trial, NUM_TOKENS, None)
        if trial.shape == "not opened":
            self._open(trial)

    def _strike(self, trial: Trial) -> None:
        fault = trial.fault
        if fault == "cut":
            self._proxy.cut()
        elif fault == "stalled":
            self._proxy.stall()
        elif fault == "cancel on prefill":
            self._sender.cancel(trial.transfer_id, "prefill gave up")
        elif fault == "cancel on decode":
            self._receiver.cancel(trial.transfer_id, "the client left")
        elif fault == "rewind":
            self._preempt(trial)
        elif fault == "prefill killed":
            self._restart_sender()
        elif fault == "decode killed":
            self._restart_receiver()

    def _open(self, trial: Trial) -> None:
        host, port = self._proxy.address
        self._receiver.open(
            LoadRequest(
                transfer_id=trial.transfer_id,
                host=host,
                port=port,
                digest=OTHER_DIGEST if trial.fault == "wrong digest" else DIGEST,
                first_token=FIRST_TOKEN,
                num_tokens=NUM_TOKENS - FIRST_TOKEN,
                block_table=trial.load_table,
            )
        )

    def _register(self, trial: Trial) -> None:
        self._sender.register(trial.transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)

    def _compute(self, trial: Trial, num_tokens: int, layer: int | None) -> None:
        """Write and publish, unless the transfer has ended and the blocks are not its own any more."""
        self._sent.collect()
        if trial.transfer_id in self._sent.ends:
            return
        slots = self._send.slot_numbers(trial.table, 0, num_tokens)
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        self._send.slots[layers, slots] = trial.truth[layers, :num_tokens]
        self._sender.publish(trial.transfer_id, trial.table, num_tokens, layer=layer)

    def _preempt(self, trial: Trial) -> None:
        """Take the blocks away and compute again in others."""
        self._sender.rewind(trial.transfer_id)
        self._send.slots[:] = self._rng.randrange(256)
        trial.table = self._rng.sample(range(NUM_BLOCKS), 4)
        self._compute(trial, NUM_TOKENS, None)

    def _restart_sender(self) -> None:
        """End the prefill process as the kernel would; a new one listens at the same port."""
        self._proxy.cut()
        port = self._sender.address[1]
        self._sender.close()
        self._sent.collect()
        self._sender = TcpSender(self._send.memory, FINGERPRINT, replace(OPTIONS, bind_port=port))
        ends, self._sent = self._sent.ends, Mailbox(self._sender)
        self._sent.ends.update(ends)

    def _restart_receiver(self) -> None:
        self._proxy.cut()
        self._receiver.close()
        self._received.collect()
        self._receiver = TcpReceiver(self._receive.memory, FINGERPRINT, OPTIONS)
        ends, self._received = self._received.ends, Mailbox(self._receiver)
        self._received.ends.update(ends)

    def _ends(self, trial: Trial) -> tuple[TransferEnd, TransferEnd]:
        return self._sent.wait(trial.transfer_id), self._received.wait(trial.transfer_id)

    def _judge(self, trial: Trial, before: np.ndarray, sent: TransferEnd, received: TransferEnd) -> None:
        """Compare all memory of decode, count, and make sure that nothing writes any more."""
        slots = self._receive.slot_numbers(trial.load_table, FIRST_TOKEN, NUM_TOKENS - FIRST_TOKEN)
        if received.outcome == "done":
            truth = trial.truth[:, FIRST_TOKEN:]
            assert np.array_equal(self._receive.slots[:, slots], truth), f"wrong KV was accepted: {trial}"
            before[:, slots] = truth
        else:
            before[:, slots] = self._receive.slots[:, slots]
        assert np.array_equal(self._receive.slots, before), f"{trial} wrote outside of its range, or after its end"
        for box in (self._sent, self._received):
            box.collect()
            assert all(len(ends) == 1 for ends in box.ends.values()), "a transfer ended more than once"
            box.ends.clear()
        outcomes = (sent.outcome, received.outcome)
        calm, self._calm = self._calm, trial.fault in HARMLESS  # after a fault the pooled connection may be dying
        if calm and self._calm:
            assert outcomes == ("done", "done"), f"failed though nothing hit it: {trial.fault} {sent} {received}"
        if trial.fault == "wrong digest":
            assert received.outcome == "failed"
        self.result.num_transfers += 1
        self.result.counts[trial.fault, trial.shape] += 1
        self.result.outcomes[f"{received.outcome} {received.reason}".strip()] += 1


FAULTS = (
    "none",
    "prefill killed",
    "decode killed",
    "cut",
    "stalled",
    "slow reader",
    "payload flip",
    "header flip",
    "duplicated",
    "reordered",
    "truncated",
    "cut in frame",
    "cancel on prefill",
    "cancel on decode",
    "rewind",
    "wrong digest",
)


def run(num_transfers: int, *, seed: int, num_lanes: int = 6, faults: Sequence[str] = FAULTS) -> SocketStormResult:
    """Play `num_transfers` trials on lanes of a thread each; re-raises what broke first."""
    begun_s = time.perf_counter()
    total, errors, lock = SocketStormResult(), list[BaseException](), threading.Lock()
    plan = iter([(fault, shape) for _ in range(num_transfers) for fault in faults for shape in SHAPES][:num_transfers])

    def work(number: int) -> None:
        lane = SocketLane(seed * 1000 + 2 * number)
        try:
            while not errors:
                with lock:
                    fault, shape = next(plan, (None, None))
                if fault is None or shape is None:
                    break
                lane.play(fault, shape)
        except BaseException as error:
            errors.append(error)
        finally:
            lane.close()
        with lock:
            total.add(lane.result)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    total.seconds = time.perf_counter() - begun_s
    return total
