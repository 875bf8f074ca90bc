"""How long the router takes to decide about one request, with a fleet of a given size."""

from __future__ import annotations


def decision_p99_s(num_workers: int, *, num_blocks: int, num_decisions: int) -> float:
    raise NotImplementedError
