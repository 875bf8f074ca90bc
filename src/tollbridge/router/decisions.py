"""The recent decisions, newest first: a bounded ring behind `/decisions`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from tollbridge.wire.decision import DecisionRecord


@dataclass(frozen=True, kw_only=True)
class DecisionsStatistics:
    held: int
    bound: int
    recorded_total: int


class Decisions:
    """Remembers the last `bound` records by request id. A record is filled in while its request runs."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._recorded_total = 0

    def add(self, record: DecisionRecord) -> None:
        """Remember `record`; the oldest one falls out. A later request with the same id replaces the earlier."""
        self._records.pop(record.decision.id, None)
        self._records[record.decision.id] = record
        self._recorded_total += 1
        if len(self._records) > self._bound:
            self._records.popitem(last=False)

    def maybe_get(self, request_id: str) -> DecisionRecord | None:
        """Return the record of that request, None when unknown or forgotten."""
        return self._records.get(request_id)

    def recent(self, limit: int) -> list[DecisionRecord]:
        """Return up to `limit` records, newest first."""
        return list(islice(reversed(self._records.values()), limit))

    def statistics(self) -> DecisionsStatistics:
        return DecisionsStatistics(held=len(self._records), bound=self._bound, recorded_total=self._recorded_total)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._records) <= self._bound
        assert all(key == record.decision.id for key, record in self._records.items())
