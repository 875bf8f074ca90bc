"""What is passed on as it comes: the stream of a response."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from tests.support.router_rig import QUICK, happens, rig
from tests.support.stub_worker import Behaviour

PATH = "/v1/responses"
ASKED = {"input": "a", "stream": True}


async def test_a_stream_passes_untouched() -> None:
    async with rig() as r:
        direct = r["d0"]
        async with r.session.post(direct.url + PATH, json=ASKED) as response:
            expected = await response.read()
        answer = await r.post({**ASKED, "kv_transfer_params": {"x": 1}}, path=PATH)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.body == expected
        assert direct.seen[-1].body == ASKED


@pytest.mark.parametrize("mode", ["error", "die"])
async def test_a_failure_before_the_stream_is_a_status(mode: str) -> None:
    async with rig() as r:
        r["d0"].behaviour["local"] = r["p0"].behaviour["local"] = Behaviour(mode)  # type: ignore[arg-type]
        answer = await r.post(ASKED, path=PATH)
        assert answer.status == 502
        assert "Worker" in answer.error


@pytest.mark.parametrize("behaviour", [Behaviour("die"), Behaviour("error", status=503)])
async def test_a_worker_that_failed_is_checked_at_once(behaviour: Behaviour) -> None:
    async with rig(limits=msgspec.structs.replace(QUICK, poll_interval_s=60.0)) as r:
        r["d0"].behaviour["local"], r["d0"].draining = behaviour, True
        assert (await r.post(ASKED, path=PATH)).status >= 500
        await r.until_ready("d0", False)


async def test_a_failure_within_the_stream_is_an_event() -> None:
    async with rig() as r:
        r["d0"].behaviour["local"] = Behaviour("die", after=2)
        answer = await r.post(ASKED, path=PATH)
        assert answer.status == 200
        *passed, last = answer.body.decode().removesuffix("\n\n").split("\n\n")
        assert len(passed) == 2
        name, data = last.split("\n")
        assert name == "event: error"
        told = json.loads(data.removeprefix("data: "))
        assert told["type"] == "error"
        assert told["message"] == told["error"]["message"]
        assert "d0" in told["message"]


async def test_events_stay_whole() -> None:
    """However the worker's bytes are cut, an error event does not come behind half of another."""
    async with rig() as r:
        r["d0"].behaviour["local"] = Behaviour("die", after=3)
        r["d0"].cut = lambda data: [data[:7], data[7:-20]]
        answer = await r.post(ASKED, path=PATH)
        *passed, last = answer.body.decode().removesuffix("\n\n").split("\n\n")
        assert len(passed) == 2
        assert all(json.loads(event.removeprefix("data: ")) for event in passed)
        assert last.startswith("event: error\n")


async def test_a_worker_that_falls_silent_is_given_up() -> None:
    async with rig(idle_timeout_s=0.2) as r:
        r["d0"].behaviour["local"] = Behaviour("stall", after=1)
        answer = await r.post(ASKED, path=PATH)
        assert b"sent nothing for" in answer.body
        await happens(r["d0"].departed["local"])


async def test_a_client_that_leaves_ends_the_workers_stream() -> None:
    async with rig() as r:
        r["d0"].behaviour["local"] = Behaviour("stall", after=1)
        async with r.open(ASKED, path=PATH) as response:
            await response.content.readany()
            response.close()
        await happens(r["d0"].departed["local"])


async def test_a_client_that_does_not_read_is_dropped() -> None:
    async with rig(idle_timeout_s=1.0) as r:
        worker = r["d0"]
        worker.tokens = ["x" * 100_000] * 400  # more than all buffers between worker and client
        _, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]), limit=1024)
        body = json.dumps(ASKED).encode()
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body))
        await happens(worker.departed["local"])
        assert worker.num_written < 400
        writer.transport.abort()


@pytest.mark.parametrize("behaviour", [Behaviour("hang"), Behaviour("stall", after=1)])
async def test_a_deadline_ends_what_is_passed_on(behaviour: Behaviour) -> None:
    async with rig() as r:
        r["d0"].behaviour["local"] = behaviour
        for timeout_s in ("0.2", "2", "20"):  # on a busy machine the first may be over before the worker is asked
            answer = await r.post(ASKED, path=PATH, x_request_timeout=timeout_s)
            assert b"deadline_exceeded" in answer.body
            if r["d0"].seen:
                break
        await happens(r["d0"].departed["local"])


async def test_a_stream_that_has_begun_counts() -> None:
    async with rig() as r:
        r["d0"].behaviour["local"] = Behaviour("stall", after=1)
        async with r.open(ASKED, path=PATH) as response:
            await response.content.readany()
            assert await r.num_running("d0") == 1
        await r.until("/fleet", lambda fleet: fleet["in_flight"] == 0)
