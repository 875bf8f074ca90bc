"""What the cluster file says of transfers, as media."""

from __future__ import annotations

from typing import Any

import pytest

from tollbridge.config.cluster import ClusterConfig, TlsConfig, TransferConfig, WorkerConfig
from tollbridge.errors import ConfigError
from tollbridge.transfer.base import Fingerprint
from tollbridge.transfer.memory import HostMemory
from tollbridge.worker.media import maybe_media

WORKER = WorkerConfig(name="w")
SECRET = b"a-secret-of-the-worker-tests"
FINGERPRINT = Fingerprint(
    model="m", dtype="float32", num_layers=1, num_kv_heads=1, head_size=1, block_size=16, layout="token-major:k,v"
)


class NoMemory(HostMemory):
    num_layers = num_blocks = 1
    block_size = 16
    granule_bytes = 8

    def views(self, *_: Any) -> list[memoryview]:
        return []


def test_without_a_secret_there_are_none() -> None:
    assert maybe_media(ClusterConfig(), WORKER, None) is None


def test_the_address_is_known_once_the_sender_listens() -> None:
    media = maybe_media(ClusterConfig(), WORKER, SECRET)
    assert media is not None
    assert media.kv is None
    assert media.statistics() == {}
    sender = media.make_sender(NoMemory(), FINGERPRINT)
    receiver = media.make_receiver(NoMemory(), FINGERPRINT)
    try:
        host, port = sender.address
        assert media.kv == f"{host}:{port}"
        assert port > 0
        assert set(media.statistics()) == {"send", "receive"}
    finally:
        sender.close()
        receiver.close()


def test_tls_reaches_the_media() -> None:
    tls = TlsConfig(cert="absent.pem", key="absent.key", ca="absent-ca.pem")
    media = maybe_media(ClusterConfig(transfer=TransferConfig(tls=tls)), WORKER, SECRET)
    assert media is not None
    with pytest.raises(ConfigError, match=r"transfer\.tls cannot be used .*absent\.pem"):
        media.make_sender(NoMemory(), FINGERPRINT)


def test_streams_and_ring_reach_the_media() -> None:
    media = maybe_media(ClusterConfig(transfer=TransferConfig(streams=4, ring_mib=32)), WORKER, SECRET)
    assert media is not None
    assert (media.options.streams, media.options.ring_bytes) == (4, 32 << 20)
    auto = maybe_media(ClusterConfig(), WORKER, SECRET)
    assert auto is not None
    assert (auto.options.streams, auto.options.ring_bytes) == (None, None)


@pytest.mark.parametrize("media", ["auto", "tcp", "shm"])
def test_the_medium_reaches_the_options(media: Any) -> None:
    made = maybe_media(ClusterConfig(transfer=TransferConfig(media=media)), WORKER, SECRET)
    assert made is not None
    assert made.options.media == media


def test_loopback_is_refused() -> None:
    with pytest.raises(ConfigError, match="loopback"):
        maybe_media(ClusterConfig(transfer=TransferConfig(media="loopback")), WORKER, SECRET)
