"""How long the router takes to decide about one request, with a fleet of a given size: the very code of a request.

That is: from the parsed body to the decision, with the prompt's token ids looked up in an index of `NUM_BLOCKS` blocks.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time

import numpy as np

from tollbridge.config.cluster import ClusterConfig, RouterConfig, WorkerConfig
from tollbridge.router.app import make_context
from tollbridge.router.context import Context
from tollbridge.router.decide import decide_call
from tollbridge.router.ingress import Call, parse_body

NUM_BLOCKS = 1_000_000  # in the prefix index, over all workers
_BLOCK_SIZE = 16
_MAX_PROMPT_TOKENS = 4096
_CHAIN_TOKENS = 1024  # of what is indexed


def decision_p99_s(num_workers: int, *, num_decisions: int, policy: str = "adaptive") -> float:
    """Return the p99 over `num_decisions` of a fleet half of which prefers prefill, with random load."""
    return asyncio.run(_measure(num_workers, num_decisions, policy))


async def _measure(num_workers: int, num_decisions: int, policy: str) -> float:
    context, rng = _context(num_workers, policy), random.Random(num_workers)
    prefixes = _fill(context, rng)
    calls = [_call(rng, at, prefixes) for at in range(64)]
    gc.collect()
    gc.freeze()  # as a process that serves does
    times_s = []
    for at in range(num_decisions):
        for worker in context.fleet:
            worker.num_decodes = rng.randrange(8)
        start_s = time.perf_counter()
        await decide_call(context, calls[at % len(calls)])
        times_s.append(time.perf_counter() - start_s)
    return float(np.percentile(times_s, 99))


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


def _call(rng: random.Random, at: int, prefixes: list[list[int]]) -> Call:
    known = rng.choice(prefixes) if at % 2 else []
    prompt = known + [rng.randrange(50_000) for _ in range(rng.randint(16, _MAX_PROMPT_TOKENS - len(known)))]
    raw = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 128, "stream": True}).encode()
    return Call(
        id=f"r{at}", path="/v1/completions", body=parse_body(raw), body_bytes=len(raw), model="m", stream=True,
        override=None, trace={},
    )  # fmt: skip
