"""A router in this process in front of stub workers, and the client that tests it with."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stub_worker import SECRET, StubWorker, stubs
from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.obs.tracing import Tracer
from tollbridge.router.app import Extension
from tollbridge.router.limits import Limits
from tollbridge.router.main import listening

QUICK = Limits(
    poll_interval_s=0.05,
    drain_s=2.0,
    # a machine that others use as well, or that stands still for a while, must not end what these bound
    check_timeout_s=20.0,
    connect_timeout_s=20.0,
    tokenize_timeout_s=20.0,
    detokenize_timeout_s=20.0,
)
PATIENCE_S = 60.0  # how long a test waits for something that must happen; it costs time only where it does not


class Rig:
    """Router, stubs by name, and one HTTP session."""

    def __init__(self, url: str, session: aiohttp.ClientSession, workers: dict[str, StubWorker]) -> None:
        self.url, self.session, self.workers = url, session, workers

    def __getitem__(self, name: str) -> StubWorker:
        return self.workers[name]

    @asynccontextmanager
    async def open(
        self, body: object, *, path: str = "/v1/completions", policy: str | None = None, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST `body` (bytes as they are) and yield the answer."""
        all_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if policy is not None:
            all_headers["x-tollbridge-policy"] = policy
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            asyncio.timeout(PATIENCE_S),
            self.session.post(self.url + path, data=io.BytesIO(data), headers=all_headers) as response,
        ):
            yield response

    async def post(self, body: object, **more: Any) -> Answer:
        async with self.open(body, **more) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Answer:
        async with asyncio.timeout(PATIENCE_S), self.session.get(self.url + path) as response:
            return Answer(response.status, response.headers, await response.read())

    async def record(self, request_id: str) -> dict[str, Any]:
        return dict((await self.get(f"/decisions/{request_id}")).json)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples called `name` that carry `labels`."""
        text = (await self.get("/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"tollbridge_router_{name}" and labels.items() <= sample.labels.items()
        )

    async def until(self, path: str, condition: Any) -> Any:
        """Ask for `path` until its JSON fits; every round is a real request, so nobody sleeps."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = (await self.get(path)).json
                if condition(answer):
                    return answer

    async def num_running(self, name: str) -> int:
        """Return how many requests the router counts on a worker that says of itself, from now on, that none runs."""
        self[name].engine = {"max_num_batched_tokens": 77}

        def load(fleet: Any) -> Any:
            return next(worker["load"] for worker in fleet["workers"] if worker["name"] == name)

        said = await self.until("/fleet", lambda fleet: load(fleet)["max_num_batched_tokens"] == 77)
        return int(load(said)["num_running"])

    async def until_ready(self, name: str, ready: bool = True) -> None:
        await self.until("/health", lambda health: health["workers"][name]["ready"] is ready)


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def decision(self) -> dict[str, Any]:
        return dict(json.loads(self.headers["x-tollbridge-decision"]))

    @property
    def error(self) -> str:
        return str(self.json["error"]["message"])

    @property
    def events(self) -> list[Any]:
        """The JSON of each event; "[DONE]" as it is."""
        datas = [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]

    @property
    def text(self) -> str:
        return "".join(e["choices"][0]["text"] for e in self.events if e != "[DONE]" and e.get("choices"))


@asynccontextmanager
async def rig(
    *workers: StubWorker,
    limits: Limits = QUICK,
    tracer: Tracer | None = None,
    extensions: Sequence[Extension] = (),
    **router: Any,
) -> AsyncIterator[Rig]:
    """Run stubs and a router in front of them. By default p0 and d0."""
    workers = workers or (StubWorker("p0", "prefill"), StubWorker("d0", "decode"))
    async with stubs(*workers):
        settings = {"port": 0, "policy": "local", "allow_override": "always", **router}
        cluster = ClusterConfig(router=RouterConfig(**settings), workers=[worker.config for worker in workers])
        async with (
            listening(cluster, SECRET, limits=limits, tracer=tracer, extensions=extensions) as url,
            aiohttp.ClientSession() as session,
        ):
            yield Rig(url, session, {worker.name: worker for worker in workers})


async def happens(event: asyncio.Event) -> None:
    """Wait until `event` is set, but not for ever."""
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()
