"""Flows over shared links: max-min fair shares of fluid, fed piece by piece as prefill computes layers.

Each flow crosses a path of links (a NIC out, perhaps a switch, a NIC in). What a link carries is shared so that no flow
can have more without another, which has no more, having less (max-min, by progressive filling). A flow takes part
while it has bytes to send; between two layers it may have none, and then others get its share.

Flows of one *line*, a pair of workers, do not share: one of those that have bytes goes, as `transfer/send_book.py` has
it. The shortest remainder is first, and a second of age counts as what the path carries in it. As all age alike, and
only the one that goes gets shorter, who goes changes only when a flow comes, ends, runs dry or gets bytes again.

Bytes become available by pieces (computed at a_k), so with a constant rate a flow ends at f_K of the recursion f_k =
max(f_{k-1}, a_k) + b_k/B, exactly; when rates change, what was sent so far is carried on. Only flows that share links,
directly or through others, are looked at when one of them changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from tollbridge.sim.agenda import Agenda

_ROUNDING_S = 1e-9  # what is left to send for so short a time is a rounding error
Piece = tuple[float, float]  # (available at, bytes of the flow available then, in all)


class Flow:
    """One transfer. `total` bytes end it; pieces may be supplied as they become known."""

    __slots__ = (
        "_available", "_now_s", "_pieces", "_rate", "_version", "first_byte_s", "line", "on_end", "opened_s", "path",
        "sent", "total",
    )  # fmt: skip

    def __init__(
        self, path: tuple[str, ...], total: float, on_end: Callable[[], None], now_s: float, line: object = None
    ) -> None:
        self.path = path
        self.line = self if line is None else line
        self.opened_s = now_s
        self.total = total
        self.on_end = on_end
        self.sent = 0.0
        self.first_byte_s: float | None = None
        self._pieces: list[Piece] = []  # not yet available, the next one last
        self._available = 0.0
        self._rate = 0.0
        self._now_s = now_s
        self._version = 0

    @property
    def is_active(self) -> bool:
        return self.sent < self._available

    @property
    def backlog(self) -> float:
        """Bytes that could be sent, as of the last change."""
        return self._available - self.sent


class Network:
    """All links and flows. Owns the events of the flows."""

    def __init__(self, agenda: Agenda, capacities: Mapping[str, float]) -> None:
        self._agenda = agenda
        self._capacities = dict(capacities)  # bytes/s
        self._flows: dict[str, dict[Flow, None]] = {link: {} for link in capacities}
        self.bytes_carried = 0.0

    def open(self, path: tuple[str, ...], total: float, on_end: Callable[[], None], *, line: object = None) -> Flow:
        """Start a flow, which has nothing to send yet; `on_end` is called when `total` bytes have crossed.

        Flows with the same `line` have the same path and go one at a time; None: a line of its own.
        """
        flow = Flow(path, total, on_end, self._agenda.now_s, line)
        for link in path:
            self._flows[link][flow] = None
        return flow

    def supply(self, flow: Flow, pieces: Iterable[Piece]) -> None:
        """Let more bytes become available: pieces in order, in all at most `total`, none before those of before."""
        flow._pieces = [*reversed(list(pieces)), *flow._pieces]
        self._changed(flow.path)

    def withdraw(self, flow: Flow) -> float:
        """Take back what has not been sent; return the bytes that have."""
        self._advance(flow)
        flow._pieces = []
        flow._available = flow.sent
        self._changed(flow.path)
        return flow.sent

    def close(self, flow: Flow) -> None:
        """End a flow without a call of `on_end`. Idempotent."""
        if flow._version < 0:
            return
        self._advance(flow)
        self.bytes_carried += flow.sent
        flow._version = -1
        for link in flow.path:
            del self._flows[link][flow]
        self._changed(flow.path)

    def remaining(self, flow: Flow) -> float:
        """Return the bytes still to go."""
        self._advance(flow)
        return flow.total - flow.sent

    def capacity(self, path: tuple[str, ...]) -> float:
        """Return what a flow alone gets there, in bytes/s."""
        return min(self._capacities[link] for link in path)

    def rate(self, flow: Flow) -> float:
        """Return what a flow moves now, in bytes/s."""
        self._advance(flow)
        return flow._rate if flow.is_active else 0.0

    def check(self) -> None:
        """Raise AssertionError when a link carries more than it can."""
        for link, flows in self._flows.items():
            load = sum(flow._rate for flow in flows if flow.is_active)
            assert load <= self._capacities[link] * (1 + 1e-9), f"{link} carries {load} bytes/s"

    # --- inside

    def _changed(self, path: tuple[str, ...]) -> None:
        """Work out shares and next events of all flows that these links reach."""
        flows = self._component(path)
        for flow in flows:
            self._advance(flow)
        alone = len(flows) == 1
        rates = fair_shares(flows if alone else self._going(flows), self._capacities)
        for flow in flows:
            flow._rate = rates.get(flow, 0.0)
            self._plan(flow, alone)

    def _going(self, flows: list[Flow]) -> list[Flow]:
        """Return the flows that send: of each line the first, by the rule at the top of the file."""
        going: dict[object, Flow] = {}
        for flow in flows:
            if flow.is_active and (flow.line not in going or self._key(flow) < self._key(going[flow.line])):
                going[flow.line] = flow
        return list(going.values())

    def _key(self, flow: Flow) -> float:
        return flow.total - flow.sent - (self._agenda.now_s - flow.opened_s) * self.capacity(flow.path)

    def _component(self, path: tuple[str, ...]) -> list[Flow]:
        found: dict[Flow, None] = {}
        links, seen = list(path), set(path)
        while links:
            for flow in self._flows[links.pop()]:
                if flow not in found:
                    found[flow] = None
                    new = [link for link in flow.path if link not in seen]
                    seen.update(new)
                    links += new
        return list(found)

    def _plan(self, flow: Flow, alone: bool) -> None:
        """Plan the next time at which this flow changes by itself: it ends, runs dry, or has something to send again.

        One that is alone disturbs nobody when it runs dry, so only its end counts.
        """
        flow._version += 1
        version = flow._version
        if flow.sent >= flow.total:  # it ended at the very moment at which another one changed
            next_s = self._agenda.now_s
        elif alone or flow.is_active:
            next_s = _dry_s(flow, through_gaps=alone)
        else:
            next_s = _next_piece_s(flow)
        if next_s < math.inf:
            self._agenda.at(next_s, lambda: self._due(flow, version))

    def _due(self, flow: Flow, version: int) -> None:
        if flow._version != version:
            return
        self._advance(flow)
        if flow.sent >= flow.total:
            self.close(flow)
            flow.on_end()
        else:
            self._changed(flow.path)

    def _advance(self, flow: Flow) -> None:
        """Bring what was sent up to now, at the rate of before."""
        now_s, rate, pieces = self._agenda.now_s, flow._rate, flow._pieces
        time_s = flow._now_s
        while True:
            while pieces and pieces[-1][0] <= time_s:
                flow._available = pieces.pop()[1]
            if time_s >= now_s:
                break
            until_s = min(now_s, pieces[-1][0]) if pieces else now_s
            if flow.sent < flow._available and rate > 0.0:
                if flow.first_byte_s is None:
                    flow.first_byte_s = time_s
                dry_s = time_s + (flow._available - flow.sent) / rate
                if dry_s <= until_s:
                    flow.sent, time_s = flow._available, max(dry_s, time_s)
                    continue
                flow.sent += rate * (until_s - time_s)
            time_s = until_s
        if flow._available - flow.sent <= rate * _ROUNDING_S:
            flow.sent = flow._available
        flow._now_s = now_s


def fair_shares(flows: list[Flow], capacities: Mapping[str, float]) -> dict[Flow, float]:
    """Return the max-min fair rate of each flow, in bytes/s."""
    left: dict[str, float] = {}
    count: dict[str, int] = {}
    for flow in flows:
        for link in flow.path:
            left[link] = capacities[link]
            count[link] = count.get(link, 0) + 1
    rates: dict[Flow, float] = {}
    while count:
        tightest = min(count, key=lambda link: left[link] / count[link])
        share = max(0.0, left[tightest] / count[tightest])
        for flow in flows:
            if flow in rates or tightest not in flow.path:
                continue
            rates[flow] = share
            for link in flow.path:
                left[link] -= share
                count[link] -= 1
                if not count[link]:
                    del count[link]
    return rates


def _next_piece_s(flow: Flow) -> float:
    return flow._pieces[-1][0] if flow._pieces else math.inf


def _dry_s(flow: Flow, *, through_gaps: bool) -> float:
    """Return when everything that is available is sent, or (`through_gaps`) everything that is known of."""
    time_s, sent, available = flow._now_s, flow.sent, flow._available
    at = len(flow._pieces)
    if flow._rate <= 0.0 or (sent >= available and not at):
        return math.inf
    while True:
        while at and flow._pieces[at - 1][0] <= time_s:
            at -= 1
            available = flow._pieces[at][1]
        dry_s = time_s + (available - sent) / flow._rate
        if at and flow._pieces[at - 1][0] < dry_s:
            step_s = flow._pieces[at - 1][0] - time_s
            sent, time_s = sent + flow._rate * step_s, flow._pieces[at - 1][0]
            continue
        if not (at and through_gaps):
            return dry_s
        sent, time_s = available, flow._pieces[at - 1][0]
