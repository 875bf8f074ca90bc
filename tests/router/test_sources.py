"""Where KV events are dialled."""

from __future__ import annotations

from typing import Any

import pytest

from tollbridge.router.sources import Source, said_by_vllm, source_of

URL = "http://w.example:8000"


@pytest.mark.parametrize(
    ("events", "replay", "said", "source"),
    [
        ("tcp://127.0.0.1:0", None, ("tcp://10.0.0.9:5557", "tcp://10.0.0.9:5558"), ("tcp://10.0.0.9:5557", "5558")),
        ("tcp://127.0.0.1:0", None, ("tcp://*:5557", "tcp://*:5558"), ("tcp://w.example:5557", "5558")),
        ("tcp://127.0.0.1:0", None, ("tcp://0.0.0.0:5557", None), ("tcp://w.example:5557", None)),
        ("tcp://10.0.0.5:5600", "tcp://10.0.0.5:5601", ("tcp://x:1", "tcp://x:2"), ("tcp://10.0.0.5:5600", "5601")),
        ("tcp://*:5600", None, (None, None), ("tcp://w.example:5600", None)),
        ("tcp://[::]:5600", None, (None, None), ("tcp://w.example:5600", None)),
        ("tcp://[fd00::1]:5600", None, (None, None), ("tcp://[fd00::1]:5600", None)),
        ("tcp://127.0.0.1:0", None, (None, None), None),
        ("tcp://127.0.0.1:0", None, ("ipc:///tmp/x", None), None),
        ("nonsense", None, ("tcp://host:99999", None), None),
        (None, None, ("tcp://10.0.0.9:5557", None), None),  # the cluster file says that there are none
    ],
)
def test_source(events: str | None, replay: str | None, said: tuple[Any, Any], source: Any) -> None:
    found = source_of(URL, events, replay, *said)
    if source is None:
        assert found is None
        return
    assert found is not None and found.events == source[0]
    assert (found.replay is None) is (source[1] is None)
    assert source[1] is None or str(found.replay).endswith(source[1])


def test_a_url_of_an_ipv6_host() -> None:
    assert source_of("http://[fd00::2]:1", "tcp://*:7", None, None, None) == Source("tcp://[fd00::2]:7", None)


def test_the_next_port() -> None:
    assert Source("tcp://[fd00::2]:7", None).with_neighbour() == Source("tcp://[fd00::2]:7", "tcp://[fd00::2]:8")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "e", "replay_endpoint": "r"}},
            ("e", "r"),
        ),
        ({"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "e"}}, ("e", None)),
        ({"0": {"enable_kv_cache_events": False, "publisher": "null", "endpoint": "e"}}, (None, None)),
        ({}, (None, None)),
        (None, (None, None)),
        ([1], (None, None)),
        ({"0": 3}, (None, None)),
    ],
)
def test_what_vllm_says(answer: Any, said: tuple[Any, Any]) -> None:
    assert said_by_vllm(answer) == said
