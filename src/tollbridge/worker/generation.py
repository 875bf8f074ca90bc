"""One request between submit and its finish: the outputs in order, what they measured, and its end on every path.

`running` is a context: however the handler leaves it (finished, refused, cancelled because the client left), the engine
has forgotten the request afterwards, or been told to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tollbridge.engine.base import EngineRequest, StepOutput
from tollbridge.errors import TollbridgeError, UnavailableError
from tollbridge.obs.logs import request_line
from tollbridge.wire.params import WorkerReport
from tollbridge.worker.bridge import Timed
from tollbridge.worker.door import Door
from tollbridge.worker.job import Job

log = logging.getLogger("tollbridge.worker")


class Generation:
    """The running request. `ending` is its last output, `finish` the same when it ended well."""

    def __init__(self, door: Door, job: Job) -> None:
        self._door = door
        self.job = job
        self.num_tokens = 0  # generated
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.ending: StepOutput | None = None
        self.error = ""  # one sentence, when it did not end well
        self._stream = door.bridge.open()

    @property
    def finish(self) -> StepOutput | None:
        return None if self.ending is None or self.ending.finish_reason in ("error", "abort") else self.ending

    def submit(self) -> None:
        job = self.job
        request = EngineRequest(
            request_id=job.engine_id,
            prompt_token_ids=tuple(job.prompt_token_ids),
            sampling=job.sampling,
            sink=self._stream.sink,
            transfer=job.transfer,
            cache_salt=job.cache_salt,
            arrival_s=job.arrival_s,
        )
        try:
            self._door.engine.submit(request)
        except UnavailableError:
            self._door.engine_stopped = True
            raise

    async def next(self) -> list[StepOutput]:
        """Return the outputs since the last call, at least one; TollbridgeError once it has ended in failure."""
        if self.ending is None:
            outputs = [self._count(timed) for timed in await self._stream.next()]
            good = [output for output in outputs if output.finish_reason not in ("error", "abort")]
            if good:
                return good
        assert self.ending is not None, "only an ending is no good output"
        if self.ending.finish_reason == "error":
            raise TollbridgeError(self.ending.error or "The engine failed on this request: try it again.")
        raise UnavailableError("The worker ended this request because it is shutting down: try another worker.")

    def _count(self, timed: Timed) -> StepOutput:
        output, at_s = timed
        if output.token_ids:
            if self.first_token_s is None:
                self.first_token_s = at_s
                self._door.metrics.first_token(at_s - self.job.arrival_s)
            else:
                self._door.metrics.next_token(at_s - self.last_token_s)
            self.last_token_s = at_s
            self.num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self.ending = output
        return output


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
        if generation.ending is None:
            door.engine.abort(job.engine_id)
        _account(door, generation)


def _account(door: Door, generation: Generation) -> None:
    """Observe the request's times and write its one line of the log."""
    job, now_s = generation.job, door.clock.monotonic()
    ending = generation.ending or StepOutput(request_id=job.engine_id)
    outcome = ending.finish_reason or ("error" if generation.error else "abort")
    first_token_s = generation.first_token_s
    report, transfer = ending.report, ending.report.transfer if ending.report else None
    door.metrics.finished(outcome, e2e_s=now_s - job.arrival_s)
    if report is not None:
        _observe(door, generation, report)
    request_line(
        log,
        request=job.id,
        role=job.role,
        finish=outcome,
        prompt_tokens=len(job.prompt_token_ids),
        generated_tokens=generation.num_tokens,
        cached_tokens=report.cached_tokens if report else None,
        loaded_tokens=report.loaded_tokens if report else None,
        transfer=job.transfer.transfer_id if job.transfer else None,
        transfer_outcome=transfer.outcome if transfer else None,
        ttft_s=first_token_s - job.arrival_s if first_token_s is not None else None,
        total_s=now_s - job.arrival_s,
        error=generation.error or None,
    )


def _observe(door: Door, generation: Generation, report: WorkerReport) -> None:
    decode_s = generation.last_token_s - (generation.first_token_s or generation.last_token_s)
    door.metrics.reported(
        queue_s=report.queue_s,
        prefill_s=report.prefill_s,
        decode_s=decode_s,
        generated_tokens=generation.num_tokens,
    )
    if report.role == "decode":
        door.metrics.external_prefix(queries=report.prompt_tokens - report.cached_tokens, hits=report.loaded_tokens)
    if report.transfer is not None:
        door.metrics.transfer_ended(report.transfer.side, report.transfer.total_s)
