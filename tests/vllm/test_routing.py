"""The router's picture of a real vLLM server: its KV events, its tokens, its load."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.vllm.pair import Server, free_port
from tests.vllm.routed import PATIENT
from tollbridge.config.cluster import ClusterConfig, RouterConfig, WorkerConfig
from tollbridge.router.main import listening

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def server(tiny_model: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """A vLLM server with a tokenizer that publishes its KV events on every interface."""
    folder = tmp_path_factory.mktemp("vllm-routing")
    model = folder / "model"
    shutil.copytree(tiny_model, model)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model_dir / file, model / file)
    made = Server("v", model, folder, ["--max-model-len", "2048"], tokenizer=True, events_port=free_port())
    made.start()
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


class Router:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return answer and record of a request."""
        headers = {"x-tollbridge-policy": "kv-aware"}
        async with self.session.post(self.url + path, json={"max_tokens": 2, **body}, headers=headers) as response:
            assert response.status == 200, await response.text()
            name = json.loads(response.headers["x-tollbridge-decision"])["id"]
            usage = (await response.json())["usage"]
        async with self.session.get(f"{self.url}/decisions/{name}") as response:
            return {"usage": usage, **(await response.json())["decision"]}

    async def worker(self) -> dict[str, Any]:
        async with self.session.get(self.url + "/fleet") as response:
            (worker,) = (await response.json())["workers"]
            return dict(worker)

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(worker := await self.worker()):
                await asyncio.sleep(0.05)
        return worker


@asynccontextmanager
async def routing(server: Server) -> AsyncIterator[Router]:
    cluster = ClusterConfig(
        model=str(server.model),
        router=RouterConfig(port=0),
        workers=[WorkerConfig(name="v", engine="vllm", url=server.url)],
    )
    async with (
        listening(cluster, b"secret", limits=msgspec.structs.replace(PATIENT, poll_interval_s=0.2)) as url,
        aiohttp.ClientSession() as session,
    ):
        router = Router(url, session)
        await router.until(lambda worker: bool(worker["follows_events"]))
        yield router


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(4, 500) for _ in range(length)]


async def test_what_the_index_promises_is_what_vllm_finds(server: Server) -> None:
    async with routing(server) as router:
        size = (await router.worker())["load"]["block_size"]
        await router.post("/v1/completions", prompt=ids(1, 4 * size))
        for length in (size, size + 1, 2 * size, 2 * size + 1, 4 * size):
            answer = await router.post("/v1/completions", prompt=ids(1, length))
            found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert answer["terms"]["cached_tokens"] == found == (length - 1) // size * size


async def test_another_router_learns_it_from_the_replay(server: Server) -> None:
    async with routing(server) as router:
        size = (await router.worker())["load"]["block_size"]
        await router.post("/v1/completions", prompt=ids(2, 3 * size), cache_salt="s")
    async with routing(server) as router:
        for salt, cached in (("s", 2 * size), ("t", 0)):
            answer = await router.post("/v1/completions", prompt=ids(2, 3 * size), cache_salt=salt)
            assert answer["terms"]["cached_tokens"] == cached
            assert (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) == cached


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "A bridge, a toll, and a river."}),
        ("/v1/completions", {"prompt": "No specials", "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is a toll?"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]}),
    ],
)
async def test_tokens_are_those_of_vllm(server: Server, path: str, body: dict[str, Any]) -> None:
    async with routing(server) as router:
        origins = []
        for _ in range(3):
            answer = await router.post(path, **body)
            origins.append(answer["tokens_from"])
            assert answer["terms"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert origins == ["worker", "memory", "memory"]


async def test_our_tokenizer_agrees_with_vllm(server: Server) -> None:
    async with routing(server) as router:
        async with asyncio.timeout(PATIENCE_S):
            for number in range(1000):
                chat = [{"role": "user", "content": f"Toll number {number}"}]
                answer = await router.post("/v1/chat/completions", messages=chat)
                assert answer["terms"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
                if answer["tokens_from"] == "tokenizer":
                    return
        pytest.fail("the tokenizer was never believed")


async def test_load_is_read_from_the_metrics(server: Server) -> None:
    async with routing(server) as router:
        worker = await router.until(
            lambda worker: worker["load"]["free_kv_tokens"] and not worker["load"]["num_running"]
        )
        assert worker["load"]["used_kv_tokens"] == 0
