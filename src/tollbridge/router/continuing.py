"""A stream that breaks off, and how it goes on: who takes it, from which token, within which budget."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tollbridge.errors import TollbridgeError, UnavailableError
from tollbridge.policy.rules import least_loaded
from tollbridge.router import legs
from tollbridge.router.context import Context
from tollbridge.router.fleet import Worker
from tollbridge.router.ingress import Call
from tollbridge.router.resume import (
    OBSTACLES,
    Resumable,
    continuation_body,
    maybe_resumable,
    obstacle_of,
    with_token_ids,
)
from tollbridge.router.seam import Seam, find_seam
from tollbridge.router.splice import Listener, Splice, ending
from tollbridge.router.transcript import Transcript
from tollbridge.router.upstream import deadline, failure_of

PATH = "/v1/completions"


class CannotContinueError(Exception):
    """`reason` is a code of `resume.OBSTACLES`."""

    def __init__(self, reason: str) -> None:
        super().__init__(OBSTACLES[reason])
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The next leg of a broken stream. Without `body` nothing is left to generate: `rest` ends the stream."""

    worker: str  # its name
    body: bytes = b""
    passed: Callable[[bytes], bytes] | None = None
    num_kept: int = 0
    rest: bytes = b""


class Continuing:
    """Follows one stream and continues it. `call` is what the first worker is to be sent."""

    def __init__(self, context: Context, call: Call) -> None:
        self._context = context
        self._embedded = all(worker.config.engine == "embedded" for worker in context.fleet)
        self._resumable = maybe_resumable(call, embedded=self._embedded)
        self._obstacle = obstacle_of(call.body, embedded=self._embedded)
        self._num_continued = 0
        self.call = call
        if self._resumable is not None:
            self.call = with_token_ids(call, secrets.randbits(62) if self._embedded else None)
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what a worker has told that the client does not have: another is asked for all of it."""
        self._told = Transcript()
        self.listener: Listener | None = None
        if self._resumable is not None:
            self.listener = Listener(self._told, wants_ids=self._resumable.wants_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._told.prompt_ids or [])

    async def next_leg(self, failed: str) -> Continuation:
        """Return how the stream goes on without worker `failed`; CannotContinueError when it does not."""
        resumable = self._check()
        if self._told.finish_reason is not None:  # only the end of the stream was lost: nobody is needed for that
            return self._rest(resumable, failed, len(self._told.ids))
        tried = frozenset({failed})
        while True:
            worker = self._worker(tried, failed)
            try:
                return await self._leg(resumable, worker)
            except UnavailableError as error:
                self._context.fleet.noticed(worker, error)
                tried |= {worker.name}

    def _check(self) -> Resumable:
        """Return what is needed to go on; CannotContinueError when that is known to be impossible."""
        resumable, told = self._resumable, self._told
        if resumable is None:
            raise CannotContinueError(self._obstacle or "parameter")
        if told.obstacle is not None:
            raise CannotContinueError(told.obstacle)
        if not told.prompt_ids:
            raise CannotContinueError("no_token_ids")
        if resumable.seeded and not resumable.greedy and not self._embedded:
            raise CannotContinueError("seeded")
        if self._num_continued >= self._context.limits.max_continuations:
            raise CannotContinueError("too_often")
        self._num_continued += 1
        return resumable

    def _worker(self, tried: frozenset[str], failed: str) -> Worker:
        """Return who goes on; one of the same revision if there is any."""
        fleet = self._context.fleet
        try:
            revision = fleet[failed].config.revision
            ready = fleet.view(self.call.model).without(tried).ready()
            ready = [worker for worker in ready if worker.revision == revision] or ready
            return fleet[least_loaded(ready, first="decode").name]
        except TollbridgeError:
            raise CannotContinueError("no_worker") from None

    async def _leg(self, resumable: Resumable, worker: Worker) -> Continuation:
        told = self._told
        seam = await find_seam(lambda ids: self._detokenize(worker, ids), told, resumable.stop)
        if seam is None:
            raise CannotContinueError("seam")
        if seam.overlap and not resumable.greedy and not self._embedded:
            raise CannotContinueError("seam")  # other draws would contradict the overlap
        prompt = [*(told.prompt_ids or []), *told.ids[: seam.cut]]
        room = _room(worker, len(prompt))
        if resumable.max_tokens == seam.cut or room == 0:
            return self._rest(resumable, worker.name, seam.cut)
        if not self._context.budget.withdraw():
            raise CannotContinueError("budget")
        body = continuation_body(self.call, resumable, prompt, num_kept=seam.cut, room=room, embedded=self._embedded)
        return Continuation(worker=worker.name, body=body, passed=self._splice(resumable, seam), num_kept=seam.cut)

    def _rest(self, resumable: Resumable, worker: str, num_kept: int) -> Continuation:
        return Continuation(worker=worker, rest=ending(self._told, resumable), num_kept=num_kept)

    def _splice(self, resumable: Resumable, seam: Seam) -> Splice:
        return Splice(self._told, resumable, seam)

    async def _detokenize(self, worker: Worker, ids: list[int]) -> str:
        """Return the text of `ids`; UnavailableError when the worker does not answer as it should."""
        body = msgspec.json.encode({"tokens": ids, **({"model": self.call.model} if self.call.model else {})})
        upstream = self._context.upstream
        async with (
            deadline(worker, self._context.limits.detokenize_timeout_s),
            upstream.request(worker, "POST", "/detokenize", body=body, headers=legs.headers_for(self.call)) as response,
        ):
            answer = await upstream.read(worker, response)
        failure = failure_of(worker, response.status, answer)
        if isinstance(failure, UnavailableError):
            raise failure
        try:
            return msgspec.json.decode(answer, type=_Text).prompt
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise UnavailableError(f"Worker {worker.name} cannot detokenize ({response.status}).") from None


class _Text(msgspec.Struct, frozen=True):
    prompt: str


def _room(worker: Worker, num_tokens: int) -> int | None:
    """Return how many tokens fit behind `num_tokens`, None when the worker does not say."""
    lengths = [card.get("max_model_len") for card in worker.models]
    known = [length for length in lengths if isinstance(length, int)]
    return max(min(known) - num_tokens, 0) if known else None
