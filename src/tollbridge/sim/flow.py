"""A request's life, as `router/flow.py` has it: decide, one leg or two, retries and continuations, the end.

Kept equal to it: both legs start at once; a failure before the first token is retried alone elsewhere; a stream that
breaks off goes on elsewhere from the tokens it has. Simpler here: when a prefill worker dies, its decode worker
recomputes at once, where the router would send it a new local request, with the same work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

from tollbridge.errors import TollbridgeError, UnavailableError
from tollbridge.policy.decide import after_break, after_decode_failure
from tollbridge.policy.rules import least_loaded
from tollbridge.router.learn import Lesson
from tollbridge.router.work import tokens_to_move, work_of
from tollbridge.sched.ahead import TOKEN
from tollbridge.sim.agenda import Agenda
from tollbridge.sim.arrivals import Arrival
from tollbridge.sim.job import Job, make_job
from tollbridge.sim.results import Record
from tollbridge.sim.router import SimRouter
from tollbridge.sim.scenario import OverheadSpec
from tollbridge.sim.transfer import Transfer
from tollbridge.wire.decision import Decision, Happened
from tollbridge.wire.params import TransferReport, WorkerReport

MAX_RETRIES = 3
MakeTransfer = Callable[[str, str, Callable[[bool], None]], Transfer]  # (prefill, decode, on end)


class Flow:
    """One request. `on_end` gets its record, once."""

    def __init__(
        self,
        request_id: str,
        arrival: Arrival,
        router: SimRouter,
        agenda: Agenda,
        *,
        overhead: OverheadSpec,
        make_transfer: MakeTransfer,
        on_end: Callable[[Record], None],
        block_size: int,
    ) -> None:
        self._id = request_id
        self._router = router
        self._agenda = agenda
        self._overhead = overhead
        self._make_transfer = make_transfer
        self._on_end = on_end
        self._block_size = block_size
        self._prompt = arrival.tokens()
        self._num_output = arrival.num_output
        self._tried: frozenset[str] = frozenset()
        self._retries_left = MAX_RETRIES
        self._attempt = 0
        self._prefill_leg = ExitStack()
        self._decode_leg = ExitStack()
        self._at_first_token: list[Callable[[], None]] = []
        self._prefill_job: Job | None = None
        self._decode_job: Job | None = None  # of a split
        self._num_resent = 0  # tokens of the answer that are part of the prompt by now
        self._lesson: Lesson | None = None
        self.decision: Decision | None = None
        self.record = Record(at_s=agenda.now_s, num_prompt=arrival.num_prompt)

    def start(self) -> None:
        """Decide and send."""
        try:
            self.decision = self._router.decide(self._id, self._prompt, self._num_output)
        except TollbridgeError:
            self._end(failed=True)
            return
        self.record.choice = self.decision.choice
        if self._router.is_priced:
            self._lesson = self._router.learner.lesson(self.decision)
        self._send(self.decision)

    # --- legs

    def _send(self, decision: Decision) -> None:
        self._attempt += 1
        prompt = self._prompt
        name = f"{self._id}.{self._attempt}"
        if decision.choice == "local" or decision.prefill is None:
            job = make_job(name, prompt, self._num_output, self, block_size=self._block_size)
            self._begin_leg("decode", decision, job)
            return
        transfer = self._make_transfer(decision.prefill, decision.decode, self._transfer_ended)
        veto_tokens = int(decision.terms.get("veto_tokens", 0.0))
        self._prefill_job = make_job(
            name, prompt, 1, self, block_size=self._block_size, role="prefill", transfer=transfer
        )
        self._decode_job = make_job(
            name, prompt, self._num_output, self, block_size=self._block_size, role="decode", transfer=transfer,
            veto_tokens=veto_tokens,
        )  # fmt: skip
        fleet = self._router.fleet
        self._at_first_token.append(
            fleet.begin_transfer(fleet[decision.prefill], fleet[decision.decode], tokens_to_move(decision))
        )
        self._begin_leg("prefill", decision, self._prefill_job)
        self._begin_leg("decode", decision, self._decode_job)

    def _begin_leg(self, leg: str, decision: Decision, job: Job) -> None:
        fleet = self._router.fleet
        if leg == "prefill":
            name, stack = decision.prefill or "", self._prefill_leg
            stack.enter_context(fleet.serving(fleet[name], "prefill", **work_of(decision, "prefill")))
        else:
            name, stack = decision.decode, self._decode_leg
            prefilled = stack.enter_context(fleet.serving(fleet[name], "decode", **work_of(decision, "decode")))
            self._at_first_token.append(prefilled)
        worker = self._router.workers[name]
        self._agenda.at(self._agenda.now_s + self._overhead.local_s, lambda: worker.submit(job))

    def _transfer_ended(self, accepted: bool) -> None:
        """The transfer of this request has ended: both workers learn it."""
        decision = self.decision
        assert decision is not None and decision.prefill is not None
        assert self._prefill_job is not None and self._decode_job is not None
        self._router.workers[decision.prefill].transfer_ended(self._prefill_job, accepted)
        self._router.workers[decision.decode].transfer_ended(self._decode_job, accepted)

    # --- what the workers tell (job.Listener)

    def first_token(self, job: Job) -> None:
        if job is self._prefill_job:
            return
        for tell in self._at_first_token:
            tell()
        self._at_first_token = []
        if self.record.ttft_s is None:
            self.record.ttft_s = self._agenda.now_s - self.record.at_s + self._hop_s()
            if self._lesson is not None:
                self._lesson.first_token()

    def ended(self, job: Job) -> None:
        if job is self._prefill_job:
            self._prefill_leg.close()
            return
        self._keep(job)
        self.record.cached_tokens = self._cached_tokens(job)
        self._end(failed=False, job=job)

    def failed(self, job: Job) -> None:
        """The worker died with this job, or was dead when it came."""
        assert self.decision is not None
        if job is self._prefill_job:
            self._prefill_leg.close()
            if job.transfer is not None:
                job.transfer.end()
            return
        self._keep(job)
        self._decode_leg.close()
        if job.transfer is not None:
            job.transfer.end()
        self._agenda.at(self._agenda.now_s, self._go_on)

    def _go_on(self) -> None:
        """Send the rest of the request to another worker."""
        failed = self.decision
        assert failed is not None
        self._tried |= {failed.decode}
        num_kept = len(self.record.token_times)
        try:
            if not self._retries_left:
                raise UnavailableError("The retries of this request are spent.")
            self._retries_left -= 1
            view = self._router.view()
            if num_kept:
                worker = least_loaded(view.without(self._tried).ready(), first="decode")
                self.decision = after_break(failed, worker.name, num_kept)
            else:
                self.decision = after_decode_failure(failed, view, self._tried)
        except TollbridgeError:
            self._end(failed=True)
            return
        self.record.retries += 1
        new = num_kept - self._num_resent
        self._prompt = [*self._prompt, *[TOKEN] * new]
        self._num_output -= new
        self._num_resent = num_kept
        self._send(self.decision)

    def _keep(self, job: Job) -> None:
        self.record.token_times.extend(job.token_times)

    def _hop_s(self) -> float:
        assert self.decision is not None
        return self._overhead.split_s - self._overhead.local_s if self.decision.choice == "split" else 0.0

    def _cached_tokens(self, job: Job) -> int:
        """Return the prompt tokens that nobody had to compute."""
        source = self._prefill_job if job.loaded_tokens and self._prefill_job is not None else job
        return max(source.cached_tokens, job.cached_tokens)

    # --- the end

    def _end(self, *, failed: bool, job: Job | None = None) -> None:
        self._decode_leg.close()
        for tell in self._at_first_token:
            tell()
        self.record.failed = failed
        self.record.ended_s = self._agenda.now_s
        if job is not None and job.transfer is not None and job.loaded_tokens:
            self.record.wire_bytes = job.transfer.num_bytes
        if self._lesson is not None and self.decision is not None:
            self._lesson.end(self._happened(job), self.decision)
        self._on_end(self.record)

    def _happened(self, job: Job | None) -> Happened:
        """Return what the router would have read from the workers' reports."""
        if job is None or self.record.ttft_s is None:
            return Happened(status="error")
        prefill = self._prefill_job
        return Happened(
            status="ok",
            ttft_s=self.record.ttft_s,
            total_s=self._agenda.now_s - self.record.at_s + self._hop_s(),
            prompt_tokens=job.sequence.num_prompt_tokens,
            completion_tokens=len(self.record.token_times),
            prefill_report=_report(prefill) if prefill is not None and prefill.first_token_s is not None else None,
            decode_report=_report(job),
        )


def _report(job: Job) -> WorkerReport:
    scheduled_s, first_s = job.scheduled_s or 0.0, job.first_token_s or 0.0
    can_compute_s = scheduled_s if job.can_compute_s is None else job.can_compute_s
    num_prompt = job.sequence.num_prompt_tokens
    return WorkerReport(
        role=job.role,
        queue_s=scheduled_s - job.arrival_s,
        prefill_s=first_s - can_compute_s,
        prompt_tokens=num_prompt,
        computed_tokens=num_prompt - job.cached_tokens - job.loaded_tokens,
        cached_tokens=job.cached_tokens,
        loaded_tokens=job.loaded_tokens,
        generated_tokens=job.num_generated,
        transfer=_transfer_report(job.transfer) if job.transfer is not None and job.role == "decode" else None,
    )


def _transfer_report(transfer: Transfer) -> TransferReport:
    flow, opened_s, ended_s = transfer.flow, transfer.opened_s or 0.0, transfer.ended_s or 0.0
    first_s = flow.first_byte_s if flow is not None and flow.first_byte_s is not None else ended_s
    done = flow is not None and math.isclose(flow.sent, flow.total)
    return TransferReport(
        transfer_id="",
        side="receive",
        outcome="done" if done else "cancelled",
        num_tokens=transfer.num_tokens if done else 0,
        payload_bytes=round(transfer.num_bytes) if done else 0,
        wait_s=max(0.0, first_s - opened_s),
        wire_s=max(0.0, ended_s - first_s),
        total_s=max(0.0, ended_s - opened_s) if opened_s else 0.0,
    )
