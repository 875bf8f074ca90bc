"""One request's life, as an explicit state machine.

    DECIDED ──> WAITING ──> RELAYING ──> ENDED
                │   ^  │                   ^
                └───┘  └───────────────────┘
                retry   refused, cancelled, out of workers or of budget

    DECIDED   workers chosen, nothing sent
    WAITING   legs sent, nothing has reached the client: another attempt is possible
    RELAYING  the client has the head of the answer: no way back, but a stream may be continued on another worker
    ENDED     record, metrics and log line written, exactly once

Retries before the first byte: the prefill leg failed -> once more, alone on the decode worker (`prefill_failed`); the
decode leg failed -> alone on a worker not yet tried (`decode_failed`), `max_retries` times. After the first byte a
failed prefill leg is only recorded: decode recomputes by itself what it does not receive. A stream that breaks off
after its first byte is continued on another worker from the tokens already sent (`continuing`), where the request
allows it; otherwise the client gets an error event. All of these draw on one budget for the whole router.

Cancellation: the handler's task is cancelled when the client leaves. Both legs run inside it, and leaving
`Upstream.request` closes the connection, so both workers see it at once and abort. The prefill leg of a NIXL push
goes on (`Releaser.outlive`): decode frees the blocks that wait for it only when they have been written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import NoReturn

import msgspec
from aiohttp import web

from tollbridge.errors import DeadlineError, NotFoundError, TollbridgeError, UnavailableError
from tollbridge.policy.decide import after_break, after_decode_failure, after_prefill_failure
from tollbridge.router import legs, splits
from tollbridge.router.answers import error_answer, error_document
from tollbridge.router.client import DECISION_HEADER, Client
from tollbridge.router.context import Context
from tollbridge.router.continuing import PATH, CannotContinueError, Continuation, Continuing
from tollbridge.router.fleet import Leg, Worker
from tollbridge.router.ingress import Call
from tollbridge.router.outcome import Arrival, Outcome
from tollbridge.router.relay import Relay
from tollbridge.router.resume import OBSTACLES
from tollbridge.router.splice import DivergedError
from tollbridge.router.splits import Split
from tollbridge.router.stream import take_report
from tollbridge.router.upstream import ClientGoneError, deadline, failure_of
from tollbridge.router.work import tokens_to_move, work_of
from tollbridge.wire import sse
from tollbridge.wire.decision import Decision


class Phase(Enum):
    DECIDED = "decided"
    WAITING = "waiting"
    RELAYING = "relaying"
    ENDED = "ended"


class PrefillFailedError(Exception):
    """The prefill leg failed while nothing had been relayed. `reason` is the code of the retry."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Flow:
    """Drives one request. Use once: `await flow.run()`."""

    def __init__(self, context: Context, call: Call, client: Client, decision: Decision, arrival: Arrival) -> None:
        self._context = context
        self._config = context.config.router
        self._fleet = context.fleet
        self._continuing = Continuing(context, call)
        self._call = self._continuing.call
        self._client = client
        self._outcome = Outcome(context, call, decision, arrival)
        context.budget.deposit()
        self._left_s = context.left_s(call, arrival.at_s)
        self._trace = arrival.trace
        self._relay = Relay(context, client, self._outcome, begin=self._begin, finish=self._finish)
        self._headers = legs.headers_for(call)
        self._tried: frozenset[str] = frozenset()  # decode workers that failed
        self._retries_left = context.limits.max_retries  # of the decode leg
        self._prefill: asyncio.Task[None] | None = None  # owned by the task group of `_split`
        self._begun = asyncio.Event()  # the first byte is at hand
        self._at_first_token: list[Callable[[], None]] = []  # what the fleet wants to know; each may be called twice
        self.phase = Phase.DECIDED

    @property
    def decision(self) -> Decision:
        return self._outcome.decision

    async def run(self) -> web.StreamResponse:
        """Return the answer. It has been sent already unless it is an error from before the first byte."""
        try:
            async with asyncio.timeout(self._left_s):
                return await self._attempts()
        except TimeoutError:
            return await self._give_up(
                DeadlineError(f"The request did not end within {self._call.timeout_s:g} s, its deadline.")
            )
        except TollbridgeError as error:
            return await self._give_up(error)
        except ClientGoneError as error:
            self._outcome.cancelled(str(error))
            self._client.drop()
            return self._client.response or web.Response(status=499)  # nobody reads it
        except asyncio.CancelledError:
            self._outcome.cancelled("The client closed its connection.")
            raise
        finally:  # also of what nobody foresaw
            self.phase = Phase.ENDED
            self._outcome.end()

    # --- attempts

    async def _attempts(self) -> web.StreamResponse:
        while True:
            self.phase = Phase.WAITING
            self._outcome.new_attempt()
            try:
                if self.decision.choice == "split":
                    return await self._split()
                ask_usage = splits.asks_usage(self._call, self._fleet[self.decision.decode])
                body = legs.local_body(self._call, ask_usage=ask_usage)
                return await self._decode_leg(body, self._headers, hide_usage=ask_usage)
            except PrefillFailedError as error:
                self._retry(after_prefill_failure(self.decision, error.reason))
            except UnavailableError as error:
                if self._client.response is not None:
                    return await self._continue(error)
                self._retry(self._elsewhere(error))

    async def _continue(self, error: UnavailableError) -> web.StreamResponse:
        """Let other workers finish the stream that broke off with `error`; raise it when they cannot."""
        while True:
            leg = await self._next_leg(error)
            self._outcome.new_attempt()
            if not leg.body:
                return await self._relay.finish(leg.rest)
            try:
                return await self._decode_leg(leg.body, self._headers, path=PATH, passed=leg.passed)
            except UnavailableError as another:
                error = another
            except DivergedError as diverged:
                raise self._broken(error, "diverged") from diverged

    async def _next_leg(self, error: UnavailableError) -> Continuation:
        try:
            leg = await self._continuing.next_leg(self.decision.decode)
        except CannotContinueError as why:
            raise self._broken(error, why.reason) from error
        num_prompt_tokens = self._continuing.num_prompt_tokens
        decision = after_break(self.decision, leg.worker, leg.num_kept)
        self._outcome.continued(decision, num_prompt_tokens=num_prompt_tokens, num_kept=leg.num_kept)
        return leg

    def _broken(self, error: UnavailableError, reason: str) -> UnavailableError:
        """Return `error` with the reason why the stream ends with it."""
        self._outcome.not_continued(reason)
        return type(error)(f"{error.message} The stream was not continued elsewhere ({reason}): {OBSTACLES[reason]}.")

    def _elsewhere(self, error: UnavailableError) -> Decision:
        """Return the second attempt after `error` of the decode leg; raise `error` when there is none."""
        self._tried |= {self.decision.decode}
        if not self._retries_left:
            raise error
        self._retries_left -= 1
        try:
            return after_decode_failure(self.decision, self._fleet.view(self._call.model), self._tried)
        except TollbridgeError:
            raise error from None

    def _retry(self, decision: Decision) -> None:
        if self._client.gone:
            raise ClientGoneError("The client closed its connection.")
        if not self._context.budget.withdraw():
            self._context.metrics.retries_refused.inc()
            raise UnavailableError(
                f"{self.decision.decode} or its prefill worker failed, and so many requests have been retried lately "
                "that this one is not: try again in a moment."
            )
        self._outcome.retry(decision)
        self._continuing.begin_again()

    async def _give_up(self, error: TollbridgeError) -> web.StreamResponse:
        """Tell the client: by the status when it has nothing yet, else by an error event and an end without [DONE]."""
        self._outcome.failed(error.status, error.message)
        self._outcome.end()
        if self._client.response is None:
            answer = error_answer(error)
            answer.headers[DECISION_HEADER] = self._outcome.header()
            return answer
        try:
            return await self._client.end_stream(sse.event(error_document(error)))
        except ClientGoneError:
            self._client.drop()
            return self._client.response

    # --- the two legs of a split

    async def _split(self) -> web.StreamResponse:
        """Send both legs, at once or in turn as their connector has it; leave with neither running."""
        prefill, decode = self._fleet[self.decision.prefill or ""], self._fleet[self.decision.decode]
        veto_tokens = int(self.decision.terms.get("veto_tokens", 0.0))
        split = splits.split_of(self._context, self._call, prefill, decode, veto_tokens=veto_tokens)
        self._outcome.decision = msgspec.structs.replace(self.decision, transfer_id=split.transfer_id)
        moved = self._fleet.begin_transfer(prefill, decode, tokens_to_move(self.decision))
        self._at_first_token.append(moved)
        try:
            async with asyncio.TaskGroup() as group:
                self._prefill = group.create_task(self._prefill_leg(prefill, split))
                if split.patience_s is not None:
                    group.create_task(self._insist(self._prefill, split.patience_s))
                if split.decode() is None:
                    await self._prefill
                ask_usage = splits.asks_usage(self._call, decode)
                response = await self._decode_leg(split.decode() or b"", split.headers, hide_usage=ask_usage)
        except ExceptionGroup as failures:
            _raise_if_cancelled()
            _raise_worst(failures)
        finally:
            moved()
            self._prefill = None
            split.release(arrived=self._outcome.kv_arrived(), answered=self._begun.is_set())
        return response

    async def _prefill_leg(self, worker: Worker, split: Split) -> None:
        reason = "prefill_failed"
        try:
            leg = self._whole(worker, "prefill", split.prefill, split.headers)
            status, answer = await (self._context.releaser.outlive(leg) if split.prefill_outlives else leg)
            if status == 200:
                self._outcome.prefill_done(take_report(answer)[1])
                self._fleet.succeeded(worker)
                reason = split.prefilled(answer)
                if not reason:
                    return
            else:  # The client's own mistake, most likely: alone on the decode worker it gets its proper answer.
                reason = "prefill_refused"
        except NotFoundError:
            reason = "prefill_refused"
        except UnavailableError as error:
            self._failed(worker, "prefill", error)
        self._serve_alone(reason)

    async def _insist(self, prefill: asyncio.Task[None], patience_s: float) -> None:
        """Give decode `patience_s` from prefill's end to begin; then its KV is gone and it would wait for ever."""
        await asyncio.wait({prefill})
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._begun.wait()
        self._serve_alone("kv_never_came")

    def _serve_alone(self, reason: str) -> None:
        """Give up the split for `reason`, unless decode has begun to answer."""
        if self.phase is Phase.WAITING:
            self.phase = Phase.DECIDED  # from here on decode may not begin to relay: the retry owns the client
            raise PrefillFailedError(reason)

    async def _whole(self, worker: Worker, leg: Leg, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Return status and body of a leg that is not streamed; UnavailableError for the worker's own failures."""
        upstream = self._context.upstream
        work = work_of(self.decision, leg)
        async with deadline(worker, self._config.first_byte_timeout_s):
            with self._trace.span(leg, worker=worker.name) as span, self._fleet.serving(worker, leg, **work):
                headers = {**headers, **span.headers}
                async with upstream.request(worker, "POST", self._call.path, body=body, headers=headers) as response:
                    answer = await upstream.read(worker, response)
                span.set(http_status=response.status, num_bytes=len(answer))
        failure = failure_of(worker, response.status, answer)
        if failure is not None:
            raise failure
        return response.status, answer

    async def _decode_leg(
        self,
        body: bytes,
        headers: dict[str, str],
        *,
        hide_usage: bool = False,
        path: str | None = None,
        passed: Callable[[bytes], bytes] | None = None,
    ) -> web.StreamResponse:
        """Send `body` to the decode worker and relay what it says; UnavailableError when it fails."""
        worker = self._fleet[self.decision.decode]
        passed = passed or self._continuing.listener
        upstream = self._context.upstream
        try:
            async with deadline(worker, self._config.first_byte_timeout_s) as limit:
                work = work_of(self.decision, "decode")
                with (
                    self._trace.span("decode", worker=worker.name) as span,
                    self._fleet.serving(worker, "decode", num_choices=self._outcome.num_choices, **work) as prefilled,
                ):
                    self._at_first_token.append(prefilled)
                    if self._client.response is not None:  # it continues a stream, which has its first token
                        prefilled()
                    headers = {**headers, **span.headers}
                    async with upstream.request(
                        worker, "POST", path or self._call.path, body=body, headers=headers
                    ) as response:
                        return await self._relay.answer(worker, response, limit, hide_usage=hide_usage, passed=passed)
        except UnavailableError as error:
            self._failed(worker, "decode", error)
            if self._relay.is_complete:  # the client has all of it: how the connection ended is no matter
                return await self._relay.finish(b"")
            raise

    def _failed(self, worker: Worker, leg: Leg, error: UnavailableError) -> None:
        if not worker.left:  # its series are gone
            self._context.metrics.upstream_errors.labels(worker.name, leg).inc()
        self._outcome.note(error.message)
        self._fleet.noticed(worker, error)

    def _begin(self) -> None:
        """The first byte is at hand: from here on there is no way back."""
        if self.phase is not Phase.WAITING:
            raise PrefillFailedError("prefill_failed")  # a moment ago; the retry owns the client
        self.phase = Phase.RELAYING
        for tell in self._at_first_token:
            tell()
        self._begun.set()
        self._outcome.first_event()

    async def _finish(self) -> None:
        """The answer is complete but for its last byte: close the record, so that who sees the end can read it.

        The prefill leg may hand in its report if its KV arrived; otherwise nobody wants the rest of it.
        """
        prefill = self._prefill
        if prefill is not None and not prefill.done():
            if self._outcome.kv_arrived():
                await asyncio.wait({prefill}, timeout=self._context.limits.prefill_grace_s)
            prefill.cancel()
        self._outcome.end()


def _raise_if_cancelled() -> None:
    """Before Python 3.13 a group whose task fails forgets that it was cancelled meanwhile: by a deadline, or a list."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _raise_worst(failures: ExceptionGroup[Exception]) -> NoReturn:
    """Both legs may fail at the same time: a fault of ours first, then what allows a retry."""

    def rank(error: Exception) -> int:
        ranks = (PrefillFailedError, ClientGoneError, TollbridgeError)
        return next((at for at, kind in enumerate(ranks) if isinstance(error, kind)), -1)

    raise min(failures.exceptions, key=rank) from None
