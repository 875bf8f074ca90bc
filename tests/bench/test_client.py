"""The client against a real server on loopback: what it times, and what it says of a server that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from benchmarks.support.upstream import Upstream

from tests.support.timing import once_below
from tollbridge.bench.answer import Answer
from tollbridge.bench.client import Client, Target
from tollbridge.bench.load import Load, Shape, decided
from tollbridge.bench.records import Planned, Sample
from tollbridge.errors import ConfigError

SHAPE = Shape(cell="c", block=0, arm="a", concurrency=1, drain_s=60.0)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream().serving() as server:
        yield server


async def ask(
    url: str, *, number: int = 1, max_tokens: int = 4, shape: Shape = SHAPE, stall_s: float = 60.0
) -> list[Sample]:
    planned = [(at, Planned(at_s=0.0, prompt=[1, 2, 3], max_tokens=max_tokens)) for at in range(number)]
    async with Client(stall_s=stall_s) as client:
        load = Load(client, Target.at(url, "/v1/completions", {}), {"stream": True})
        samples, _ = await load.run(shape, planned)
    return samples


async def test_times_are_those_of_the_server(upstream: Upstream) -> None:
    upstream.ttft_s, upstream.gap_s = 0.05, 0.02

    async def error_s() -> float:
        (sample,) = await ask(upstream.url)
        assert sample.ok and sample.num_tokens == 4 and sample.num_merged == 0
        assert sample.ttft_s is not None and sample.ttft_s >= 0.05
        assert len(sample.gaps_s) == 3 and sample.tpot_s == pytest.approx(sum(sample.gaps_s) / 3)
        assert (sample.num_prompt_tokens, sample.num_cached) == (3, 3)
        return max(sample.ttft_s - 0.05, abs(sum(sample.gaps_s) - 0.06))

    await once_below(0.03, error_s)


async def test_a_connection_is_used_again(upstream: Upstream) -> None:
    samples = await ask(upstream.url, number=5)
    assert all(sample.ok for sample in samples)
    assert upstream.num_connections == 1


@pytest.mark.parametrize(
    ("misbehave", "failure", "detail"),
    [
        ("http", "http", "503: out of KV"),
        ("error", "error", "worker lost"),
        ("garbage", "garbage", "SSH-2.0"),
        ("no_json", "garbage", "nonsense"),
        ("cut", "cut_short", "after 1 tokens"),
        ("empty", "empty", "without a token"),
        ("whole", "garbage", "no stream"),
    ],
)
async def test_a_server_that_misbehaves_is_named(upstream: Upstream, misbehave: str, failure: str, detail: str) -> None:
    upstream.misbehave = misbehave
    samples = await ask(upstream.url, number=2)
    assert [sample.failure for sample in samples] == [failure] * 2
    assert detail in samples[0].detail
    assert not samples[0].ok


@pytest.mark.parametrize(
    ("body", "kind", "failure", "detail"),
    [
        (b"<html>log in \x1b[31m</html>", "text/html", "garbage", "without events: <html>log in  [31m</html>"),
        (b"hello\n\nworld\n\n", "text/event-stream", "garbage", "without events"),
        (b"", "text/event-stream", "empty", "without a token"),
        (b": ping\n\ndata: [DONE]\n\n", "text/event-stream", "empty", "without a token"),
        (b'data: {"object": "error", "message": "no room"}\n\n', "text/event-stream", "error", "no room"),
    ],
)
def test_a_body_that_is_no_answer_is_named(body: bytes, kind: str, failure: str, detail: str) -> None:
    answer = Answer(0.0)
    answer.head(200, {"content-type": kind})
    answer.body(body[:5], 0.1)
    answer.body(body[5:], 0.2)
    answer.end()
    assert (answer.failure, detail in answer.detail) == (failure, True)


async def test_a_server_that_stalls_is_given_up(upstream: Upstream) -> None:
    upstream.misbehave = "stall"
    (sample,) = await ask(upstream.url, stall_s=0.3)
    assert sample.failure == "stalled" and sample.num_tokens == 1


async def test_what_has_not_ended_in_time_is_missed(upstream: Upstream) -> None:
    upstream.misbehave = "stall"
    for concurrency in (None, 1):
        (sample,) = await ask(
            upstream.url, shape=Shape(cell="c", block=0, arm="a", concurrency=concurrency, drain_s=0.2)
        )
        assert sample.failure == "stalled" and "had not ended" in sample.detail


@pytest.mark.parametrize("running_usage", [True, False])
async def test_two_tokens_in_a_chunk_are_counted_as_merged(upstream: Upstream, running_usage: bool) -> None:
    upstream.misbehave, upstream.running_usage = "two_per_chunk", running_usage
    (sample,) = await ask(upstream.url, max_tokens=8)
    assert (sample.num_tokens, sample.num_merged, len(sample.gaps_s)) == (8, 4, 3)


async def test_nobody_there() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    (sample,) = await ask(f"http://127.0.0.1:{port}")
    assert sample.failure == "connection" and str(port) in sample.detail


async def test_open_loop_sends_when_due_and_steady_streams_are_cut_at_the_end(upstream: Upstream) -> None:
    upstream.gap_s = 0.005
    times = [0.02, 0.05, 0.05, 0.12]
    planned = [
        (0, Planned(at_s=0.0, prompt=[1], max_tokens=100_000, group="steady")),
        *((at + 1, Planned(at_s=at_s, prompt=[1], max_tokens=2)) for at, at_s in enumerate(times)),
    ]

    async def longest_lag_s() -> float:
        async with Client() as client:
            load = Load(client, Target.at(upstream.url, "/v1/completions", {}), {"stream": True})
            samples, took_s = await load.run(Shape(cell="c", block=0, arm="a", duration_s=0.3), planned)
        steady, *others = samples
        assert steady.cut and steady.ok and steady.sent_s < 0.0
        assert all(one.ok for one in others) and [one.at_s for one in others] == times
        assert took_s >= 0.3
        assert 0 < len(list(steady.gaps_within(took_s))) < len(steady.gaps_s)
        assert min(one.lag_s for one in others) >= -0.001
        return max(one.lag_s for one in others)

    await once_below(0.1, longest_lag_s)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "localhost:80", "http://h:99999"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError):
        Target.at(url, "/v1/completions", {})


def test_a_decision_is_read_as_the_router_writes_it() -> None:
    told = decided('{"id": "cmpl-1", "choice": "split", "predicted": {"ttft_s": 0.1}}')
    assert told is not None and (told.id, told.choice) == ("cmpl-1", "split")
    assert decided(None) is None and decided("{}") is None and decided("nonsense") is None
