"""A rolling update of real workers: KV crosses within each revision, never between them, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.discovery.apiserver import NAMESPACE, ApiServer, make_pod
from tests.support.router_rig import QUICK, Answer, Rig
from tests.worker.process import Worker
from tests.worker.support import SECRET
from tollbridge.config.cluster import ClusterConfig, DiscoveryConfig, RouterConfig
from tollbridge.router.main import listening

NAMES = {"p1": "prefill", "d1": "decode", "p2": "prefill", "d2": "decode"}
PATIENCE_S = 180.0
NUM_CLIENTS = 3


@pytest.fixture(scope="module")
def workers(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    folder = tmp_path_factory.mktemp("rollout")
    found: dict[str, Worker] = {}
    try:
        for pair in (("p1", "d1"), ("p2", "d2")):  # four at once would be slow to start on two cores
            started = {name: Worker(folder / f"{name}.log", model=tiny_model_dir, name=name) for name in pair}
            found |= started
            with ThreadPoolExecutor() as pool:
                list(pool.map(Worker.ready, started.values()))
        yield found
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Worker.stop, found.values()))


def put(api: ApiServer, worker: Worker, name: str) -> None:
    """Show the worker as a pod of the revision in its name, with all of its ports named."""
    ports = {key: int(worker.said[key].rpartition(":")[2]) for key in ("kv", "events")}
    ports["http"] = int(worker.url.rpartition(":")[2])
    labels = {"tollbridge.io/engine": "embedded"}
    api.put(make_pod(name, NAMES[name], f"r{name[1]}", ports=ports, labels=labels))


class Clients:
    """Each asks for its own prompt again and again, in another order of blocks so that no cache answers all of it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.answers: list[Answer] = []
        self.texts: dict[int, set[str]] = {}
        self.more = asyncio.Event()

    async def run(self, first: int) -> None:
        for turn in range(1_000_000):
            seed = first + NUM_CLIENTS * (turn % 5)
            prompt = [(index * 7 + seed * 31) % 400 + 10 for index in range(60)]
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            async with self.rig.session.post(f"{self.rig.url}/v1/completions", json=body) as response:
                answer = Answer(response.status, response.headers, await response.read())
            self.answers.append(answer)
            assert answer.status == 200, answer.body
            self.texts.setdefault(seed, set()).add(answer.json["choices"][0]["text"])
            self.more.set()

    async def split_by(self, prefill: str, decode: str, number: int = 5) -> None:
        """Wait for some more splits of that pair."""
        wanted = self.num_split_by(prefill, decode) + number
        async with asyncio.timeout(PATIENCE_S):
            while self.num_split_by(prefill, decode) < wanted:
                self.more.clear()
                await self.more.wait()

    def num_split_by(self, prefill: str, decode: str) -> int:
        return [(a.decision.get("prefill"), a.decision["decode"]) for a in self.answers].count((prefill, decode))


@pytest.mark.slow
async def test_a_rolling_update_of_real_workers(workers: dict[str, Worker]) -> None:
    async with ApiServer() as api:
        config = DiscoveryConfig(kind="kubernetes", api=api.url, namespace=NAMESPACE, account="/nowhere")
        cluster = ClusterConfig(router=RouterConfig(port=0, policy="split"), workers=[], discovery=config)
        for name in ("p1", "d1"):
            put(api, workers[name], name)
        async with listening(cluster, SECRET, limits=QUICK) as url, aiohttp.ClientSession() as session:
            clients = Clients(Rig(url, session, {}))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(clients.run(number)) for number in range(NUM_CLIENTS)]
                await clients.split_by("p1", "d1")
                put(api, workers["p2"], "p2")
                await clients.split_by("p1", "d1")
                put(api, workers["d2"], "d2")
                await clients.split_by("p2", "d2")
                for name in ("p1", "d1"):
                    api.drain(name)
                    await asyncio.to_thread(workers[name].stop)  # as the kubelet does: it finishes what it has
                    api.delete(name)
                await clients.split_by("p2", "d2", 10)
                for task in tasks:
                    task.cancel()
            rig = clients.rig
            assert await rig.metric("split_verified_total") >= 20
            assert await rig.metric("requests_total", outcome="error") == 0
    pairs = {(answer.decision.get("prefill"), answer.decision["decode"]) for answer in clients.answers}
    assert pairs & {("p1", "d2"), ("p2", "d1")} == set()
    assert all(len(texts) == 1 for texts in clients.texts.values()), "the answer depended on who gave it"
