"""Fixtures of the transfer tests: media that are closed and checked, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.transfer.harness import Pair, PairMaker, make_pair, need_nixl


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not left, f"threads left behind: {left}"


MEDIA = [
    "tcp",
    "tcp-4",
    "tls",
    "tls-3",
    "device",
    "device-4",
    "shm",
    "shm-3",
    "nixl",
    "process-2",
    "remote-2",
    "loopback",
]


@pytest.fixture(params=MEDIA)  # a number: so many streams
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(medium: str) -> Iterator[PairMaker]:
    """Build pairs of the medium under test; they are checked and closed afterwards."""
    if medium.startswith("nixl"):
        need_nixl()
    pairs: list[Pair] = []

    def build(*args: object, **kwargs: object) -> Pair:
        pairs.append(make_pair(medium, *args, **kwargs))  # type: ignore[arg-type]
        return pairs[-1]

    yield build
    for pair in pairs:
        pair.close()


@pytest.fixture(params=["shm", "shm-3", "nixl", "nixl-3"])
def ring_medium(request: pytest.FixtureRequest) -> str:
    """A medium whose payloads go through a ring."""
    if request.param.startswith("nixl"):
        need_nixl()
    return str(request.param)


@pytest.fixture
def make_tcp() -> Iterator[PairMaker]:
    """Build TCP pairs; they are checked and closed afterwards."""
    pairs: list[Pair] = []

    def build(*args: object, **kwargs: object) -> Pair:
        pairs.append(make_pair("tcp", *args, **kwargs))  # type: ignore[arg-type]
        return pairs[-1]

    yield build
    for pair in pairs:
        pair.close()
