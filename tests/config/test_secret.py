"""Where the secret comes from, and when there must be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tollbridge.config.cluster import ClusterConfig, RouterConfig, SecretConfig, WorkerConfig
from tollbridge.config.secret import is_local, maybe_secret, require_secret, secret_for_local
from tollbridge.errors import ConfigError

STRONG = "0123456789abcdef"


def test_the_variable_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from-the-file-16b\n")
    config = SecretConfig(env="S", file=str(file))
    assert maybe_secret(config, {"S": STRONG}) == STRONG.encode()
    assert maybe_secret(config, {}) == b"from-the-file-16b"


def test_a_missing_secret_says_how_to_make_one() -> None:
    assert maybe_secret(SecretConfig(), {}) is None
    with pytest.raises(ConfigError, match=r"set TOLLBRIDGE_SECRET to at least 16 random bytes"):
        require_secret(SecretConfig(), {})


def test_a_short_secret_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="has 15 bytes: it must have at least 16") as caught:
        require_secret(SecretConfig(), {"TOLLBRIDGE_SECRET": STRONG[:15]})
    assert STRONG[:15] not in caught.value.message


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        maybe_secret(SecretConfig(file=str(tmp_path / "none")), {})
    (tmp_path / "binary").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        maybe_secret(SecretConfig(file=str(tmp_path / "binary")), {})


def test_on_loopback_one_is_made_on_the_spot() -> None:
    first, second = (secret_for_local(ClusterConfig(), {}) for _ in range(2))
    assert len(first) == 64
    assert first != second
    assert secret_for_local(ClusterConfig(), {"TOLLBRIDGE_SECRET": STRONG}) == STRONG.encode()


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(router=RouterConfig(host="0.0.0.0")),
        ClusterConfig(workers=[WorkerConfig(name="a", kv="10.0.0.1:0")]),
        ClusterConfig(workers=[WorkerConfig(name="a", url="http://node-b:1")]),
        ClusterConfig(workers=[WorkerConfig(name="a", events="tcp://[2001:db8::1]:1")]),
    ],
)
def test_beyond_loopback_it_is_required(cluster: ClusterConfig) -> None:
    assert not is_local(cluster)
    with pytest.raises(ConfigError, match="there is no cluster secret"):
        secret_for_local(cluster, {})


def test_loopback_has_several_names() -> None:
    worker = WorkerConfig(name="a", url="http://localhost:1", kv="[::1]:0", events=None)
    assert is_local(ClusterConfig(router=RouterConfig(host="127.0.0.2"), workers=[worker]))
