"""A model of several workers that prefill and decode for each other: real schedulers, transfers as plain state.

It has no clock and so no deadlines: whatever ends here ends by the rules of the schedulers, not because somebody lost
patience. An end is a message: it is on its way until `deliver` hands it over, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sched.build import BLOCK_SIZE, make_sequence
from tollbridge.kv.pool import BlockPool
from tollbridge.sched.scheduler import Schedule, Scheduler
from tollbridge.sched.sequence import State, TokenSequence


@dataclass(kw_only=True, eq=False)
class Transfer:
    """One split request. Each side ends once."""

    name: str
    prefill: Worker
    decode: Worker
    opened: bool = False
    computed: bool = False  # prefill has all of it
    send_over: bool = False
    receive_over: bool = False


@dataclass(kw_only=True, eq=False)
class Worker:
    scheduler: Scheduler
    max_pinned_blocks: int
    limits: dict[TokenSequence, int] = field(default_factory=dict)  # live ones, and the tokens they want in all
    transfers: dict[TokenSequence, Transfer] = field(default_factory=dict)
    sends: dict[Transfer, TokenSequence] = field(default_factory=dict)  # pinned, oldest first


class Cluster:
    """See the top of the file. `bounded` False and `sheds` False leave out the rules about pinned blocks."""

    def __init__(
        self,
        num_workers: int,
        num_blocks: int,
        *,
        max_pinned_fraction: float = 0.5,
        bounded: bool = True,
        sheds: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.workers = [
            Worker(
                scheduler=Scheduler(
                    BlockPool(num_blocks, BLOCK_SIZE), max_num_batched_tokens=8, max_num_seqs=3, max_model_len=1000
                ),
                max_pinned_blocks=int(max_pinned_fraction * num_blocks) if bounded else num_blocks,
            )
            for _ in range(num_workers)
        ]
        self.transfers: list[Transfer] = []
        self.messages: list[Callable[[], None]] = []
        self._sheds = sheds
        self._count = 0

    @property
    def live(self) -> int:
        return sum(len(worker.limits) + len(worker.sends) for worker in self.workers)

    def local(self, worker: int, prompt: list[int], max_tokens: int) -> None:
        self._add(self.workers[worker], prompt, max_tokens)

    def split(self, prefill: int, decode: int, prompt: list[int], max_tokens: int) -> tuple[Callable[[], None], ...]:
        """Return the two legs, prefill and decode, to be sent in any order."""
        self._count += 1
        transfer = Transfer(name=f"t{self._count}", prefill=self.workers[prefill], decode=self.workers[decode])
        self.transfers.append(transfer)
        return (
            lambda: self._add(transfer.prefill, prompt, 1, transfer, awaited=True),
            lambda: self._add(transfer.decode, prompt, max_tokens, transfer, remote=True),
        )

    def step(self, number: int) -> bool:
        """Run one step of a worker; return whether anything happened."""
        worker = self.workers[number]
        schedule = worker.scheduler.schedule()
        self._placed(worker, schedule)
        if schedule.plan is not None:
            rows = sum(chunk.needs_logits for chunk in schedule.plan.chunks)
            for sequence in worker.scheduler.commit(schedule.plan, [self._count % 2] * rows):
                if sequence.num_tokens >= worker.limits[sequence]:
                    self._finish(worker, sequence)
        worker.scheduler.check()
        return not schedule.is_idle or schedule.revoked is not None

    def deliver(self, index: int) -> None:
        """Hand over one of the messages."""
        self.messages.pop(index % len(self.messages))()

    def ship(self, transfer: Transfer) -> bool:
        """Move the KV of a transfer, if it is computed and asked for; return whether it was."""
        if not (transfer.opened and transfer.computed) or transfer.send_over or transfer.receive_over:
            return False
        self._end_receive(transfer, accepted=True)
        self._end_send(transfer)
        return True

    def settle(self) -> None:
        """Let everything go on, in a fair order, until all requests have ended; AssertionError when nothing moves."""
        while self.live or self.messages:
            moved = bool(self.messages)
            while self.messages:
                self.deliver(0)
            for number in range(len(self.workers)):
                moved |= self.step(number)
            shipped = [self.ship(transfer) for transfer in self.transfers]
            moved |= any(shipped)
            assert moved or self.messages, f"deadlock: {[worker.scheduler.statistics() for worker in self.workers]}"
        for worker in self.workers:
            worker.scheduler.check()
            assert worker.scheduler.statistics().num_pinned == 0
        for transfer in self.transfers:
            assert transfer.send_over and transfer.receive_over, f"{transfer.name} did not end on both sides"

    # ── inside ──

    def _add(
        self,
        worker: Worker,
        prompt: list[int],
        max_tokens: int,
        transfer: Transfer | None = None,
        *,
        remote: bool = False,
        awaited: bool = False,
    ) -> None:
        self._count += 1
        worker.scheduler.check_fits(len(prompt), max_tokens)
        priority = self._count % 3  # any order will do
        sequence = make_sequence(f"s{self._count}", prompt, remote=remote, awaited=awaited, priority=priority)
        worker.scheduler.add(sequence)
        worker.limits[sequence] = len(prompt) + max_tokens
        if transfer is not None:
            worker.transfers[sequence] = transfer

    def _placed(self, worker: Worker, schedule: Schedule) -> None:
        for sequence in schedule.admitted:
            transfer = worker.transfers.get(sequence)
            if (
                transfer is not None
                and transfer.decode is worker
                and not transfer.receive_over
                and not sequence.awaited
            ):
                transfer.receive_over = True  # it has all of it: an empty range, and prefill is told
                self._end_send(transfer)
        for sequence in schedule.parked:
            self._open(worker.transfers[sequence], sequence)
        if schedule.revoked is not None:
            transfer = worker.transfers[schedule.revoked]
            self._end_receive(transfer, accepted=False)
            self._end_send(transfer)
        if schedule.starved and self._sheds:
            self._shed(worker, worker.scheduler.num_pinned_blocks - 1, unsent_too=False)

    def _open(self, transfer: Transfer, sequence: TokenSequence) -> None:
        transfer.opened = True
        if transfer.send_over:
            self._end_receive(transfer, accepted=False)  # prefill gave up before

    def _finish(self, worker: Worker, sequence: TokenSequence) -> None:
        transfer = worker.transfers.get(sequence)
        del worker.limits[sequence]
        pin = transfer is not None and transfer.prefill is worker and sequence.awaited and not transfer.send_over
        worker.scheduler.finish(sequence, pin=pin)
        if not pin:
            return
        assert transfer is not None
        transfer.computed = True
        worker.sends[transfer] = sequence
        if worker.scheduler.num_pinned_blocks > worker.max_pinned_blocks:
            self._shed(worker, worker.max_pinned_blocks, unsent_too=True)

    def _shed(self, worker: Worker, max_blocks: int, *, unsent_too: bool) -> None:
        """As SendBook.shed: the newest first, those that nobody has opened before those that wait for the link."""
        held = {
            transfer: set(sequence.block_table) for transfer, sequence in worker.sends.items() if not transfer.send_over
        }
        newest_first = list(reversed(held))
        for transfer in sorted(newest_first, key=lambda transfer: transfer.opened):
            if len(set().union(*held.values())) <= max_blocks or (transfer.opened and not unsent_too):
                return
            del held[transfer]
            self._end_send(transfer)
            if transfer.opened and not transfer.receive_over:
                self._end_receive(transfer, accepted=False)

    def _end_send(self, transfer: Transfer) -> None:
        """The sender is through; the engine hears of it later."""
        if transfer.send_over:
            return
        transfer.send_over = True
        self.messages.append(lambda: self._unpin(transfer))

    def _unpin(self, transfer: Transfer) -> None:
        sequence = transfer.prefill.sends.pop(transfer, None)
        if sequence is not None:
            transfer.prefill.scheduler.unpin(sequence)

    def _end_receive(self, transfer: Transfer, *, accepted: bool) -> None:
        if transfer.receive_over:
            return
        transfer.receive_over = True
        self.messages.append(lambda: self._unpark(transfer, accepted))

    def _unpark(self, transfer: Transfer, accepted: bool) -> None:
        worker = transfer.decode
        for sequence in [s for s, t in worker.transfers.items() if t is transfer and not s.awaited]:
            if sequence in worker.limits and sequence.state is State.PARKED:
                worker.scheduler.loaded(sequence, accepted=accepted)
