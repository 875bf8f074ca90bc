"""How long the router takes to decide about one request, with a fleet of a given size: the very code of a request.

That is: from the parsed body to the decision, with the prompt's token ids looked up in an index of `NUM_BLOCKS` blocks,
each prompt a new one, half of them after a known prefix. Between two decisions happens what happens in a router: the
request begins where it was sent, an older one gets its first token, the oldest ends, a worker reports, and the index
takes note of the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np

from tollbridge.config.cluster import ClusterConfig, RouterConfig, WorkerConfig
from tollbridge.router.app import make_context
from tollbridge.router.context import Context
from tollbridge.router.decide import decide_call
from tollbridge.router.fleet import Leg, Worker
from tollbridge.router.ingress import Call, parse_body
from tollbridge.router.load import Report
from tollbridge.router.main import settle_collector
from tollbridge.router.work import tokens_to_move, work_of
from tollbridge.wire.decision import Decision

NUM_BLOCKS = 1_000_000  # in the prefix index, over all workers
_BLOCK_SIZE = 16
_MAX_PROMPT_TOKENS = 4096
_CHAIN_TOKENS = 1024  # of what is indexed
_STREAMS = 4  # in flight on each worker, on average
_REPORTS_PER_DECISION = 0.25  # each worker reports once a second


def decision_p99_s(num_workers: int, *, num_decisions: int, policy: str = "adaptive") -> float:
    """Return the p99 over `num_decisions` of a fleet half of which prefers prefill, with random load."""
    return asyncio.run(_measure(num_workers, num_decisions, policy))


async def _measure(num_workers: int, num_decisions: int, policy: str) -> float:
    context, rng = _context(num_workers, policy), random.Random(num_workers)
    prefixes = _fill(context, rng)
    words = [rng.randrange(50_000) for _ in range(100_000)]
    traffic = _Traffic(context, rng, most=_STREAMS * num_workers)
    settle_collector()
    times_s = []
    for at in range(num_decisions + traffic.most):
        call = _call(rng, at, prefixes, words)
        start_s = time.perf_counter()
        decision = await decide_call(context, call)
        times_s.append(time.perf_counter() - start_s)
        traffic.goes_on(decision)
        await asyncio.sleep(0)  # what the decision left to be done afterwards
    return float(np.percentile(times_s[traffic.most :], 99))  # less those until the fleet was busy


class _Traffic:
    """The requests that were decided about, at most `most` of them at once."""

    def __init__(self, context: Context, rng: random.Random, *, most: int) -> None:
        self.most = most
        self._context = context
        self._rng = rng
        self._running: deque[tuple[contextlib.ExitStack, list[Callable[[], None]]]] = deque()

    def goes_on(self, decision: Decision) -> None:
        """Begin that request, and let time pass for the others."""
        self._begin(decision)
        if len(self._running) > self.most // 2:
            for first_token in self._running[len(self._running) // 2][1]:
                first_token()
        if len(self._running) > self.most:
            self._running.popleft()[0].close()
        if self._rng.random() < _REPORTS_PER_DECISION:
            self._report(self._rng.choice(list(self._context.fleet)))

    def _begin(self, decision: Decision) -> None:
        fleet, stack, first_token = self._context.fleet, contextlib.ExitStack(), []
        for leg, name in (("prefill", decision.prefill), ("decode", decision.decode)):
            if name is not None:
                work = work_of(decision, cast(Leg, leg))
                first_token.append(stack.enter_context(fleet.serving(fleet[name], cast(Leg, leg), **work)))
        if decision.prefill is not None:
            pair = fleet[decision.prefill], fleet[decision.decode]
            first_token.append(fleet.begin_transfer(*pair, tokens_to_move(decision)))
        self._running.append((stack, first_token))

    def _report(self, worker: Worker) -> None:
        report = Report(
            block_size=_BLOCK_SIZE, num_running=worker.num_decodes,
            waiting_prefill_tokens=self._rng.choice((0, 0, 2048)),
            free_kv_tokens=self._rng.randrange(10_000, 100_000), total_kv_tokens=100_000,
        )  # fmt: skip
        worker.load.told(report, self._context.clock.monotonic())


def _context(num_workers: int, policy: str) -> Context:
    workers = [
        WorkerConfig(
            name=f"w{at}", prefer="prefill" if at % 2 else "decode", url=f"http://w{at}:1", host=f"h{at}", events=None
        )
        for at in range(num_workers)
    ]
    cluster = ClusterConfig(router=RouterConfig(policy=policy), workers=workers)
    context = make_context(cluster, b"a secret for measuring only")
    for worker in context.fleet:
        worker.ready, worker.kv, worker.models = True, (worker.name, 7801), ({"id": "m"},)
    _teach(context)
    return context


def _teach(context: Context) -> None:
    """Let every engine and every link be known, so that every pair is priced."""
    cost = context.learner.cost
    cost.wire_bytes_per_token.add(46_080)
    for worker in context.fleet:
        for num_tokens in (64, 512, 2048):
            cost.own_engine(worker.name).observe_prefill(0.005 + num_tokens * 2e-4, num_tokens, 0, 512, num_decodes=0)
        cost.own_engine(worker.name).observe_step(0.02, 4)
        for other in context.fleet:
            if other is not worker:
                cost.link(worker.config.host, other.config.host).observe(1e9, 1.2e9)


def _fill(context: Context, rng: random.Random) -> list[list[int]]:
    """Index NUM_BLOCKS blocks, half of them of prefixes that eight workers have; return some of those prefixes."""
    index, names = context.feeder.index, [worker.name for worker in context.fleet]
    prefixes: list[list[int]] = []
    num_blocks = 0
    while num_blocks < NUM_BLOCKS:
        prefixes.append([rng.randrange(50_000) for _ in range(_CHAIN_TOKENS)])
        for worker in rng.sample(names, 8 if len(prefixes) % 9 == 0 else 1):
            hashes = [rng.getrandbits(64) for _ in range(_CHAIN_TOKENS // _BLOCK_SIZE)]
            index.stored(worker, block_hashes=hashes, parent=None, token_ids=prefixes[-1], block_size=_BLOCK_SIZE)
            num_blocks += len(hashes)
        if len(prefixes) > 1024:
            prefixes = prefixes[-512:]
    return prefixes


def _call(rng: random.Random, at: int, prefixes: list[list[int]], words: list[int]) -> Call:
    known = rng.choice(prefixes) if at % 2 else []
    start, length = rng.randrange(len(words) // 2), rng.randint(16, _MAX_PROMPT_TOKENS - len(known))
    prompt = known + words[start : start + length]
    raw = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 128, "stream": True}).encode()
    return Call(
        id=f"r{at}", path="/v1/completions", body=parse_body(raw), body_bytes=len(raw), model="m", stream=True,
        override=None, trace={},
    )  # fmt: skip
