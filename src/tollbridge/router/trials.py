"""Links that nobody has seen are tried with a short prompt of our own, so that no client's request is risked for it.

Without a first figure `adaptive` could never split: a link that may be slow is no place for a long prompt. A trial is a
split like any other, of random token ids, between two workers that could serve one together; it teaches the cost model
what any split would. As long as that takes little time, a prompt four times as long follows: what is over in some ten
milliseconds tells of prefill, connecting and HTTP, not of a link. A link that is in use is tried again when for a
minute nothing has proved that it has not become slower: streams through vLLM come without a report of their transfer.
Only under the policy `adaptive`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tollbridge.cost.link import LinkModel
from tollbridge.errors import TollbridgeError, UnavailableError
from tollbridge.policy.rules import partners
from tollbridge.policy.views import RequestView, WorkerView
from tollbridge.router import splits
from tollbridge.router.context import Context
from tollbridge.router.fleet import Leg, Worker
from tollbridge.router.ingress import Body, Call
from tollbridge.router.learn import TRIAL, Lesson
from tollbridge.router.splits import Split
from tollbridge.router.stream import take_report, usage_of
from tollbridge.router.upstream import failure_of
from tollbridge.router.verify import verify_split
from tollbridge.router.work import work_of
from tollbridge.wire.decision import Decision, Happened
from tollbridge.wire.params import WorkerReport

log = logging.getLogger("tollbridge.router")

NUM_BYTES = 4 << 20  # of KV, about: enough to tell a slow link by, and little even at 100 Mb/s
MIN_TOKENS, MAX_TOKENS = 64, 512  # of the first prompt
GROWTH, MOST_TOKENS = 4, 2048  # of those that follow
_UNSAID_TOKENS = 256  # where nobody says how large the KV of a token is
_TOKEN_IDS = (16, 240)  # every vocabulary has these
_PATH = "/v1/completions"
_BUSY = 4  # requests on either worker: a trial of a link that is known would tell about them
ENOUGH = 10  # transfers seen, clients' among them, after which a link is settled anyway
_LOOKED_AT = 16  # senders in one look, and receivers of each
_Any = TypeVar("_Any")


@dataclass
class _Past:
    """What became of the trials of one link."""

    next_s: float
    num_failed: int = 0  # in a row
    num_unsettled: int = 0  # in a row
    is_settled: bool = False  # a prompt took long enough to tell of the link, or was as long as may be


class Trials:
    """Tries one link at a time. `run` never ends; cancel it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._limits = context.limits
        self._past: dict[tuple[str, str], _Past] = {}  # by (from host, to host)

    async def run(self) -> None:
        """Look for a link to try, again and again; returns at once where no price is asked for."""
        router = self._context.config.router
        if router.policy != "adaptive" or not router.explore:
            return
        while True:
            await asyncio.sleep(self._limits.trial_interval_s)
            try:
                if pair := self.next_pair():
                    await self.attempt(*pair)
            except Exception:  # a task boundary: one odd answer must not end the trials
                log.exception("link trial failed")

    def next_pair(self) -> tuple[Worker, Worker] | None:
        """Return the prefill and decode worker whose link is to be tried now; None when none is."""
        context, now_s = self._context, self._context.clock.monotonic()
        fleet = context.fleet.view(None)
        found = partners(RequestView(id="", body_bytes=0, prompt_tokens=MIN_TOKENS), fleet)
        for prefill, receivers in _sample(found) if not isinstance(found, str) else ():
            for decode in _sample(receivers):
                hosts = (prefill.host, decode.host)
                link, past = context.learner.cost.link(*hosts), self._past.get(hosts)
                goes_on = past is not None and past.num_unsettled > 0 and link.num_observations < ENOUGH
                if not goes_on and not context.learner.wants_trial(*hosts):
                    continue
                is_new = goes_on or link.num_observations < 2
                if not all(_may_be_asked(view, is_new=is_new) for view in (prefill, decode)):
                    continue
                pair = context.fleet[prefill.name], context.fleet[decode.name]
                if _common_model(*pair) is None:
                    continue
                first_s = now_s + self._limits.trial_after_s  # clients may teach it meanwhile
                if now_s >= self._past.setdefault(hosts, _Past(next_s=first_s)).next_s:
                    return pair
        return None

    async def attempt(self, prefill: Worker, decode: Worker) -> None:
        """Try the link from `prefill` to `decode`, and learn what it carries."""
        context, limits = self._context, self._limits
        hosts = (prefill.config.host, decode.config.host)
        link = context.learner.cost.link(*hosts)
        past, num_before = self._past.setdefault(hosts, _Past(next_s=0.0)), link.num_observations
        error = await self._climb(prefill, decode, link, past)
        if not error and link.num_observations == num_before:
            error = "The transfer said nothing about the link: perhaps what KV weighs is not known yet."
        here = {worker.config.host for worker in context.fleet}
        self._past = {pair: past for pair, past in self._past.items() if here >= set(pair)}
        past.num_failed = past.num_failed + 1 if error else 0
        if not error and past.num_unsettled:
            again_s = min(limits.trial_after_s * 2 ** min(past.num_unsettled - 1, 6), limits.trial_again_s)
        else:
            again_s = limits.trial_again_s * 2 ** min(past.num_failed, 6)
        past.next_s = context.clock.monotonic() + again_s
        context.metrics.trials.labels("failed" if error else "ok").inc()
        if error:
            log.warning("link trial failed: prefill=%s decode=%s %s", prefill.name, decode.name, error)
        else:
            goodput = link.goodput_bytes_per_s
            log.info("link tried: prefill=%s decode=%s goodput_bytes_per_s=%.4g", prefill.name, decode.name, goodput)

    async def _climb(self, prefill: Worker, decode: Worker, link: LinkModel, past: _Past) -> str:
        """Try longer and longer prompts until one has told enough; return what went wrong with the first one."""
        longest = min(MOST_TOKENS, _longest(prefill), _longest(decode))
        num_tokens = min(_num_tokens(prefill), longest)
        error, took_s = await self._timed(prefill, decode, num_tokens)
        settled = past.is_settled  # then the short one is enough, to see whether the link has become slow
        while not error and not settled:
            longer = min(num_tokens * GROWTH, longest)
            if not (self._is_idle(prefill, longer) and self._is_idle(decode, longer)):
                break  # the others may be what took the time, and a longer prompt would take theirs
            if took_s >= self._limits.trial_growing_s or longer <= num_tokens:
                settled = True
                break
            later, took_s = await self._timed(prefill, decode, longer)
            if later:
                log.info("link trial ended: prefill=%s decode=%s %s", prefill.name, decode.name, later)
                settled = True
            num_tokens = longer
        if not error:
            past.is_settled = settled and link.num_observations > 1  # the first may have waited for a connection
            past.num_unsettled = 0 if past.is_settled else past.num_unsettled + 1
        return error

    def _is_idle(self, worker: Worker, num_tokens: int) -> bool:
        """Return whether a prompt would stop and delay nobody, as far as its last report says: other routers' clients
        included."""
        view, report = self._context.fleet.view_of(worker), worker.load.report
        transfers = view.num_sending + view.num_receiving
        busy = view.num_in_flight + view.num_running + view.waiting_prefill_tokens + transfers
        told = report.num_running + report.num_waiting  # of which one that has ended since is taken off above
        return view.ready and not view.suspect and not busy and not told and _has_room(view, num_tokens)

    async def _timed(self, prefill: Worker, decode: Worker, num_tokens: int) -> tuple[str, float]:
        begun_s = self._context.clock.monotonic()
        error = await self._error_of(prefill, decode, num_tokens)
        return error, self._context.clock.monotonic() - begun_s

    async def _error_of(self, prefill: Worker, decode: Worker, num_tokens: int) -> str:
        """Return what went wrong with a trial, "" when nothing did."""
        model = _common_model(prefill, decode)
        try:
            if model is None:
                return "They have no model in common."
            async with asyncio.timeout(self._limits.trial_timeout_s):
                await self._split(prefill, decode, model, num_tokens)
        except TimeoutError:
            return f"It did not end within {self._limits.trial_timeout_s:g} s."
        except TollbridgeError as failure:
            return failure.message
        except ExceptionGroup as failures:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # before Python 3.13 a failing group forgets that
                raise asyncio.CancelledError from None
            return "; ".join(sorted({str(each) for each in failures.exceptions}))
        return ""

    async def _split(self, prefill: Worker, decode: Worker, model: str, num_tokens: int) -> None:
        """Raise TollbridgeError when the KV did not cross."""
        context = self._context
        call = _call(model, num_tokens)
        decision = Decision(
            id=call.id, policy="adaptive", choice="split", prefill=prefill.name, decode=decode.name, reason=TRIAL,
            why="Nobody knows what the link carries.", terms={"prompt_tokens": float(num_tokens)},
        )  # fmt: skip
        split, lesson = splits.split_of(context, call, prefill, decode), context.learner.lesson(decision)
        happened, moved = Happened(), context.fleet.begin_transfer(prefill, decode, num_tokens)
        try:
            await self._legs(prefill, decode, split, lesson, decision, happened)
            happened.status = "ok"
        finally:
            moved()
            split.release(arrived=bool(happened.split_verified), answered=happened.ttft_s is not None)
            lesson.end(happened, decision)

    async def _legs(
        self, prefill: Worker, decode: Worker, split: Split, lesson: Lesson, decision: Decision, happened: Happened
    ) -> None:
        begun_s = self._context.clock.monotonic()

        async def first() -> None:
            sent = self._leg(prefill, "prefill", split.prefill, split, decision)
            whole = self._context.releaser.outlive(sent) if split.prefill_outlives else sent
            answer, happened.prefill_report = await whole
            lesson.prefill_done()
            if reason := split.prefilled(answer):
                raise UnavailableError(f"{prefill.name} offers no KV: {reason}.")

        async with asyncio.TaskGroup() as group:
            leg = group.create_task(first())
            if split.decode() is None:
                await leg
            body = split.decode() or b""
            answer, happened.decode_report = await self._leg(decode, "decode", body, split, decision)
            lesson.first_token()  # the answer is one token
            happened.ttft_s = self._context.clock.monotonic() - begun_s
            await leg
        verdict = verify_split(happened.decode_report, usage_of(answer))
        happened.split_verified = verdict.verified
        if not verdict.verified:
            raise UnavailableError(verdict.why)

    async def _leg(
        self, worker: Worker, leg: Leg, body: bytes, split: Split, decision: Decision
    ) -> tuple[bytes, WorkerReport | None]:
        upstream = self._context.upstream
        with self._context.fleet.serving(worker, leg, **work_of(decision, leg)):
            async with upstream.request(worker, "POST", _PATH, body=body, headers=split.headers) as response:
                answer = await upstream.read(worker, response)
        failure = failure_of(worker, response.status, answer)
        if failure is not None or response.status != 200:
            raise failure or UnavailableError(f"{worker.name} answered {response.status} to a link trial.")
        self._context.fleet.succeeded(worker)
        return answer, take_report(answer)[1]


def _sample(members: Sequence[_Any]) -> Sequence[_Any]:
    return random.sample(members, min(len(members), _LOOKED_AT))


def _call(model: str, num_tokens: int) -> Call:
    """Return a request whose prompt nobody has cached."""
    prompt = [random.SystemRandom().randrange(*_TOKEN_IDS) for _ in range(num_tokens)]
    fields = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    raw = msgspec.json.encode(fields)
    return Call(
        id=f"link-trial-{secrets.token_hex(8)}", path=_PATH, body=msgspec.json.decode(raw, type=Body),
        body_bytes=len(raw), model=model, stream=False, override=None, trace={},
    )  # fmt: skip


def _num_tokens(prefill: Worker) -> int:
    per_token = prefill.load.report.kv_bytes_per_token
    return min(max(int(NUM_BYTES / per_token), MIN_TOKENS), MAX_TOKENS) if per_token else _UNSAID_TOKENS


def _longest(worker: Worker) -> int:
    """Return how many tokens a prompt may have by the worker's model cards."""
    stated = (card.get("max_model_len") for card in worker.models)
    return min((length - 1 for length in stated if isinstance(length, int) and length > 0), default=MAX_TOKENS)


def _common_model(prefill: Worker, decode: Worker) -> str | None:
    """Return a model of both that is no adapter: those are not split."""
    names = prefill.named().ids & decode.named().ids - prefill.named().adapters
    return min(names, default=None)


def _has_room(worker: WorkerView, num_tokens: int) -> bool:
    return worker.free_kv_tokens is None or worker.free_kv_tokens >= 2 * num_tokens


def _may_be_asked(worker: WorkerView, *, is_new: bool) -> bool:
    """Return whether a trial may begin. A new link is tried though its workers are busy: they may always be, and the
    first prompt is short."""
    if worker.suspect or not _has_room(worker, MAX_TOKENS):
        return False
    return is_new or max(worker.num_in_flight, worker.num_running) <= _BUSY
