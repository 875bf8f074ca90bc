"""How busy one worker is: what it said last, corrected by what this router has sent and seen end since.

A worker reports what every router has sent to it, so two routers that share it agree but for the time since the last
report; the corrections bridge that time. A request sent before a report is in it, a later one is added, and what ended
in between is taken off again. The error is a request or two around the moment of the report, for one interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about itself. None: it does not say."""

    block_size: int = 0  # tokens; 0: not known
    kv_bytes_per_token: float = 0.0
    max_num_batched_tokens: int = 0
    caches_prefixes: bool = True  # what it has computed once
    num_running: int = 0  # in the running batch, prefill legs among them
    num_waiting: int = 0  # for capacity or for KV
    waiting_prefill_tokens: int | None = None
    free_kv_tokens: int | None = None
    total_kv_tokens: int | None = None
    pinned_tokens: int = 0
    pinned_full: bool = False  # it holds as much finished KV that nobody has fetched as it may
    mean_prompt_tokens: float = 0.0  # of the requests so far
    num_sending: int | None = None
    sending_bytes: float = 0.0
    num_receiving: int | None = None
    receiving_bytes: float = 0.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load now, as WorkerView has it."""

    waiting_prefill_tokens: int
    num_running: int  # streams, and the prefill legs of this router
    free_kv_tokens: int | None
    num_sending: int
    sending_bytes: float
    num_receiving: int
    receiving_bytes: float


@dataclass(kw_only=True, eq=False)
class Work:
    """One request that this router has sent to a worker, until it ends."""

    prefill_tokens: int = 0  # the prompt tokens that it has to compute
    kv_tokens: int = 0  # the tokens for which it needs room
    num_streams: int = 1  # that decode there: the choices of an answer, none of a prefill leg
    sent_s: float  # monotonic
    prefilled: bool = False


@dataclass(kw_only=True, eq=False)
class Transfer:
    """KV on its way between two workers, from the start of a split to its first token."""

    num_tokens: int
    sent_s: float


@dataclass
class _Side:
    """Transfers in one direction."""

    active: list[Transfer] = field(default_factory=list)
    ended: list[Transfer] = field(default_factory=list)  # since the last report, which still has them


class Load:
    """See the top of the file. The caller says what time it is (monotonic seconds)."""

    def __init__(self, report: Report | None = None) -> None:
        """`report` is what is known before the worker has said anything."""
        self.report = report or Report()
        self._reported_s = float("-inf")
        self._works: list[Work] = []
        self._prefilled = 0  # tokens in the report that have been computed since
        self._ended = 0  # what ran in the report, and has ended since
        self._freed = 0  # tokens of KV that requests in the report have let go of since
        self._out, self._in = _Side(), _Side()
        self._figures: Figures | None = None  # None: to be worked out again

    def told(self, report: Report, asked_s: float) -> None:
        """Take a report that was asked for at `asked_s`."""
        self._figures = None
        self.report, self._reported_s = report, asked_s
        self._prefilled = self._ended = self._freed = 0
        self._out.ended, self._in.ended = [], []

    def begin(self, work: Work) -> None:
        self._figures = None
        self._works.append(work)

    def prefilled(self, work: Work) -> None:
        """Its first token came: nothing of its prompt is left to compute. Idempotent."""
        if not work.prefilled:
            self._figures = None
            work.prefilled = True
            self._prefilled += work.prefill_tokens if self._is_in_report(work) else 0

    def end(self, work: Work) -> None:
        self.prefilled(work)
        self._figures = None
        self._works.remove(work)
        if self._is_in_report(work):
            self._ended += work.num_streams or 1
            self._freed += work.kv_tokens

    def begin_transfer(self, transfer: Transfer, *, outward: bool) -> None:
        self._figures = None
        (self._out if outward else self._in).active.append(transfer)

    def end_transfer(self, transfer: Transfer, *, outward: bool) -> None:
        self._figures = None
        side = self._out if outward else self._in
        side.active.remove(transfer)
        if self._is_in_report(transfer):
            side.ended.append(transfer)

    @property
    def is_settled(self) -> bool:
        """Whether nothing of this router is there and nothing has ended since the last report: another one of an idle
        worker would say the same."""
        flows = (self._out.active, self._in.active, self._out.ended, self._in.ended)
        return not (self._works or self._prefilled or self._ended or self._freed or any(flows))

    @property
    def num_streams(self) -> int:
        """Streams of this router that have begun and not ended."""
        return sum([work.num_streams for work in self._works if work.prefilled])

    def figures(self) -> Figures:
        """Return the load now. Cheap when nothing has changed."""
        if self._figures is None:
            self._figures = self._work_out()
        return self._figures

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._prefilled >= 0 and self._ended >= 0
        assert all(work.prefill_tokens >= 0 and work.kv_tokens >= 0 for work in self._works)
        assert self._figures is None or self._figures == self._work_out(), "a change was not noticed"

    def _work_out(self) -> Figures:
        report = self.report
        unseen = [work for work in self._works if not self._is_in_report(work)]
        num_sending, sending_bytes = self._flows(self._out, report.num_sending, report.sending_bytes)
        num_receiving, receiving_bytes = self._flows(self._in, report.num_receiving, report.receiving_bytes)
        return Figures(
            waiting_prefill_tokens=self._waiting_in_report()
            + sum(work.prefill_tokens for work in unseen if not work.prefilled),
            num_running=self._running(unseen),
            free_kv_tokens=self._free(sum(work.kv_tokens for work in unseen)),
            num_sending=num_sending,
            sending_bytes=sending_bytes,
            num_receiving=num_receiving,
            receiving_bytes=receiving_bytes,
        )

    def _running(self, unseen: list[Work]) -> int:
        """What waited when the worker spoke may decode now: ours whose first token came are the least.

        A prefill leg is in the report or not, as a stream is, and no stream in either case.
        """
        legs = sum([not work.num_streams for work in self._works])
        told_legs = legs - sum([not work.num_streams for work in unseen])
        told = max(self.report.num_running - self._ended - told_legs, 0) + sum([work.num_streams for work in unseen])
        return max(told, self.num_streams) + legs

    def _free(self, taken: int) -> int | None:
        free, total = self.report.free_kv_tokens, self.report.total_kv_tokens
        if free is None:
            return None
        freed = free + self._freed
        return max((freed if total is None else min(freed, total)) - taken, 0)

    def _waiting_in_report(self) -> int:
        """A worker that does not say how much waits: ours is known, of others only that they wait."""
        told = self.report.waiting_prefill_tokens
        if told is not None:
            return max(told - self._prefilled, 0)
        mine = [work.prefill_tokens for work in self._works if not work.prefilled and self._is_in_report(work)]
        return sum(mine) + int(max(self.report.num_waiting - len(mine), 0) * self.report.mean_prompt_tokens)

    def _flows(self, side: _Side, told: int | None, told_bytes: float) -> tuple[int, float]:
        """Return number and bytes to go. A worker may not know yet what was sent a moment ago: ours is the least."""
        per_token = self.report.kv_bytes_per_token
        if told is None:
            return len(side.active), per_token * sum(each.num_tokens for each in side.active)
        unseen = [each for each in side.active if not self._is_in_report(each)]
        number = max(told - len(side.ended), 0) + len(unseen)
        gone = per_token * sum(each.num_tokens for each in side.ended)
        new = per_token * sum(each.num_tokens for each in unseen)
        return max(number, len(side.active)), max(told_bytes - gone, 0.0) + new

    def _is_in_report(self, sent: Work | Transfer) -> bool:
        return sent.sent_s < self._reported_s
