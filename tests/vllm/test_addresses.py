"""The address for KV."""

from __future__ import annotations

import pytest

from tollbridge.config.address import is_loopback
from tollbridge.errors import ConfigError
from tollbridge.vllm.addresses import free_port, is_wildcard, kv_host, routable_address


@pytest.mark.parametrize(
    ("host", "given", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", None, "localhost"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "10.9.0.1", "10.9.0.1"),  # a network of its own for KV
        ("0.0.0.0", "10.9.0.1", "10.9.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.1", "10.0.0.1"),
    ],
)
def test_kv_host(host: str, given: str | None, expected: str) -> None:
    assert kv_host(host, given) == expected


@pytest.mark.parametrize(
    ("host", "given", "words"),
    [
        ("0.0.0.0", "0.0.0.0", "no address that another worker could dial"),
        ("10.0.0.1", "::", "no address that another worker could dial"),
        ("0.0.0.0", "127.0.0.1", "reaches this machine only"),
        ("10.0.0.1", "localhost", "reaches this machine only"),
    ],
)
def test_addresses_that_would_break_every_split_are_refused(host: str, given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kv_host(host, given)


def test_for_all_interfaces_the_routable_address_is_found() -> None:
    try:
        expected = routable_address()
    except ConfigError as error:
        assert "--kv-host" in error.message  # a machine without a network
        return
    assert kv_host("0.0.0.0", None) == kv_host("::", None) == expected
    assert not is_loopback(expected)
    assert not is_wildcard(expected)


def test_free_port() -> None:
    assert 0 < free_port("127.0.0.1") < 65536
