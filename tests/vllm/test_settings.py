"""kv_connector_extra_config."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.fakes import SECRET
from tollbridge.errors import ConfigError
from tollbridge.vllm.settings import read_settings

ENVIRON = {"TOLLBRIDGE_SECRET": SECRET.decode(), "OTHER": "another-secret-0123456789"}


def test_defaults() -> None:
    settings = read_settings({}, ENVIRON)
    options = settings.options(tp_rank=0)
    assert (options.bind_host, options.bind_port, options.secret) == ("127.0.0.1", 7801, SECRET)


def test_each_rank_has_its_port() -> None:
    settings = read_settings({"kv_host": "10.0.0.1", "kv_port": 9000}, ENVIRON)
    assert settings.options(tp_rank=3).bind_port == 9003
    assert read_settings({"kv_port": 0}, ENVIRON).options(tp_rank=3).bind_port == 0


def test_options_of_the_transfer() -> None:
    extra = {"bandwidth_cap_bytes_per_s": 1e6, "open_timeout_s": 3, "advertise_host": "node-a"}
    options = read_settings(extra, ENVIRON).options(tp_rank=0)
    assert options.bandwidth_cap_bytes_per_s == 1e6
    assert options.open_timeout_s == 3
    assert options.advertise_host == "node-a"


def test_another_variable() -> None:
    assert read_settings({"secret_env": "OTHER"}, ENVIRON).secret == ENVIRON["OTHER"].encode()


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"kv_prot": 1}, "did you mean kv_port"),
        ({"zzz": 1}, "known are"),
        ({"kv_port": "7801"}, "kv_port"),
        ({"kv_port": 70000}, "65535"),
        ({"bind_port": 1}, "did you mean"),
        ({"heartbeat_s": -1}, "heartbeat_s"),
        ({"max_pinned_fraction": 1.5}, "max_pinned_fraction"),
        ({"max_pinned_fraction": 0}, "max_pinned_fraction"),
        ({"secret_env": "NOWHERE"}, "NOWHERE"),
    ],
)
def test_mistakes(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_settings(extra, ENVIRON)


def test_the_secret_is_not_in_a_repr() -> None:
    assert SECRET.decode() not in repr(read_settings({}, ENVIRON))
