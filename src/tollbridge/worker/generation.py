"""One request between submit and its finish: the outputs in order, what they measured, and its end on every path.

A request has one branch for each choice. Those that share a prompt start with the first of them; the others follow when
its first token is there, and find the prompt's KV in the prefix cache. `running` is a context: however the handler
leaves it (finished, refused, cancelled because the client left), the engine has forgotten the request afterwards, or
been told to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tollbridge.engine.base import EngineRequest, StepOutput
from tollbridge.errors import TollbridgeError, UnavailableError
from tollbridge.obs.logs import request_line
from tollbridge.obs.metrics import WorkerMetrics
from tollbridge.wire.params import WorkerReport
from tollbridge.worker.bridge import Timed
from tollbridge.worker.door import Door
from tollbridge.worker.job import Branch, Job
from tollbridge.worker.past import tell

log = logging.getLogger("tollbridge.worker")

BranchOutput = tuple[Branch, StepOutput]


@dataclass(kw_only=True)
class Progress:
    """How far a branch has got."""

    branch: Branch
    num_tokens: int = 0  # generated
    first_token_s: float | None = None
    last_token_s: float = 0.0
    ending: StepOutput | None = None  # its last output

    def take(self, output: StepOutput, at_s: float, metrics: WorkerMetrics, arrival_s: float) -> None:
        """Count an output that the engine handed over at `at_s`."""
        if output.token_ids:
            if self.first_token_s is None:
                self.first_token_s = at_s
                metrics.first_token(at_s - arrival_s)
            else:
                metrics.next_token(at_s - self.last_token_s)
            self.last_token_s = at_s
            self.num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self.ending = output


class Generation:
    """The running request."""

    def __init__(self, door: Door, job: Job) -> None:
        self._door = door
        self.job = job
        self.error = ""  # one sentence, when it did not end well
        self.started: dict[str, Progress] = {}  # by engine id
        self._followers = [branch for branch in job.branches if branch.leader is not None]
        self._failure: StepOutput | None = None
        self._stream = door.bridge.open()

    @property
    def finished(self) -> bool:
        """Whether every branch has ended well."""
        return (
            self._failure is None
            and not self._followers
            and all(progress.ending is not None for progress in self.started.values())
        )

    def submit(self) -> None:
        """Start the branches that need not wait."""
        for branch in self.job.branches:
            if branch.leader is None:
                self._start(branch)

    def abort(self) -> None:
        """End whatever has not ended."""
        for engine_id, progress in self.started.items():
            if progress.ending is None:
                self._door.engine.abort(engine_id)

    async def next(self) -> list[BranchOutput]:
        """Return the outputs since the last call, at least one; TollbridgeError once a branch has ended in failure."""
        if self._failure is None:
            outputs = [self._count(timed) for timed in await self._stream.next()]
            good = [each for each in outputs if each[1].finish_reason not in ("error", "abort")]
            self._failure = next((output for _, output in outputs if output.finish_reason in ("error", "abort")), None)
            if self._failure is None:
                self._start_followers(good)
            if good:
                return good
        assert self._failure is not None, "only a failure is no good output"
        if self._failure.finish_reason == "error":
            raise TollbridgeError(self._failure.error or "The engine failed on this request: try it again.")
        raise UnavailableError("The worker ended this request because it is shutting down: try another worker.")

    def _start(self, branch: Branch) -> None:
        job = self.job
        request = EngineRequest(
            request_id=branch.engine_id,
            prompt_token_ids=tuple(branch.prompt_token_ids),
            sampling=branch.sampling,
            sink=self._stream.sink,
            transfer=branch.transfer,
            cache_salt=job.cache_salt,
            arrival_s=job.arrival_s,
            priority=job.priority,
            num_continued_tokens=job.num_continued_tokens,
        )
        try:
            self._door.engine.submit(request)
        except UnavailableError:
            self._door.engine_stopped = True
            raise
        self.started[branch.engine_id] = Progress(branch=branch)

    def _start_followers(self, outputs: list[BranchOutput]) -> None:
        if not self._followers:
            return
        leaders = {branch.index for branch, output in outputs if output.token_ids}
        ready = [branch for branch in self._followers if branch.leader in leaders]
        self._followers = [branch for branch in self._followers if branch.leader not in leaders]
        for branch in ready:
            self._start(branch)

    def _count(self, timed: Timed) -> BranchOutput:
        output, at_s = timed
        progress = self.started[output.request_id]
        progress.take(output, at_s, self._door.metrics, self.job.arrival_s)
        return progress.branch, output


@contextmanager
def running(door: Door, job: Job) -> Iterator[Generation]:
    """Submit `job` and follow it. RequestError or ContextLengthError when the engine can never run it."""
    generation = Generation(door, job)
    try:
        generation.submit()
        yield generation
    except TollbridgeError as error:
        generation.error = error.message
        raise
    finally:
        generation.abort()
        _account(door, generation)


def _account(door: Door, generation: Generation) -> None:
    """Observe the request's times and write its one line of the log."""
    job, now_s = generation.job, door.clock.monotonic()
    branches = list(generation.started.values())
    first_token_s = min((one.first_token_s for one in branches if one.first_token_s is not None), default=None)
    outcome = _outcome(generation)
    door.metrics.finished(outcome, e2e_s=now_s - job.arrival_s)
    for progress in branches:
        if progress.ending is not None and progress.ending.report is not None:
            _observe(door, progress, progress.ending.report)
    lead = branches[0].ending if branches else None
    report = lead.report if lead else None
    transfer = report.transfer if report else None
    tell(door, job, branches, outcome, generation.error)
    request_line(
        log,
        request=job.id,
        role=job.role,
        finish=outcome,
        prompt_tokens=job.num_prompt_tokens,
        generated_tokens=sum(progress.num_tokens for progress in branches),
        cached_tokens=report.cached_tokens if report else None,
        loaded_tokens=report.loaded_tokens if report else None,
        transfer=job.transfer.transfer_id if job.transfer else None,
        transfer_outcome=transfer.outcome if transfer else None,
        ttft_s=first_token_s - job.arrival_s if first_token_s is not None else None,
        total_s=now_s - job.arrival_s,
        error=generation.error or None,
    )


def _outcome(generation: Generation) -> str:
    """Return how the request ended: badly when any branch did, else as the first one."""
    reasons = [each.ending.finish_reason if each.ending else None for each in generation.started.values()]
    bad = next((reason for reason in reasons if reason in ("error", "abort")), None)
    if bad is None and reasons and None not in reasons:
        return str(reasons[0])
    return str(bad or ("error" if generation.error else "abort"))


def _observe(door: Door, progress: Progress, report: WorkerReport) -> None:
    decode_s = progress.last_token_s - (progress.first_token_s or progress.last_token_s)
    door.metrics.reported(
        queue_s=report.queue_s,
        prefill_s=report.prefill_s,
        decode_s=decode_s,
        generated_tokens=progress.num_tokens,
    )
    if report.role == "decode":
        door.metrics.external_prefix(queries=report.prompt_tokens - report.cached_tokens, hits=report.loaded_tokens)
    if report.transfer is not None:
        door.metrics.transfer_ended(report.transfer.side, report.transfer.total_s)
