"""Addresses parse to host and port, and print as they were written."""

from __future__ import annotations

import pytest

from tollbridge.config.address import Address, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "scheme", "address"),
    [
        ("127.0.0.1:0", "", Address(host="127.0.0.1", port=0)),
        ("http://node-a:8101", "http://", Address(host="node-a", port=8101)),
        ("http://node-a:8101/", "http://", Address(host="node-a", port=8101)),
        ("tcp://[::1]:5", "tcp://", Address(host="::1", port=5)),
    ],
)
def test_parses(text: str, scheme: str, address: Address) -> None:
    assert parse_address(text, scheme=scheme) == address
    assert scheme + str(address) == text.removesuffix("/")


@pytest.mark.parametrize("text", ["", "h", ":1", "h:", "h:-1", "h:65536", "h:²", "::1:5", "a/b:1", "u@h:1", "h :1"])
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_address(text)


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.9.9.9", "::1", "0.0.0.0", "node-a", "10.0.0.1")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
