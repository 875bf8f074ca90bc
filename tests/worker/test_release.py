"""`POST /tollbridge/release`: the router says that nobody will fetch a send."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.support import Client, fake_serving, params
from tollbridge.wire.params import RELEASE_PATH, Role


async def test_release_reaches_the_engine(client: Client) -> None:
    kv = params("prefill")
    status, _ = await client.post(RELEASE_PATH, {"kv_transfer_params": kv})
    assert status == 200
    assert client.engine.released == [kv["tollbridge"]["transfer_id"]]


@pytest.mark.parametrize(
    ("role", "fields", "code"),
    [("decode", {}, 400), ("prefill", {"secret": b"another"}, 401), ("prefill", {"expires": 1.0}, 401)],
)
async def test_only_the_router_can_release_a_prefill(
    client: Client, role: Role, fields: dict[str, Any], code: int
) -> None:
    status, answer = await client.post(RELEASE_PATH, {"kv_transfer_params": params(role, **fields)})
    assert status == code
    assert answer["error"]["param"] == "kv_transfer_params"
    assert client.engine.released == []


async def test_release_without_a_secret_is_refused() -> None:
    async with fake_serving(secret=None) as client:
        status, _ = await client.post(RELEASE_PATH, {"kv_transfer_params": params("prefill")})
        assert status == 401


async def test_a_release_is_no_leg(client: Client) -> None:
    body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": params("release")}
    status, answer = await client.post("/v1/completions", body)
    assert status == 400
    assert RELEASE_PATH in answer["error"]["message"]
