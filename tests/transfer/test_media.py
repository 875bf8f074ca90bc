"""Which medium a pair gets: what both sides say, what this machine has, and what is refused with which sentence."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.transfer.harness import (
    DIGEST,
    FINGERPRINT,
    TOKEN_BYTES,
    Cache,
    Pair,
    PairMaker,
    make_pair,
    need_nixl,
    new_id,
    tls_files,
)
from tollbridge.errors import ConfigError, TransferError
from tollbridge.transfer import nixl, routes, shm
from tollbridge.transfer.base import Reason, TransferEnd
from tollbridge.transfer.messages import Ring
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.shm import ShmInlet, ShmOutlet
from tollbridge.transfer.stage import DirectStage
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

TABLE = list(range(64))


@pytest.fixture
def make() -> Iterator[PairMaker]:
    """Build pairs whose prefill and decode ask for these media."""
    pairs: list[Pair] = []

    def build(prefill: str, decode: str, **options: object) -> Pair:
        send, receive = TransferOptions(media=prefill, **options), TransferOptions(media=decode, **options)  # type: ignore[arg-type]
        pairs.append(make_pair("tcp", send, receive_options=receive))
        return pairs[-1]

    yield build
    for pair in pairs:
        pair.close()


def transfer(pair: Pair) -> tuple[TransferEnd, TransferEnd]:
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.sender.publish(transfer_id, TABLE, 100)
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    return pair.ends(transfer_id)


def refused(pair: Pair) -> str:
    transfer_id = new_id()
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.HANDSHAKE)
    return received.detail


@pytest.mark.parametrize(
    ("prefill", "decode", "medium"),
    [
        ("auto", "auto", "tcp"),
        ("shm", "shm", "shm"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
        ("shm", "auto", "shm"),
        ("auto", "shm", "shm"),
    ],
)
def test_what_a_pair_gets(make: PairMaker, prefill: str, decode: str, medium: str) -> None:
    pair = make(prefill, decode)
    assert [(end.outcome, end.medium) for end in transfer(pair)] == [("done", medium)] * 2


def test_the_outcome_is_logged_and_counted(make: PairMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = make("auto", "shm")
    transfer(pair)
    assert "comes over shm." in caplog.text
    assert "KV goes over shm." in caplog.text
    for side in (pair.sender, pair.receiver):
        assert side.statistics().medium == ("auto" if side is pair.sender else "shm")
        assert side.statistics().num_connections_by_medium == {"shm": 1}


@pytest.mark.parametrize(("prefill", "decode"), [("tcp", "shm"), ("shm", "tcp")])
def test_two_that_do_not_fit_are_refused(make: PairMaker, prefill: str, decode: str) -> None:
    assert f"transfer.media is {decode} here and {prefill} there" in refused(make(prefill, decode))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let prefill look for rings where there are none, as on another host."""
    monkeypatch.setattr(shm, "_open", lambda path, size, real=shm._open: real(tmp_path / path.name, size))


@pytest.fixture
def keen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` prefer a ring, as it does where there is RDMA."""
    monkeypatch.setattr(routes.MediaRoutes, "names", lambda self, same_host: ("shm", "tcp"))


@pytest.mark.usefixtures("elsewhere", "keen")
def test_a_ring_that_cannot_be_reached_leaves_tcp(make: PairMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert [end.medium for end in transfer(make("auto", "auto"))] == ["tcp", "tcp"]
    assert "prefill could not take the shm ring: The peer's ring is not in /dev/shm here" in caplog.text


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("sides", [("shm", "shm"), ("auto", "shm"), ("shm", "auto")])
def test_a_ring_that_cannot_be_reached_is_refused(make: PairMaker, sides: tuple[str, str]) -> None:
    detail = refused(make(*sides))
    assert "transfer.media is" in detail
    assert "The peer's ring is not in /dev/shm here" in detail


@pytest.mark.parametrize("medium", ["auto", "shm"])
def test_no_room_for_a_ring(
    make: PairMaker, medium: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if medium == "auto":
        request.getfixturevalue("keen")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = names()
    pair = make(medium, medium)
    if medium == "auto":
        assert [end.medium for end in transfer(pair)] == ["tcp", "tcp"]
    else:
        assert "No space left" in refused(pair)
    assert names() <= before


def test_the_file_is_for_its_user_and_goes_away() -> None:
    inlet = ShmInlet(granule_bytes=8)
    path = shm.FOLDER / inlet.ring().name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    outlet = ShmOutlet(inlet.ring())
    inlet.taken()
    assert not path.exists()
    outlet.close()
    inlet.close()
    inlet.close()


def names() -> set[str]:
    return {path.name for path in shm.FOLDER.glob(f"{shm._PREFIX}*")}


def test_no_name_and_no_mapping_is_left() -> None:
    before = names()
    pair = make_pair("shm")
    transfer(pair)
    assert names() <= before  # others may run at the same time
    assert mapped() == 2
    pair.close()
    assert mapped() == 0


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count(f"{shm.FOLDER / shm._PREFIX}")


def ring(**fields: object) -> Ring:
    return Ring(**{"medium": "shm", "num_slots": 1, "slot_bytes": 4096, "name": "", **fields})  # type: ignore[arg-type]


@pytest.fixture
def file() -> Iterator[Path]:
    path = shm.FOLDER / f"{shm._PREFIX}{new_id()}"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.chmod(0o640), "open to others"),
        (lambda path: os.truncate(path, 4095), "another size"),
        (lambda path: path.unlink(), "is not in"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "is not in"),
    ],
    ids=["mode", "size", "absent", "link"],
)
def test_a_file_that_is_not_what_was_said(file: Path, spoil: Callable[[Path], object], why: str) -> None:
    ShmOutlet(ring(name=file.name)).close()
    spoil(file)
    with pytest.raises(TransferError, match=why):
        ShmOutlet(ring(name=file.name))


@pytest.mark.parametrize("name", ["", "../etc/passwd", "psm_1", "tollbridge-" + "g" * 32, "tollbridge-" + "a" * 33])
def test_a_name_that_is_no_ring(name: str) -> None:
    with pytest.raises(TransferError, match="no ring of ours"):
        ShmOutlet(ring(name=name))


def test_a_slot_that_is_too_small() -> None:
    pair = make_pair("tcp")
    memory = pair.send_cache.memory
    made = routes.MediaRoutes(
        TransferOptions(media="shm"), DirectStage(memory, 4096), granule_bytes=memory.granule_bytes
    )
    with pytest.raises(TransferError, match="too small for 96"):
        made.outlet(ring(slot_bytes=95))
    pair.close()


def test_auto_has_shm_for_neighbours_that_insist() -> None:
    pair = make_pair("tcp")
    made = routes.MediaRoutes(TransferOptions(media="auto"), DirectStage(pair.send_cache.memory, 4096), granule_bytes=8)
    assert made.names(lambda: True) == ("tcp", "shm")
    assert made.names(lambda: False) == ("tcp",)
    pair.close()


def test_nixl_must_be_installed(monkeypatch: pytest.MonkeyPatch, make: PairMaker) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package nixl: pip install 'tollbridge\[nixl\]'"):
        make("nixl", "nixl")
    assert not nixl.has_fast_link()


def test_nixl_is_refused_with_tls() -> None:
    with pytest.raises(ConfigError, match="outside of TLS"):
        TransferOptions(media="nixl", tls=tls_files()[0])


@pytest.mark.parametrize(("state", "fast"), [("4: ACTIVE\n", True), ("1: DOWN\n", False), (None, False)])
def test_auto_looks_for_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, fast: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    if state is not None:
        port = tmp_path / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert nixl.has_fast_link(tmp_path) == fast


def test_auto_takes_nixl_where_both_have_rdma(make: PairMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    need_nixl()
    assert [end.medium for end in transfer(make("nixl", "nixl"))] == ["nixl", "nixl"]
    monkeypatch.setattr(routes, "has_fast_link", lambda: True)
    assert [end.medium for end in transfer(make("auto", "auto"))] == ["nixl", "nixl"]
    assert [end.medium for end in transfer(make("auto", "shm"))] == ["shm", "shm"]


def test_an_unknown_medium_is_refused() -> None:
    with pytest.raises(ConfigError, match="media must be one of auto, tcp, shm, nixl, not 'pigeon'"):
        TransferOptions(media="pigeon")


@pytest.mark.parametrize(
    ("kind", "medium"),
    [("tls", "shm"), ("device", "shm"), ("device-4", "shm"), ("device", "nixl"), ("device-4", "nixl")],
)
def test_a_ring_under_tls_and_of_a_device(kind: str, medium: str) -> None:
    """Payloads between neighbours do not pass TLS, everything else does; a GPU's pinned ring feeds the other ring."""
    if medium == "nixl":
        need_nixl()
    pair = make_pair(kind, TransferOptions(media=medium))
    ends = transfer(pair)
    assert [(end.outcome, end.medium) for end in ends] == [("done", medium)] * 2
    assert np.array_equal(pair.send_cache.tokens(TABLE, 0, 100), pair.receive_cache.tokens(TABLE, 0, 100))
    pair.close()


@pytest.mark.parametrize("medium", ["shm", "nixl"])
def test_an_encoded_payload_goes_through_a_ring(medium: str) -> None:
    """It lies in memory of its own, which no NIC was shown."""
    if medium == "nixl":
        need_nixl()
    options = TransferOptions(media=medium, codec="fp8")
    caches = [Cache(64, 16, seed=seed, token_bytes=TOKEN_BYTES) for seed in (1, 2)]
    for cache in caches:
        cache.slots.view(np.float16)[:] = 1.5  # exact in E4M3
    sender = TcpSender(caches[0].memory, FINGERPRINT, options)
    pair = Pair(medium, *caches, sender, TcpReceiver(caches[1].memory, FINGERPRINT, options))
    caches[1].array[:] = 0
    assert [(end.outcome, end.medium) for end in transfer(pair)] == [("done", medium)] * 2
    assert np.array_equal(caches[0].tokens(TABLE, 0, 100), caches[1].tokens(TABLE, 0, 100))
    pair.close()


@pytest.mark.parametrize("medium", ["shm", "nixl"])
def test_a_ring_of_the_process_that_moves_kv(medium: str) -> None:
    if medium == "nixl":
        need_nixl()
    pair = make_pair("process", TransferOptions(media=medium))
    assert [(end.outcome, end.medium) for end in transfer(pair)] == [("done", medium)] * 2
    assert np.array_equal(pair.send_cache.tokens(TABLE, 0, 100), pair.receive_cache.tokens(TABLE, 0, 100))
    assert pair.receiver.statistics().num_connections_by_medium.keys() == {medium}
    pair.close()
