"""Workers die, freeze, crawl, and links break, under load: is any request lost, wrong, or without an end?

Five embedded workers (two prefer prefill, three decode) with the tiny model in float32, one router, eight clients in a
closed loop: half of the requests split, four of five streamed, completions and chats, greedy and seeded, with and
without stop strings. Every answer is compared with the answer of the undisturbed fleet: text, finish reason and usage.
One fault after the other hits a random worker (at most two at a time, and never both prefill workers or two decode
workers, so that somebody is left):

    killed   SIGKILL; the same port comes back after 0.1 to 0.6 s and its start
    stopped  SIGSTOP for 0.2 to 2.5 s
    slowed   a quarter of the processor for 0.5 to 2 s
    cut      all KV connections of a worker reset

Counted as wrong: an answer that ends well and differs, but for `border_draws`: a seeded draw may lie on the border
between two tokens, and then the rounding of whatever batch it runs in decides. Each such answer is looked for again
once the storm is over, on whole workers, served locally in changing company, as long as no more than MAX_BORDERS
questions differ. It is cleared when some of these answers are the very same and some the expected one; a greedy answer
never is. What else goes wrong meanwhile counts as in the storm. As lost: an error
that is not an error event of a stream whose worker failed. As without an end: nothing for 60 s. Recovery: from the
worker's own /health to the router's.

SIGTERM ends the storm early; the verdict follows. TOLLBRIDGE_CHAOS_SEED repeats the questions of an earlier run. The
router's memory over many requests is the claim `router-soak`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.support.chaos import Fleet, Victim, ill_treated
from benchmarks.support.result import ClaimResult
from tollbridge.engine.tiny import make_tiny_model
from tollbridge.wire import sse

DESCRIPTION = "no request lost, wrong or without an end while workers die, freeze, crawl and links break"

KINDS = ("killed", "stopped", "slowed", "cut")
NUM_CLIENTS = 8
NUM_QUESTIONS = 40
PATIENCE_S = 60.0
MAX_RECOVERY_S = 2.0
MAX_OVERTIME = 0.5  # of the time, to reach the number of faults
MAX_BORDERS = 2  # questions
NUM_AGAIN = 400  # requests among which an answer that differs must come up again, every second one the same question


@dataclass(frozen=True)
class Size:
    seconds: float
    min_faults: int  # of each kind


@dataclass(frozen=True)
class Question:
    path: str
    body: dict[str, Any]
    policy: str


@dataclass(frozen=True)
class Answer:
    """What a client read. `end` is "ok", "event" (an error event), "status" (an error status) or "none"."""

    end: str
    text: str = ""
    finish: str | None = None
    usage: tuple[int, int] = (0, 0)
    detail: str = ""


@dataclass
class Tally:
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, Answer]] = field(default_factory=list)  # which question, and what came
    border_draws: list[tuple[int, Answer]] = field(default_factory=list)
    details: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    continued: int = 0
    seconds: float = 0.0


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    size = Size(150.0, 15) if quick else Size(900.0, 100)
    return asyncio.run(_measure(size))


async def _measure(size: Size) -> ClaimResult:
    seed = int(os.environ.get("TOLLBRIDGE_CHAOS_SEED") or secrets.randbits(32))
    rng, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        async with ill_treated(make_tiny_model(Path(folder) / "tiny")) as fleet:
            questions = _questions(rng)
            truth = [await _ask(fleet, question) for question in questions]
            if bad := [answer for answer in truth if answer.end != "ok"]:
                raise RuntimeError(f"the undisturbed fleet failed: {bad[0]}")
            start_s = time.monotonic()
            await _storm(fleet, questions, truth, rng, tally, size)
            tally.seconds = time.monotonic() - start_s
            await _look_again(fleet, questions, truth, rng, tally)
            differed = tally.wrong or tally.border_draws
            first_that_differed = [f"{questions[at]}: {got} instead of {truth[at]}" for at, got in differed[:1]]
            tally.continued = int(await _metric(fleet, 'continuations_total{outcome="continued"}'))
    return _verdict(fleet, tally, size, seed, first_that_differed)


async def _storm(
    fleet: Fleet, questions: list[Question], truth: list[Answer], rng: random.Random, tally: Tally, size: Size
) -> None:
    """Ask and ill-treat at the same time, until the time is over and each kind of fault has happened often enough."""
    over, end_s = asyncio.Event(), time.monotonic() + size.seconds
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)

    async def client(own: random.Random) -> None:
        while not over.is_set():
            at = own.randrange(len(questions))
            answer = await _ask(fleet, questions[at])
            tally.ends[answer.end] += 1
            if answer.end == "ok" and answer != truth[at]:
                tally.wrong.append((at, answer))
            elif answer.end != "ok":
                tally.details[_kind_of(answer.detail)] += 1

    async def tormentor(own: random.Random, names: tuple[str, ...]) -> None:
        """Hit one of `names` after the other; two tormentors never share a role."""
        while not over.is_set():
            kind = min(KINDS, key=lambda one: (tally.faults[one], own.random()))
            tally.faults[kind] += 1
            await _fault(fleet, fleet.victims[own.choice(names)], kind, own)
            await asyncio.sleep(own.uniform(0.1, 0.6))
            enough = all(tally.faults[one] >= size.min_faults for one in KINDS)
            late_s = time.monotonic() - end_s
            if (late_s > 0 and enough) or late_s > MAX_OVERTIME * size.seconds:
                over.set()
            print(f"{-late_s:.0f} s left: {dict(tally.faults)}, {dict(tally.ends)}", file=sys.stderr)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(client(random.Random(rng.getrandbits(32))))
        for names in (("p0", "p1"), ("d0", "d1", "d2")):
            group.create_task(tormentor(random.Random(rng.getrandbits(32)), names))


async def _look_again(
    fleet: Fleet, questions: list[Question], truth: list[Answer], rng: random.Random, tally: Tally
) -> None:
    """Take from the wrong answers the drawn ones that whole workers give as well, in other company than before."""
    suspects = {at for at, _ in tally.wrong if questions[at].body["temperature"]}
    for at in sorted(suspects) if len(suspects) <= MAX_BORDERS else ():
        seen: set[Answer] = set()
        asked = Question(questions[at].path, questions[at].body, "local")

        async def client(own: random.Random, at: int = at, asked: Question = asked, seen: set[Answer] = seen) -> None:
            for turn in range(NUM_AGAIN // NUM_CLIENTS):
                other = own.randrange(len(questions))
                got = await _ask(fleet, questions[other] if turn % 2 else asked)
                if got.end != "ok":
                    tally.ends[got.end] += 1
                    tally.details[_kind_of(got.detail)] += 1
                elif turn % 2 == 0:
                    seen.add(got)
                elif other not in suspects and got != truth[other]:
                    tally.wrong.append((other, got))

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(client(random.Random(rng.getrandbits(32))))
        cleared = [one for one in tally.wrong if one[0] == at and one[1] in seen and truth[at] in seen]
        tally.border_draws += cleared
        tally.wrong = [one for one in tally.wrong if one not in cleared]
        tally.wrong += [(at, one) for one in seen if one != truth[at] and (at, one) not in cleared]


async def _fault(fleet: Fleet, victim: Victim, kind: str, rng: random.Random) -> None:
    if kind == "killed":
        await fleet.kill(victim, rng.uniform(0.1, 0.6))
    elif kind == "stopped":
        await fleet.stop(victim, rng.uniform(0.2, 2.5))
    elif kind == "slowed":
        await fleet.slow(victim, rng.uniform(0.5, 2.0))
    else:
        for _ in range(100):  # at a moment when there is something to cut
            if fleet.links[victim.name].cut():
                return
            victim = fleet.victims[rng.choice(list(fleet.victims))]
            await asyncio.sleep(0.02)


def _questions(rng: random.Random) -> list[Question]:
    questions = []
    for at in range(NUM_QUESTIONS):
        body: dict[str, Any] = {"max_tokens": rng.choice([4, 16, 48, 96]), "stream": at % 5 > 0, "ignore_eos": True}
        body |= {"temperature": 0} if at % 4 else {"temperature": 1.0, "seed": at}
        words = " ".join(
            rng.choice(["toll", "bridge", "cart", "river", "é", "🌉", "12"]) for _ in range(rng.randint(2, 90))
        )
        if at % 6 == 1:
            body["stop"] = ["the t", "qu", "zz"]
        if at % 3:
            path, body["prompt"] = "/v1/completions", words
        else:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": words}]
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        is_split = at % 2 or at % 8 == 0  # of the drawn ones every second
        questions.append(Question(path, body, "split" if is_split else "local"))
    return questions


async def _ask(fleet: Fleet, question: Question) -> Answer:
    headers = {"x-tollbridge-policy": question.policy}
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            fleet.session.post(fleet.url + question.path, json=question.body, headers=headers) as response,
        ):
            data = await response.read()
            return _read(response.status, data, streamed=bool(question.body["stream"]))
    except TimeoutError:
        return Answer("none", detail="nothing for 60 s")
    except aiohttp.ClientError as error:
        return Answer("none", detail=f"the router broke off: {error}")


def _read(status: int, data: bytes, *, streamed: bool) -> Answer:
    if status != 200:
        return Answer("status", detail=f"{status} {json.loads(data)['error']['message']}")
    if not streamed:
        return _pieces([json.loads(data)])
    events = list(sse.Parser().feed(data))
    if not events or events[-1] != b"[DONE]":
        last = json.loads(events[-1]) if events else {}
        if "error" not in last:
            return Answer("none", detail="a stream without an end")
        return Answer("event", detail=last["error"]["message"])
    return _pieces([json.loads(event) for event in events[:-1]])


def _pieces(chunks: list[dict[str, Any]]) -> Answer:
    text, finish, usage = "", None, (0, 0)
    for chunk in chunks:
        if chunk.get("usage"):
            usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            text += choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
    return Answer("ok", text, finish, usage)


def _kind_of(detail: str) -> str:
    """Return what a failure says less what differs between two of its kind."""
    head, _, reason = detail.partition("The stream was not continued elsewhere ")
    return reason.partition(":")[0] or "".join(c for c in head if not c.isdigit())[:120]


async def _metric(fleet: Fleet, sample: str) -> float:
    async with fleet.session.get(fleet.url + "/metrics") as response:
        text = await response.text()
    name = f"tollbridge_router_{sample} "
    return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))


def _verdict(fleet: Fleet, tally: Tally, size: Size, seed: int, first: list[str]) -> ClaimResult:
    figures: dict[str, object] = {
        **{f"faults_{kind}": tally.faults[kind] for kind in KINDS},
        "requests": tally.ends.total(),
        "answered": tally.ends["ok"],
        "continued_streams": tally.continued,
        "wrong": len(tally.wrong),
        "border_draws": len(tally.border_draws),
        "without_end": tally.ends["none"],
        "error_status": tally.ends["status"],
        "error_events": tally.ends["event"],
        "recovery_max_s": max(fleet.recoveries_s),
    }
    holds = (
        not tally.wrong
        and not tally.ends["none"]
        and not tally.ends["status"]
        and min(tally.faults[kind] for kind in KINDS) >= size.min_faults
        and max(fleet.recoveries_s) <= MAX_RECOVERY_S
    )
    bounds = {f"faults_{kind}": f">= {size.min_faults}" for kind in KINDS}
    bounds |= {"wrong": "0", "without_end": "0", "error_status": "0", "recovery_max_s": f"<= {MAX_RECOVERY_S:g}"}
    recoveries = sorted(fleet.recoveries_s)
    conditions = {
        "seed": seed, "seconds": round(tally.seconds),
        "model": "tiny, float32", "workers": "2 prefill, 3 decode", "clients": NUM_CLIENTS,
        "recovery_median_s": round(recoveries[len(recoveries) // 2], 3), "recoveries": len(recoveries),
        "failures": dict(tally.details), "first_that_differed": first,
    }  # fmt: skip
    return ClaimResult(holds=holds, figures=figures, bounds=bounds, conditions=conditions)
