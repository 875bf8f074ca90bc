"""A probe against a server whose speed is known, over HTTP."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.timed_server import Speed, TimedServer
from tests.support.timing import once_below
from tollbridge.clock import SystemClock
from tollbridge.errors import (
    AuthenticationError,
    ModelNotFoundError,
    RequestError,
    TollbridgeError,
    UnavailableError,
    UnsupportedError,
    UpstreamError,
)
from tollbridge.probe.engine import Effort, EngineProbe, EngineReport, step_of
from tollbridge.probe.run import probe_engine
from tollbridge.probe.server import Served, Server, Timing

BRIEF = Effort(budget_s=8.0, repeats=2, batches=(1, 4, 8), max_length=4096)
TINY = Effort(budget_s=0.5, repeats=1, batches=(1, 2), max_length=512)
FAST = Speed(alpha_s=0.0005, beta_s=1e-6, gamma_s=0.0, step_s=0.001, per_decode_s=0.0)


async def probe(server: TimedServer, effort: Effort = TINY, **given: Any) -> EngineReport:
    return await probe_engine(
        server.url, **{"model": None, "api_key": None, "budget": None, **given}, effort=effort, tell=lambda *_: None
    )


@pytest.mark.slow
async def test_with_the_servers_metrics_the_fit_is_its_speed() -> None:
    speed = Speed(budget=1024)
    async with TimedServer(speed).serving() as server:
        report = await probe(server, BRIEF, budget=1024)
    fit, decode = report.calibration.prefill, report.calibration.decode
    assert fit.alpha_s == pytest.approx(speed.alpha_s, rel=0.05)
    assert fit.beta_s_per_token == pytest.approx(speed.beta_s, rel=0.02)
    assert fit.gamma_s_per_token2 == pytest.approx(speed.gamma_s, rel=0.05)
    assert fit.residual < 0.01
    assert decode is not None
    assert decode.step_s == pytest.approx(speed.step_s, rel=0.1)
    assert 8 * decode.per_decode_s == pytest.approx(8 * speed.per_decode_s, abs=0.1 * speed.step_s)
    assert {sample.source for sample in report.calibration.samples[:5]} == {"metrics"}
    assert any(getattr(sample, "context", 0) >= 1024 for sample in report.calibration.samples)
    assert report.calibration.max_num_batched_tokens == 1024
    assert report.notes == []
    assert not server.hits % 16, "only the shared prefixes were cached"
    assert len({tuple(prompt[:16]) for prompt in server.prompts if len(prompt) == 384}) >= 2, "nothing is asked twice"


@pytest.mark.slow
async def test_without_metrics_ttft_less_the_fixed_cost_is_close() -> None:
    speed = Speed(fixed_s=0.05)

    async def error() -> float:
        """Return the worst of three figures as a share of its tolerance."""
        async with TimedServer(speed, metrics=False).serving() as server:
            report = await probe(server, BRIEF)
        assert "no metrics" in report.notes[0]
        fit = report.calibration.prefill
        errors = [abs(report.fixed_s - 0.05) / 0.01]
        for tokens in (1024, 4096):
            chunks = -(-tokens // 2048)
            true_s = chunks * speed.alpha_s + tokens * (speed.beta_s + speed.gamma_s * tokens / 2)
            fitted_s = chunks * fit.alpha_s + tokens * (fit.beta_s_per_token + fit.gamma_s_per_token2 * tokens / 2)
            errors.append(abs(fitted_s / true_s - 1.0) / 0.1)
        return max(errors)

    await once_below(1.0, error)


async def test_lengths_keep_to_a_short_model_and_ids_to_a_small_vocabulary() -> None:
    server = TimedServer(FAST)
    server.max_model_len, server.vocabulary = 300, 512
    async with server.serving():
        report = await probe(server)
    assert max(map(len, server.prompts)) <= 300
    assert max(max(prompt) for prompt in server.prompts) < 512
    assert report.served.max_model_len == 300


@pytest.mark.parametrize(
    ("change", "given", "kind", "says"),
    [
        ({"foreign_open": 2}, {}, UnavailableError, "serving somebody else (2 requests that are not ours are open)"),
        ({"foreign_each": 1}, {}, UnavailableError, "(1 requests that are not ours ended meanwhile)"),
        ({"api_key": "k"}, {}, AuthenticationError, "wants an API key (401)"),
        ({}, {"model": "other"}, ModelNotFoundError, "give --model with one of timed"),
        ({"streams": False}, {}, UnsupportedError, "does not stream (it answered application/json)"),
        ({"vocabulary": 20}, {}, UnsupportedError, "takes no prompt of token ids"),
        ({"lie": b"{nonsense"}, {}, UpstreamError, "an event that is no answer"),
        ({"lie": b'{"choices": [{}], "usage": "many"}'}, {}, UpstreamError, "an event that is no answer"),
        ({"lie": b'{"usage": {"completion_tokens": "x"}}'}, {}, UpstreamError, "an event that is no answer"),
        ({"lie": b'{"error": {"message": "no room"}}'}, {}, UpstreamError, "failed: no room"),
        ({"lie": b'{"choices": []}'}, {}, UpstreamError, "without a token"),
        ({"details": {"cached_tokens": 5000}}, {}, UnsupportedError, "5000 of 24 prompt tokens were cached"),
        ({"collects": True}, {}, UnsupportedError, "sends many tokens at once"),
    ],
)
async def test_nonsense_is_refused_in_one_sentence(
    change: dict[str, Any], given: dict[str, Any], kind: type[TollbridgeError], says: str
) -> None:
    server = TimedServer(FAST)
    vars(server).update(change)
    async with server.serving():
        with pytest.raises(kind) as caught:
            await probe(server, **given)
    assert says in caught.value.message
    assert "\n" not in caught.value.message


async def test_the_key_is_sent() -> None:
    server = TimedServer(FAST)
    server.api_key = "k"
    async with server.serving():
        assert (await probe(server, api_key="k")).served.model == "timed"


async def test_others_that_come_during_the_probe_end_it() -> None:
    server = TimedServer(FAST)

    def come(what: str, done: float) -> None:
        if what.startswith("prefill, 48"):
            server.foreign_open = 1

    async with server.serving():
        with pytest.raises(UnavailableError, match="1 requests that are not ours are open"):
            async with Server(server.url) as asked:
                served = Served(model="timed", max_model_len=4096)
                probe = EngineProbe(
                    asked, served, effort=TINY, clock=SystemClock(), rng=random.Random(1), tell=come, settle_s=0.1
                )
                await probe.run()


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [("http://127.0.0.1:1", UnavailableError, "Nobody answers"), ("nonsense", RequestError, "is no URL")],
)
async def test_no_server(url: str, kind: type[TollbridgeError], says: str) -> None:
    with pytest.raises(kind, match=says):
        await probe_engine(url, model=None, api_key=None, budget=None, effort=TINY, tell=lambda *_: None)


def test_a_step_counts_only_while_all_decode() -> None:
    early = Timing(sent_s=0.0, arrivals=[(0.1 * i, i) for i in range(1, 21)])
    late = Timing(sent_s=0.0, arrivals=[(1.0 + 0.2 * i, i) for i in range(1, 6)])
    assert step_of([early, late]) == pytest.approx(0.15, abs=0.06)
    never = Timing(sent_s=0.0, arrivals=[(5.0, 1), (6.0, 2)])
    assert step_of([early, never]) is None
