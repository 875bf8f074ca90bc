"""Where a session is at home. It decides between workers that cost the same, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from tollbridge.policy.views import RequestView, WorkerView


def home_of(request: RequestView, workers: Iterable[WorkerView]) -> str | None:
    """Return who of `workers` is the home of the request's session; None without a session.

    It is the one that served it last. If that is not among them, or not known (to another router), the highest hash
    wins: the same one as long as the workers are the same, and when one leaves only its own sessions move.
    """
    if request.session is None:
        return None
    names = [worker.name for worker in workers]
    if request.home in names:
        return request.home
    return max(names, key=lambda name: crc32(f"{request.session}\0{name}".encode()), default=None)
