"""How long the router takes to decide about one request, with a fleet of a given size: the very code of a request."""

from __future__ import annotations

import json
import random
import time

import numpy as np

from tollbridge.config.cluster import ClusterConfig, RouterConfig, WorkerConfig
from tollbridge.router.app import make_context
from tollbridge.router.context import Context
from tollbridge.router.decide import decide_call
from tollbridge.router.ingress import Call, parse_body

_MAX_PROMPT_TOKENS = 4096


def decision_p99_s(num_workers: int, *, num_decisions: int, policy: str = "adaptive") -> float:
    """Return the p99 over `num_decisions` of a fleet half of which prefers prefill, with random load."""
    context, rng = _context(num_workers, policy), random.Random(num_workers)
    calls = [_call(rng, at) for at in range(64)]
    times_s = []
    for at in range(num_decisions):
        for worker in context.fleet:
            worker.num_decodes = rng.randrange(8)
        start_s = time.perf_counter()
        decide_call(context, calls[at % len(calls)])
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


def _call(rng: random.Random, at: int) -> Call:
    prompt = [rng.randrange(50_000) for _ in range(rng.randint(16, _MAX_PROMPT_TOKENS))]
    raw = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 128, "stream": True}).encode()
    return Call(
        id=f"r{at}", path="/v1/completions", body=parse_body(raw), body_bytes=len(raw), model="m", stream=True,
        override=None, trace={},
    )  # fmt: skip
