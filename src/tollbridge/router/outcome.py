"""What is remembered, counted and logged about one request: its decision record, filled in while it runs."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

from tollbridge.config.cluster import DEFAULT_TENANT
from tollbridge.obs.logs import request_line
from tollbridge.obs.tracing import NoTrace, Trace
from tollbridge.router.context import Context
from tollbridge.router.decide import num_choices_in_all
from tollbridge.router.ingress import Call
from tollbridge.router.payoff import maybe_payoff, meets
from tollbridge.router.stream import Usage
from tollbridge.router.verify import Verdict, verify_split
from tollbridge.wire.decision import Decision, DecisionRecord, Happened
from tollbridge.wire.params import WorkerReport

log = logging.getLogger("tollbridge.router")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What came before the decision."""

    at_s: float  # monotonic
    queue_s: float = 0.0  # waited for a place
    tenant: str = DEFAULT_TENANT
    trace: Trace = field(default_factory=lambda: NoTrace({}))  # of the request; the outcome ends it


class Outcome:
    """The record of one request. Its flow writes into it; `end` closes it, once."""

    def __init__(self, context: Context, call: Call, decision: Decision, arrival: Arrival) -> None:
        self._metrics = context.metrics
        self._clock = context.clock
        self._slo = context.config.slo
        self._started_s = context.clock.monotonic()
        self._trace = arrival.trace
        self._happened = Happened(tenant=arrival.tenant, queue_s=arrival.queue_s, num_choices=num_choices_in_all(call))
        self._record = DecisionRecord(at=context.clock.wall(), decision=decision, happened=self._happened)
        self._notes: list[str] = []
        self._verdict: Verdict | None = None
        self._stream = call.stream
        self._session, self._sessions = call.session, context.sessions
        self._ended = False
        self._num_prompt_tokens = 0  # of a continued stream
        self._num_kept = 0  # tokens that it had before the last worker went on
        self.usage: Usage | None = None
        self.num_chunks = 0
        self._lesson = context.learner.lesson(decision)
        context.decisions.add(self._record)

    @property
    def decision(self) -> Decision:
        return self._record.decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self._record.decision = decision

    @property
    def num_choices(self) -> int:
        return self._happened.num_choices

    def header(self) -> str:
        """Return the value of x-tollbridge-decision: ASCII JSON; `verified` only when it is known by then."""
        decision = self.decision
        fields: dict[str, object] = {
            "id": decision.id,
            "choice": decision.choice,
            "prefill": decision.prefill,
            "decode": decision.decode,
            "policy": decision.policy,
            "reason": decision.reason,
            "predicted": decision.terms,
        }
        if self._happened.queue_s:
            fields["queue_s"] = round(self._happened.queue_s, 4)
        if self._verdict is not None:
            fields["verified"] = self._verdict.verified
        return json.dumps(fields, separators=(",", ":"))

    # --- what the flow tells

    def new_attempt(self) -> None:
        """Forget what the workers of an earlier attempt reported."""
        self._happened.prefill_report = None
        self._happened.decode_report = None
        self._verdict = None
        self.usage = None

    def retry(self, decision: Decision) -> None:
        """Replace the decision by that of the next attempt."""
        self.decision = decision
        self._metrics.retries.labels(decision.reason).inc()
        log.warning("retry: id=%s reason=%s decode=%s %s", decision.id, decision.reason, decision.decode, decision.why)

    def continued(self, decision: Decision, *, num_prompt_tokens: int, num_kept: int) -> None:
        """The stream broke off and goes on elsewhere behind `num_kept` tokens."""
        self.decision = decision
        self._num_prompt_tokens, self._num_kept = num_prompt_tokens, num_kept
        self._happened.continued_at = [*self._happened.continued_at, num_kept]
        self._metrics.continuations.labels("continued").inc()
        log.warning("continued: id=%s decode=%s %s", decision.id, decision.decode, decision.why)

    def not_continued(self, reason: str) -> None:
        self._metrics.continuations.labels(reason).inc()

    def note(self, sentence: str) -> None:
        """Remember what went wrong on the way, also of a request that ends well."""
        self._notes.append(sentence)

    def first_event(self) -> None:
        """The first piece of the answer is about to reach the client."""
        self._happened.ttft_s = self._clock.monotonic() - self._started_s
        self._lesson.first_token()
        self._trace.event("first_byte")

    def relayed(self, num_chunks: int, longest_gap_s: float) -> None:
        """So many pieces of a stream have been written, with at most so long between two of them."""
        self.num_chunks += num_chunks
        self._happened.longest_gap_s = max(self._happened.longest_gap_s or 0.0, longest_gap_s)

    def came_whole(self) -> None:
        """The answer is not streamed: when its first token came, only the worker knows."""
        self._happened.ttft_s = None

    def prefill_done(self, report: WorkerReport | None) -> None:
        self._happened.prefill_report = report
        self._lesson.prefill_done()

    def decode_done(self, report: WorkerReport | None) -> None:
        """Take the decode worker's report and judge the split by it."""
        self._happened.decode_report = report
        if self.decision.choice == "split":
            self._verdict = verify_split(report, self.usage)

    def kv_arrived(self) -> bool:
        """Return whether the decode worker said that it loaded all that it lacked."""
        return self._verdict is not None and self._verdict.verified

    def answered(self, http_status: int) -> None:
        """The answer was sent whole."""
        self._happened.status = "ok" if http_status < 400 else "error"
        self._happened.http_status = http_status

    def failed(self, http_status: int, sentence: str) -> None:
        """The client gets an error: by its status, or as an event in a stream."""
        self._happened.status = "error"
        self._happened.http_status = http_status
        self.note(sentence)

    def cancelled(self, sentence: str) -> None:
        """The client left. After the end that is no news."""
        if self._ended:
            return
        self._happened.status = "cancelled"
        self.note(sentence)

    # --- the end

    def end(self) -> None:
        """Close the record: totals, metrics, one log line. What comes later does not change it."""
        happened = self._happened
        if self._ended:
            return
        self._ended = True
        if happened.status == "running":  # an exception nobody foresaw: the middleware answers 500
            self.failed(500, "The router failed on this request: its log has the traceback.")
        happened.total_s = self._clock.monotonic() - self._started_s
        happened.error = " ".join(self._notes)
        self._count_tokens()
        self._judge_split()
        self._note_session()
        happened.errors = dict(self._lesson.end(happened, self.decision))
        self._count()
        self._log()
        self._end_trace()

    def _end_trace(self) -> None:
        happened, decision = self._happened, self.decision
        report = happened.decode_report
        self._trace.end(
            error=happened.error if happened.status == "error" else "",
            id=decision.id,
            choice=decision.choice,
            reason=decision.reason,
            policy=decision.policy,
            prefill=decision.prefill,
            decode=decision.decode,
            status=happened.status,
            prompt_tokens=happened.prompt_tokens,
            completion_tokens=happened.completion_tokens,
            kv_payload_bytes=report.transfer.payload_bytes if report and report.transfer else None,
            ttft_s=happened.ttft_s,
        )

    def _note_session(self) -> None:
        happened = self._happened
        if self._session is not None and happened.status == "ok":
            self._sessions.served(
                self._session,
                self.decision.decode,
                prompt_tokens=happened.prompt_tokens,
                completion_tokens=happened.completion_tokens,
                now_s=self._clock.monotonic(),
            )

    def _count_tokens(self) -> None:
        happened, report = self._happened, self._happened.decode_report
        if report is not None:
            happened.prompt_tokens, happened.completion_tokens = report.prompt_tokens, report.generated_tokens
            happened.cached_tokens = report.cached_tokens
        elif self.usage is not None:
            happened.prompt_tokens = self.usage.prompt_tokens
            happened.completion_tokens = self.usage.completion_tokens
            # vLLM counts what a transfer brought as cached, too.
            happened.cached_tokens = self.usage.cached_tokens if self.decision.choice == "local" else None
        if self._num_prompt_tokens:  # what was generated before is prompt to the last worker
            happened.prompt_tokens, happened.cached_tokens = self._num_prompt_tokens, None
            happened.completion_tokens += self._num_kept

    def _judge_split(self) -> None:
        verdict = self._verdict
        if verdict is None or self._happened.status != "ok":
            return
        self._happened.split_verified = verdict.verified
        if verdict.verified:
            self._metrics.split_verified.inc()
            return
        self._metrics.split_unverified.labels(self._metrics.codes.label(verdict.reason)).inc()
        self._happened.error = f"{self._happened.error} {verdict.why}".strip()
        log.warning(
            "split not verified: id=%s prefill=%s decode=%s reason=%s %s",
            self.decision.id, self.decision.prefill, self.decision.decode, verdict.reason, verdict.why,
        )  # fmt: skip

    def _count(self) -> None:
        happened, metrics, choice = self._happened, self._metrics, self.decision.choice
        metrics.requests.labels(choice, self.decision.reason, happened.status).inc()
        metrics.duration.labels(choice).observe(happened.queue_s + (happened.total_s or 0.0))
        if happened.ttft_s is not None:
            metrics.ttft.labels(choice).observe(happened.queue_s + happened.ttft_s)
        if meets(happened, self._slo):
            metrics.within_slo.labels(choice).inc()
        payoff = maybe_payoff(self.decision, happened)
        if payoff is not None:
            metrics.toll_seconds.inc(payoff.toll_s)
            metrics.avoided_seconds.inc(payoff.avoided_s)
        if happened.longest_gap_s is not None:
            metrics.longest_gap.labels(choice).observe(happened.longest_gap_s)
        metrics.chunks.inc(self.num_chunks)
        self._count_cached()
        transfer = happened.decode_report.transfer if happened.decode_report else None
        if transfer is not None:
            metrics.kv_bytes.inc(max(transfer.payload_bytes, 0))
            metrics.wire_seconds.inc(max(transfer.wire_s, 0.0))

    def _count_cached(self) -> None:
        """Compare what the index promised with what the worker found; of a split, what it found before the transfer."""
        is_split = self.decision.choice == "split"
        predicted = self.decision.terms.get("decode_cached_tokens" if is_split else "cached_tokens")
        real = self._happened.cached_tokens
        if predicted is None or real is None:
            return
        self._metrics.cached_predicted.inc(predicted)
        self._metrics.cached_real.inc(real)
        self._metrics.cacheable.inc(self.decision.terms.get("prompt_tokens", 0))

    def _log(self) -> None:
        happened, decision = self._happened, self.decision
        request_line(
            log,
            id=decision.id,
            choice=decision.choice,
            prefill=decision.prefill,
            decode=decision.decode,
            policy=decision.policy,
            reason=decision.reason,
            tenant=happened.tenant,
            queue_s=happened.queue_s,
            status=happened.status,
            http_status=happened.http_status,
            stream=self._stream,
            ttft_s=happened.ttft_s,
            total_s=happened.total_s,
            prompt_tokens=happened.prompt_tokens,
            completion_tokens=happened.completion_tokens,
            verified=happened.split_verified,
        )
