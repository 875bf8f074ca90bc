"""A simulated worker: the production scheduler and block pool, with time in place of a model.

It does what `engine/loop.py` does: obey commands, schedule, compute, commit. A step takes as long as `Speed` says; what
arrives meanwhile waits for its end. Prefill publishes each layer as it is computed, decode parks until its KV is there.

`fast` computes decode steps ahead: when nothing waits, all that can happen before the next request ends is a command,
and that takes effect between two steps. The steps until then are planned as one event, and cut short if a command
comes. `sched/ahead.py` applies them; the results are the same bit for bit (tests/sim/test_ahead.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable

from tollbridge.kv.pool import BlockPool
from tollbridge.router.load import Report
from tollbridge.sched.ahead import TOKEN, DecodeRun, num_steps_ahead
from tollbridge.sched.plan import StepPlan
from tollbridge.sched.scheduler import Schedule, Scheduler
from tollbridge.sched.sequence import State, TokenSequence
from tollbridge.sim.agenda import STEP, Agenda
from tollbridge.sim.job import Job
from tollbridge.sim.scenario import EngineSpec
from tollbridge.sim.speed import Speed
from tollbridge.wire.events import KVEvent

_MAX_AHEAD = 256  # steps planned at once
_MAX_TIMES = 1 << 16  # step ends kept before those that nobody needs are dropped

EventSink = Callable[[str, list[KVEvent]], None]


class SimWorker:
    """One worker. Commands may come at any time; they take effect between two steps."""

    def __init__(
        self, name: str, host: str, spec: EngineSpec, agenda: Agenda, *, kv_bytes_per_token: float, fast: bool
    ) -> None:
        self.name = name
        self.host = host
        self.is_up = True
        self._spec = spec
        self._speed = Speed(spec.prefill, spec.decode)
        self._agenda = agenda
        self._kv_bytes_per_token = kv_bytes_per_token
        self._fast = fast
        self._life = 0  # events of earlier lives, and of runs that were cut short, are void
        self.on_events: EventSink = lambda name, events: None
        self.preemptions_total = 0
        self.computed_tokens_total = 0
        self._start()

    def _start(self) -> None:
        spec = self._spec
        self.pool = BlockPool(max(1, spec.kv_cache_tokens // spec.block_size), spec.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_num_seqs=spec.max_num_seqs,
            max_model_len=1 << 30,
            before_preempt=self._before_preempt,
        )
        self._max_pinned_blocks = int(spec.max_pinned_fraction * self.pool.num_blocks)
        self._jobs: dict[str, Job] = {}  # by request id, until they end
        self._sends: dict[Job, None] = {}  # their transfer has not ended; the job may have
        self._loads: dict[Job, None] = {}
        self._queued: dict[Job, None] = {}
        self._inbox: list[Callable[[], None]] = []
        self._is_busy = False
        self._run: DecodeRun | None = None
        self._run_ends: list[float] = []  # of the steps of the run, those still to be applied
        self._run_done = 0
        self._step_ends = array("d")
        self._num_dropped = 0  # step ends that came before those

    # --- commands

    def submit(self, job: Job) -> None:
        """Take a job. It fails at once when the worker is down."""
        if not self.is_up:
            job.listener.failed(job)
            return
        job.arrival_s = self._agenda.now_s
        self._queued[job] = None
        self._command(lambda: self._begin(job))

    def transfer_ended(self, job: Job, accepted: bool) -> None:
        """The transfer of a job of this worker has ended; `accepted` says whether decode has its KV."""
        if self.is_up and (job in self._sends or job in self._loads):
            self._command(lambda: self._transfer_ended(job, accepted))

    def die(self) -> list[Job]:
        """Lose everything; return the jobs that were here."""
        self._catch_up()
        lost, transfers = [*self._jobs.values(), *self._queued], [*self._sends, *self._loads]
        for job in lost:
            self._close_segment(job)
        self.is_up = False
        self._life += 1
        self._start()
        for job in {**dict.fromkeys(transfers), **dict.fromkeys(lost)}:
            if job.transfer is not None:
                job.transfer.end()
        return lost

    def come_back(self) -> None:
        self.is_up = True

    # --- what it says

    def report(self) -> Report:
        """Return what a router would read in its status now."""
        self._catch_up()
        statistics, size = self.scheduler.statistics(), self.pool.block_size
        sends = [job.transfer for job in self._sends if job.transfer is not None and job.transfer.flow is not None]
        loads = [job.transfer for job in self._loads if job.transfer is not None and job.transfer.flow is not None]
        return Report(
            block_size=size,
            kv_bytes_per_token=self._kv_bytes_per_token,
            max_num_batched_tokens=self._spec.max_num_batched_tokens,
            num_running=statistics.num_running,
            num_waiting=statistics.num_waiting + statistics.num_parked + len(self._queued),
            waiting_prefill_tokens=statistics.waiting_prefill_tokens
            + sum(job.sequence.num_prefill_tokens for job in self._queued),
            free_kv_tokens=self.pool.num_free * size,
            total_kv_tokens=self.pool.num_blocks * size,
            pinned_tokens=statistics.num_pinned_blocks * size,
            num_sending=len(sends),
            sending_bytes=sum(transfer.bytes_to_go for transfer in sends),
            num_receiving=len(loads),
            receiving_bytes=sum(transfer.bytes_to_go for transfer in loads),
        )

    @property
    def pinned_blocks(self) -> tuple[int, int]:
        """(pinned now, at most)"""
        return self.scheduler.num_pinned_blocks, self._max_pinned_blocks

    @property
    def is_idle(self) -> bool:
        return not (self._jobs or self._queued or self._sends or self._loads)

    def flush_events(self) -> None:
        """Hand the KV events so far to whoever listens."""
        self._catch_up()
        events = self.pool.take_events()
        if events:
            self.on_events(self.name, events)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.scheduler.check()
        assert set(self._jobs) == set(self.scheduler._sequences), "jobs and sequences differ"

    # --- the loop

    def _command(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        if self._run is not None:
            self._cut_run()
        elif not self._is_busy:
            self._turn()

    def _turn(self) -> None:
        """Start the next step, or go to sleep."""
        self._is_busy = True
        while True:
            while self._inbox:
                self._inbox.pop(0)()
            if self._fast and self._start_run():
                return
            schedule = self.scheduler.schedule()
            self._placed(schedule)
            if schedule.plan is not None:
                self._start_step(schedule.plan, preempted=bool(schedule.preempted))
                return
            if schedule.is_idle and not self._inbox:
                self._is_busy = False
                return

    def _start_step(self, plan: StepPlan, *, preempted: bool) -> None:
        duration_s, life = self._speed.step_s(plan.chunks), self._life
        if self._spec.io_s_per_byte and (self._sends or self._loads):
            duration_s += self._spec.io_s_per_byte * self._moved_bytes(plan, duration_s)
        prefills = any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
        if prefills or self._sends:
            self._publish(plan, duration_s)
        self._agenda.at(
            self._agenda.now_s + duration_s,
            lambda: self._step_over(plan, notable=prefills or preempted) if self._life == life else None,
            STEP,
        )

    def _step_over(self, plan: StepPlan, *, notable: bool) -> None:
        num_tokens = sum(1 for chunk in plan.chunks if chunk.needs_logits)
        grown = self.scheduler.commit(plan, [TOKEN] * num_tokens)
        self.computed_tokens_total += plan.num_tokens
        self._step_ends.append(self._agenda.now_s)
        at = self._num_dropped + len(self._step_ends) - 1
        for sequence in grown:
            job = self._jobs[sequence.request_id]
            if job.segment is None:
                job.segment = at
                self._first_token(job)
        self._end_finished(grown, notable=notable)
        self._turn()

    def _first_token(self, job: Job) -> None:
        if job.first_token_s is None:
            job.first_token_s = self._agenda.now_s
            job.listener.first_token(job)

    def _end_finished(self, grown: list[TokenSequence], *, notable: bool) -> None:
        """End those that have all their tokens. Events leave after steps in which something changed hands."""
        finished = [job for each in grown if (job := self._jobs[each.request_id]).num_generated >= job.num_output]
        for job in finished:
            self._finish(job)
        if finished or notable:
            self.flush_events()
        if len(self._step_ends) > _MAX_TIMES or not self._jobs:
            self._drop_times()

    def _finish(self, job: Job) -> None:
        self._close_segment(job)
        del self._jobs[job.sequence.request_id]
        self.scheduler.finish(job.sequence, pin=job in self._sends)
        if job in self._sends:
            self._shed(self._max_pinned_blocks)
        job.listener.ended(job)

    # --- steps ahead

    def _start_run(self) -> bool:
        jobs = [self._jobs[sequence.request_id] for sequence in self.scheduler._running]
        if not jobs or (self._spec.io_s_per_byte and (self._sends or self._loads)):
            return False
        wanted = min(_MAX_AHEAD, *(job.num_output - job.num_generated for job in jobs))
        number = num_steps_ahead(self.scheduler, wanted) if wanted > 1 else 0
        if any(job.segment is None for job in jobs) or number < 2:
            return False
        step_s, end_s = self._speed.decodes_s(len(jobs)), self._agenda.now_s
        self._run, self._run_ends, self._run_done = DecodeRun(self.scheduler, number), [], 0
        for _ in range(number):
            end_s += step_s
            self._run_ends.append(end_s)
        self._run.advance(0, is_last=False)  # the first step is scheduled now
        self._plan_run_end()
        return True

    def _plan_run_end(self) -> None:
        self._life += 1
        life = self._life
        self._agenda.at(self._run_ends[-1], lambda: self._run_over() if self._life == life else None, STEP)

    def _cut_run(self) -> None:
        """Let the run end with the step that is being computed."""
        keep = bisect_left(self._run_ends, self._agenda.now_s) + 1
        if keep < len(self._run_ends):
            del self._run_ends[keep:]
            self._plan_run_end()

    def _catch_up(self) -> None:
        """Apply the steps of a run that have ended."""
        if self._run is not None:
            self._apply(bisect_left(self._run_ends, self._agenda.now_s), is_last=False)

    def _apply(self, number: int, *, is_last: bool) -> None:
        assert self._run is not None
        if number or is_last:
            self._run_done += number
            self._run.advance(self._run_done, is_last=is_last)
            self.computed_tokens_total += number * len(self._run.sequences)
            self._step_ends.extend(self._run_ends[:number])
            del self._run_ends[:number]

    def _run_over(self) -> None:
        run = self._run
        assert run is not None
        self._apply(len(self._run_ends), is_last=True)
        self._run = None
        self._end_finished(run.sequences, notable=False)
        self._turn()

    # --- requests and transfers

    def _begin(self, job: Job) -> None:
        del self._queued[job]
        self._jobs[job.sequence.request_id] = job
        self.scheduler.add(job.sequence)
        if job.transfer is not None and job.transfer.ended_s is None and job.role == "prefill":
            self._sends[job] = None

    def _placed(self, schedule: Schedule) -> None:
        now_s = self._agenda.now_s
        for sequence in schedule.preempted:
            self.preemptions_total += 1
            self._close_segment(self._jobs[sequence.request_id])
        for sequences, can_compute in ((schedule.admitted, True), (schedule.parked, False)):
            for sequence in sequences:
                job = self._jobs[sequence.request_id]
                if job.scheduled_s is None:
                    job.scheduled_s, job.cached_tokens = now_s, min(sequence.num_hit_tokens, len(sequence.token_ids))
                if can_compute:
                    job.can_compute_s = job.can_compute_s or now_s
                    self._admitted(job)
                else:
                    self._open(job)
        if schedule.revoked is not None:
            transfer = self._jobs[schedule.revoked.request_id].transfer
            assert transfer is not None
            transfer.end()
        if schedule.starved:
            self._shed(self.scheduler.num_pinned_blocks - 1)

    def _admitted(self, job: Job) -> None:
        if job.transfer is None:
            return
        if job.role == "decode":
            job.transfer.end()  # it needs nothing of it, or had it and was preempted
        elif job in self._sends and job.sequence.num_hit_tokens:
            job.transfer.publish([(self._agenda.now_s, float(job.sequence.num_hit_tokens))])

    def _open(self, job: Job) -> None:
        assert job.transfer is not None
        self._loads[job] = None
        job.transfer.open(job.sequence.num_hit_tokens, job.sequence.num_prompt_tokens - 1)

    def _publish(self, plan: StepPlan, duration_s: float) -> None:
        """Layers of the chunks that other workers wait for leave as they are computed."""
        now_s, layers = self._agenda.now_s, self._spec.num_layers
        for chunk in plan.chunks:
            job = self._jobs[chunk.request_id]
            if job in self._sends and job.transfer is not None:
                first, size = chunk.first_token, len(chunk.token_ids)
                shares = [layer / layers for layer in range(1, layers + 1)]
                job.transfer.publish([(now_s + share * duration_s, first + share * size) for share in shares])

    def _moved_bytes(self, plan: StepPlan, duration_s: float) -> float:
        """Return about what of KV comes and goes during a step: of what it computes, all but the last layer at most."""
        received = sum(job.transfer.bytes_per_s for job in self._loads if job.transfer is not None) * duration_s
        sends = {job.sequence.request_id: job.transfer for job in self._sends if job.transfer is not None}
        waiting = sum(transfer.waiting_bytes for transfer in sends.values())
        new_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.request_id in sends)
        new_bytes = self._kv_bytes_per_token * new_tokens * (1 - 1 / self._spec.num_layers)
        fastest = max((transfer.capacity_bytes_per_s for transfer in sends.values()), default=0.0)
        return received + min(waiting + new_bytes, fastest * duration_s)

    def _transfer_ended(self, job: Job, accepted: bool) -> None:
        sequence = job.sequence
        if job in self._sends:
            del self._sends[job]
            if sequence.state is State.PINNED:
                self.scheduler.unpin(sequence)
        elif job in self._loads:
            del self._loads[job]
            if sequence.state is State.PARKED:
                job.can_compute_s = self._agenda.now_s
                job.loaded_tokens = sequence.num_lacking if accepted else 0
                self.scheduler.loaded(sequence, accepted=accepted)

    def _shed(self, max_blocks: int) -> None:
        """Give up finished sends, the newest first, those that decode has not opened before others."""
        if self.scheduler.num_pinned_blocks <= max_blocks:
            return
        pinned = [job for job in self._sends if job.sequence.state is State.PINNED and job.transfer is not None]
        pinned.sort(key=lambda job: job.transfer is not None and job.transfer.flow is None)
        held = self.scheduler.num_pinned_blocks
        while pinned and held > max_blocks:
            job = pinned.pop()
            held -= len(job.sequence.block_table)
            assert job.transfer is not None
            job.transfer.end()

    def _before_preempt(self, sequence: TokenSequence) -> None:
        job = self._jobs[sequence.request_id]
        if job in self._sends and job.transfer is not None:
            job.transfer.rewind()

    # --- when tokens came

    def _close_segment(self, job: Job) -> None:
        """Keep the times of the tokens since the run began: one at each step end."""
        if job.segment is not None:
            job.token_times.extend(self._step_ends[job.segment - self._num_dropped :])
            job.segment = None

    def _drop_times(self) -> None:
        open_segments = [job.segment for job in self._jobs.values() if job.segment is not None]
        keep_from = min(open_segments, default=self._num_dropped + len(self._step_ends))
        del self._step_ends[: keep_from - self._num_dropped]
        self._num_dropped = keep_from
