"""The doors: what is refused, by whom it may be asked, and what the router shows."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from tests.support.router_rig import PATIENCE_S, Rig, happens, rig
from tests.support.stub_worker import Behaviour, StubWorker

WHOLE = {"prompt": "Hello", "max_tokens": 8}
STREAM = WHOLE | {"stream": True}

BAD_BODIES = {
    "invalid json": (b'{"prompt": ', 400, "JSON"),
    "trailing garbage": (b'{"prompt": "a"} x', 400, "JSON"),
    "not an object": (b"[1, 2]", 400, "object"),
    "a string": (b'"prompt"', 400, "object"),
    "empty": (b"", 400, "JSON"),
    "no prompt": (b"{}", 400, "prompt"),
    "unknown model": ({"model": "gpt-9", "prompt": "a"}, 404, "gpt-9"),
    "model of a wrong type": ({"model": 3, "prompt": "a"}, 400, "model"),
    "stream of a wrong type": ({"prompt": "a", "stream": "yes"}, 400, "stream"),
    "too deep": (b'{"prompt": ' + b"[" * 100_000, 400, "JSON"),
    "10 MB": (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', 413, "4 MiB"),
    "a model that is not UTF-8": (b'{"prompt": "a", "model": "\xff"}', 400, "UTF-8"),
    "xargs that are not UTF-8": (b'{"prompt": "a", "vllm_xargs": {"\xff": 1}}', 400, "vllm_xargs"),
    "smuggled params": ({"prompt": "a", "vllm_xargs": {"kv_transfer_params": "x"}}, 400, "vllm_xargs"),
}


def is_openai_error(answer: object) -> bool:
    error = answer["error"]  # type: ignore[index]
    return set(error) == {"message", "type", "param", "code"} and error["message"].endswith((".", "…"))


class TestIngress:
    @pytest.mark.parametrize("case", BAD_BODIES)
    async def test_bad_bodies_never_reach_a_worker(self, case: str) -> None:
        body, status, word = BAD_BODIES[case]
        async with rig() as r:
            answer = await r.post(body)
            assert answer.status == status
            assert word in answer.error
            assert is_openai_error(answer.json)
            assert answer.headers["x-request-id"]
            assert r["d0"].seen == []
            assert (await r.post(WHOLE)).status == 200
            assert await r.metric("refused_requests_total", status=str(status)) == 1

    async def test_client_params_and_internal_headers_are_stripped(self) -> None:
        async with rig() as r:
            forged = WHOLE | {"kv_transfer_params": {"tollbridge": {"role": "prefill"}}}
            headers = {"x-tollbridge-report": "0", "x-tollbridge-anything": "1", "authorization": "Bearer secret"}
            assert (await r.post(forged, **headers)).status == 200
            escaped = b'{"prompt": "a", "kv\\u005ftransfer_params": {"tollbridge": {}}}'
            assert (await r.post(escaped)).status == 200
            for seen in r["d0"].seen:
                assert seen.role == "local"
                assert "kv_transfer_params" not in seen.body
                assert "x-tollbridge-anything" not in seen.headers
                assert "authorization" not in seen.headers
                assert seen.headers["x-tollbridge-report"] == "1"

    async def test_body_reaches_the_worker_as_written(self) -> None:
        async with rig() as r:
            body = b'{"prompt": "\\u00fc\xc3\xbc", "seed": 12345678901234567890, "x": [1.0e-1, {"y": null}]}'
            await r.post(body)
            assert r["d0"].seen[0].body == json.loads(body)

    async def test_large_body_within_the_bound(self) -> None:
        async with rig() as r:
            prompt = "a" * (3 << 20)
            assert (await r.post({"prompt": prompt}, policy="split")).status == 200
            assert r["p0"].seen[0].body["prompt"] == r["d0"].seen[0].body["prompt"] == prompt

    async def test_compressed_bodies_are_refused_in_words(self) -> None:
        async with rig() as r:
            answer = await r.post(b"\x1f\x8b", content_encoding="gzip")
            assert (answer.status, "gzip" in answer.error) == (400, True)

    @pytest.mark.parametrize(
        ("given", "kept"), [("abc-1", True), ("a" * 128, True), ("a" * 129, False), ("a b", False)]
    )
    async def test_request_ids(self, given: str, kept: bool) -> None:
        async with rig() as r:
            answer = await r.post(WHOLE, x_request_id=given)
            assert (answer.headers["x-request-id"] == given) is kept
            assert answer.decision["id"] == answer.headers["x-request-id"]

    async def test_two_requests_in_flight_never_share_an_id(self) -> None:
        async with rig() as r:
            r["d0"].behaviour["local"] = Behaviour("stall", after=1)
            async with r.open(STREAM, x_request_id="same") as first:
                assert first.headers["x-request-id"] == "same"
                second = await r.post(WHOLE, x_request_id="same")
                assert second.headers["x-request-id"].startswith("same-")

    async def test_429_beyond_the_bound(self) -> None:
        async with rig(max_concurrent=1, max_queue=0) as r:
            r["d0"].behaviour["local"] = Behaviour("hang")
            slow = asyncio.create_task(r.post(WHOLE))
            await happens(r["d0"].arrived["local"])
            answer = await r.post(WHOLE)
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert is_openai_error(answer.json)
            slow.cancel()
            await happens(r["d0"].departed["local"])
            r["d0"].behaviour.clear()
            await r.until("/fleet", lambda fleet: fleet["in_flight"] == 0)
            assert (await r.post(WHOLE)).status == 200

    async def test_api_keys(self) -> None:
        async with rig(api_keys=["right", "other"]) as r:
            assert (await r.post(WHOLE)).status == 401
            assert (await r.post(WHOLE, authorization="Bearer wrong")).status == 401
            assert (await r.post(WHOLE, authorization="Bearer other")).status == 200
            assert (await r.get("/health")).status == 200
            assert (await r.get("/decisions")).status == 401


class TestOverride:
    async def test_never(self) -> None:
        async with rig(allow_override="never") as r:
            answer = await r.post(WHOLE, policy="split")
            assert (answer.status, "nobody" in answer.error) == (400, True)

    async def test_loopback_peer_may(self) -> None:
        async with rig(allow_override="loopback") as r:
            assert (await r.post(WHOLE, policy="split")).decision["choice"] == "split"

    async def test_unknown_policy(self) -> None:
        async with rig() as r:
            answer = await r.post(WHOLE, policy="splitt")
            assert (answer.status, "local, split" in answer.error) == (400, True)

    async def test_overrides_the_configured_policy(self) -> None:
        async with rig(policy="split") as r:
            assert (await r.post(WHOLE)).decision["reason"] == "policy"
            answer = await r.post(WHOLE, policy="local")
            assert (answer.decision["choice"], answer.decision["reason"]) == ("local", "forced")


class TestViews:
    async def test_models_are_a_union(self) -> None:
        async with rig(StubWorker("a"), StubWorker("b")) as r:
            r["b"].model, r["b"].incarnation = "other", "second"
            models = await r.until("/v1/models", lambda answer: len(answer["data"]) == 2)
            assert {card["id"] for card in models["data"]} == {"stub-model", "other"}
            assert (await r.get("/v1/models/other")).json["id"] == "other"
            assert (await r.get("/v1/models/none")).status == 404
            assert (await r.post(WHOLE | {"model": "other"})).decision["decode"] == "b"

    async def test_health(self) -> None:
        async with rig() as r:
            answer = await r.get("/health")
            assert (answer.status, answer.json["status"]) == (200, "ok")
            for name in ("p0", "d0"):
                r[name].healthy = False
                await r.until_ready(name, False)
            answer = await r.get("/health")
            assert (answer.status, answer.json["status"]) == (503, "unavailable")
            assert "503" in answer.json["workers"]["p0"]["detail"]

    async def test_fleet(self) -> None:
        async with rig() as r:
            answer = (await r.get("/fleet")).json
            assert [worker["name"] for worker in answer["workers"]] == ["p0", "d0"]
            assert answer["workers"][0]["kv"] == r["p0"].kv
            assert answer["workers"][0]["incarnation"] == "first"

    async def test_decisions_newest_first(self) -> None:
        async with rig() as r:
            for number in range(5):
                await r.post(WHOLE, x_request_id=f"r{number}")
            listed = (await r.get("/decisions?limit=2")).json["decisions"]
            assert [record["decision"]["id"] for record in listed] == ["r4", "r3"]
            assert (await r.get("/decisions/none")).status == 404
            assert (await r.get("/decisions?limit=x")).status == 400

    async def test_no_prompt_is_ever_shown(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG", "tollbridge")
        async with rig() as r:
            await r.post({"prompt": "very-private", "stream": True}, policy="split")
            for path in ("/decisions", "/fleet", "/metrics", "/health"):
                assert b"very-private" not in (await r.get(path)).body
        assert "very-private" not in caplog.text

    @pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/v1/completions", 405), ("/v1/nothing", 404)])
    async def test_framework_errors_have_openais_shape(self, path: str, status: int) -> None:
        async with rig() as r:
            answer = await r.get(path)
            assert answer.status == status
            assert is_openai_error(answer.json)
            assert answer.headers["x-request-id"]

    async def test_tokenize_is_passed_on(self) -> None:
        async with rig() as r:
            answer = await r.post({"prompt": "a", "kv_transfer_params": {}}, path="/tokenize")
            assert answer.json["tokens"] == [1, 2, 3]
            assert r["d0"].seen[0].body == {"prompt": "a"}

    async def test_what_is_passed_on_is_not_streamed(self) -> None:
        async with rig() as r:
            answer = await r.post({"input": "a", "stream": True}, path="/v1/embeddings")
            assert (answer.status, answer.json["error"]["param"]) == (400, "stream")
            assert r["p0"].seen == r["d0"].seen == []

    async def test_administrative_paths_are_not(self) -> None:
        async with rig() as r:
            assert (await r.post({}, path="/v1/load_lora_adapter")).status == 404


async def raw(r: Rig, data: bytes) -> bytes:
    host, port = urlsplit(r.url).netloc.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return answer


async def test_header_bytes_outside_ascii_do_not_reach_a_worker() -> None:
    async with rig() as r:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 15\r\n"
        answer = await raw(r, head + b"traceparent: \xff\r\nx-request-id: \xfe\r\n\r\n" + b'{"prompt": "a"}')
        assert answer.startswith(b"HTTP/1.1 200")
        assert "traceparent" not in r["d0"].seen[0].headers


MALFORMED = {
    "no http": b"hello\r\n\r\n",
    "header without colon": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "length and chunks": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "huge header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n",
}


async def test_an_unsupported_expectation_is_refused() -> None:
    async with rig() as r:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: banana\r\nConnection: close\r\n\r\n"
        assert (await raw(r, head)).startswith(b"HTTP/1.1 417")


@pytest.mark.parametrize("case", MALFORMED)
async def test_malformed_http_is_refused_and_the_router_goes_on(case: str) -> None:
    async with rig() as r:
        answer = await raw(r, MALFORMED[case])
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert (await r.post(WHOLE)).status == 200


async def test_decision_that_is_not_there_and_ttft_of_an_answer_that_came_whole() -> None:
    async with rig() as r:
        missing = await r.get("/decisions/never-made")
        assert missing.status == 404
        assert "never-made" in missing.error and "not among the last" in missing.error
        await r.post({"prompt": "Hello"}, x_request_id="whole")
        await r.post({"prompt": "Hello", "stream": True}, x_request_id="streamed")
        assert (await r.record("whole"))["happened"].get("ttft_s") is None  # the router cannot know it
        assert (await r.record("streamed"))["happened"]["ttft_s"] > 0
        assert await r.metric("time_to_first_token_seconds_count") == 1
