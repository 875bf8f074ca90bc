"""Before a worker's SIGTERM: wait until routers have let go of it, nothing runs, and its KV has been fetched.

`python3 -m tollbridge.deploy.drain` is the preStop command of a worker. It needs the standard library only, because it
runs in the engine's image, and always ends with 0: a worker that cannot be asked is not kept alive.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections.abc import Callable

BUSY = ("num_requests_running", "num_requests_waiting", "tollbridge_pinned_blocks", "tollbridge:pinned_blocks")
_POLL_S = 0.5
_QUIET_POLLS = 3  # in a row: a request may be between two queues


def drain(
    read: Callable[[], str],
    *,
    propagation_s: float,
    handoff_s: float,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait, by `read` of the worker's metrics; return whether it became idle in time."""
    sleep(propagation_s)
    deadline_s, quiet = now() + handoff_s, 0
    while quiet < _QUIET_POLLS:
        if now() >= deadline_s:
            return False
        try:
            quiet = quiet + 1 if busy(read()) == 0 else 0
        except (OSError, ValueError):
            return False  # it is gone already, or does not say
        sleep(_POLL_S)
    return True


def busy(metrics: str) -> float:
    """Return how much a worker still has to do; ValueError when its metrics do not say."""
    lines = [line for line in metrics.splitlines() if not line.startswith("#")]
    values = [float(line.rpartition(" ")[2]) for line in lines if _name(line).endswith(BUSY)]
    if not values:
        raise ValueError("the worker has no metrics of requests")
    return sum(values)


def _name(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]


def _reader(port: int) -> Callable[[], str]:
    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            content: bytes = answer.read()
        return content.decode()

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description="Wait until a worker has nothing left to do.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--propagation-s", type=float, default=5)
    parser.add_argument("--handoff-s", type=float, default=60)
    given = parser.parse_args()
    drain(_reader(given.port), propagation_s=given.propagation_s, handoff_s=given.handoff_s)


if __name__ == "__main__":
    main()
