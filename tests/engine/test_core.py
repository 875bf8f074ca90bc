"""The engine on a fake model: one worker, no transfers."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.engine.fakes import (
    BLOCK_SIZE,
    EOS,
    TIMEOUT_S,
    VOCAB_SIZE,
    Answer,
    FakeRunner,
    Gate,
    Worker,
    prompt_of,
    reference,
)
from tests.engine.scripted import ScriptedSender
from tollbridge.clock import ManualClock
from tollbridge.engine.base import EngineRequest, SamplingParams
from tollbridge.errors import ContextLengthError, RequestError, UnavailableError, UnsupportedError
from tollbridge.kv.hashes import event_hash, prompt_hashes
from tollbridge.sched.plan import StepPlan
from tollbridge.wire.events import BlockStored
from tollbridge.wire.params import TransferParams


def transfer(role: str, transfer_id: str = "ab" * 16, tp_size: int = 1) -> TransferParams:
    return TransferParams(
        v=1,
        transfer_id=transfer_id,
        role=role,  # type: ignore[arg-type]
        host="127.0.0.1",
        port=1,
        tp_size=tp_size,
        expires=2e9,
    )


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 31, 32, 33, 100])
def test_generates_what_the_model_says(length: int) -> None:
    with Worker() as worker:
        answer = worker.submit(prompt_of(length))
        last = answer.wait()
        assert answer.token_ids == reference(prompt_of(length), max_tokens=6)
        assert last.finish_reason == "length" and last.stop_reason is None
        assert answer.text == "".join(f"{token} " for token in answer.token_ids)


def test_a_long_prompt_is_computed_in_chunks_under_the_token_budget() -> None:
    with Worker(max_num_batched_tokens=10) as worker:
        answer = worker.submit(prompt_of(35), max_tokens=2)
        answer.wait()
        assert [plan.num_tokens for plan in worker.runner.plans] == [10, 10, 10, 5, 1]
        assert [chunk.needs_logits for plan in worker.runner.plans for chunk in plan.chunks] == [
            False,
            False,
            False,
            True,
            True,
        ]
        assert answer.token_ids == reference(prompt_of(35), max_tokens=2)


def test_decodes_come_before_prefill_chunks() -> None:
    gate = Gate()
    with Worker(max_num_batched_tokens=8) as worker:
        worker.runner.before = gate
        first = worker.submit(prompt_of(4), max_tokens=8)
        gate.wait_arrived(1)
        second = worker.submit(prompt_of(20, start=3), max_tokens=2)
        gate.let_through()
        first.wait(), second.wait()
        assert [[len(chunk.token_ids) for chunk in plan.chunks] for plan in worker.runner.plans[:5]] == [
            [4],
            [1, 7],
            [1, 7],
            [1, 6],
            [1, 1],
        ]
        assert first.token_ids == reference(prompt_of(4), max_tokens=8)
        assert second.token_ids == reference(prompt_of(20, start=3), max_tokens=2)


def test_a_batch_gives_each_request_what_it_gets_alone() -> None:
    with Worker(max_num_seqs=4) as worker:
        prompts = [prompt_of(5 + 3 * i, start=i % 3) for i in range(12)]
        answers = [worker.submit(prompt, seed=i, max_tokens=3 + i) for i, prompt in enumerate(prompts)]
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            answer.wait()
            assert answer.token_ids == reference(prompt, max_tokens=3 + i, seed=i)
        assert max(len(plan.chunks) for plan in worker.runner.plans) == 4


def test_a_prefix_hit_is_not_computed_again() -> None:
    with Worker() as worker:
        prompt = prompt_of(22)
        worker.submit(prompt).wait()
        worker.runner.plans.clear()
        again = worker.submit(prompt)
        report = again.wait().report
        assert report is not None
        assert (report.cached_tokens, report.computed_tokens, report.prompt_tokens) == (20, 2, 22)
        assert worker.runner.plans[0].chunks[0].first_token == 20
        assert again.token_ids == reference(prompt, max_tokens=6)
        statistics = worker.engine.statistics()
        assert statistics.prefix_cache_queries_total == 44 and statistics.prefix_cache_hits_total == 20
        assert statistics.prompt_tokens_by_source == {
            "local_compute": 24,
            "local_cache_hit": 20,
            "external_kv_transfer": 0,
        }


def test_at_least_the_last_prompt_token_is_computed() -> None:
    with Worker() as worker:
        prompt = prompt_of(5 * BLOCK_SIZE)
        worker.submit(prompt).wait()
        report = worker.submit(prompt).wait().report
        assert report is not None and report.cached_tokens == 4 * BLOCK_SIZE


def test_generated_tokens_are_cached_too() -> None:
    with Worker() as worker:
        first = worker.submit(prompt_of(6), max_tokens=12)
        first.wait()
        conversation = [*prompt_of(6), *first.token_ids, 1, 2, 3]
        second = worker.submit(conversation)
        report = second.wait().report
        assert report is not None and report.cached_tokens == 16  # 17 tokens have KV, the last drawn has none
        assert second.token_ids == reference(conversation, max_tokens=6)


def test_cache_salts_are_kept_apart() -> None:
    with Worker() as worker:
        prompt = prompt_of(20)
        worker.submit(prompt, cache_salt="one").wait()
        report = worker.submit(prompt, cache_salt="two").wait().report
        assert report is not None and report.cached_tokens == 0
        report = worker.submit(prompt, cache_salt="one").wait().report
        assert report is not None and report.cached_tokens == 16


def test_preemption_does_not_change_the_output() -> None:
    prompts = [prompt_of(9 + i, start=i) for i in range(6)]
    with Worker(num_blocks=14) as worker:
        gate = Gate()
        worker.runner.before = gate
        answers = [worker.submit(prompt, max_tokens=30, seed=i) for i, prompt in enumerate(prompts)]
        gate.wait_arrived(1)
        gate.let_through()
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            answer.wait()
            assert answer.token_ids == reference(prompt, max_tokens=30, seed=i)
        assert worker.engine.statistics().preemptions_total > 0
        assert answers[0].last.report is not None and answers[0].last.report.computed_tokens == 9


def test_the_oldest_request_is_never_preempted() -> None:
    with Worker(num_blocks=12) as worker:
        answers = [worker.submit(prompt_of(8, start=i), max_tokens=33) for i in range(4)]
        order: list[int] = []
        for i, answer in enumerate(answers):
            answer.wait()
            order.append(i)
        first_id = answers[0].request_id
        firsts = [
            chunk.first_token for plan in worker.runner.plans for chunk in plan.chunks if chunk.request_id == first_id
        ]
        assert firsts == sorted(firsts)


def test_eos_ends_a_request() -> None:
    prompt = next(
        prompt_of(3, start=i) for i in range(VOCAB_SIZE) if EOS in reference(prompt_of(3, start=i), max_tokens=10)[1:]
    )
    expected = reference(prompt, max_tokens=10, ignore_eos=False)
    with Worker() as worker:
        answer = worker.submit(prompt, max_tokens=10, ignore_eos=False)
        last = answer.wait()
        assert last.finish_reason == "stop" and last.stop_reason is None
        assert answer.token_ids == expected and expected[-1] == EOS
        assert answer.text == "".join(f"{token} " for token in expected[:-1])
        ignoring = worker.submit(prompt, max_tokens=10)
        assert ignoring.wait().finish_reason == "length" and len(ignoring.token_ids) == 10


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    expected = reference(prompt_of(5), max_tokens=6)
    with Worker() as worker:
        answer = worker.submit(prompt_of(5), stop_token_ids=(expected[3],))
        last = answer.wait()
        assert (last.finish_reason, last.stop_reason) == ("stop", expected[3])
        assert answer.token_ids == expected[:4]
        assert answer.text == "".join(f"{token} " for token in expected[:3])


def test_a_stop_string_ends_a_request_and_is_named() -> None:
    expected = reference(prompt_of(5), max_tokens=6)
    stop = f"{expected[2]} {expected[3]}"
    with Worker() as worker:
        answer = worker.submit(prompt_of(5), stop=(stop,))
        last = answer.wait()
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert answer.token_ids == expected[:4]


def test_requests_without_a_seed_get_different_ones() -> None:
    with Worker() as worker:
        answers = [worker.submit(prompt_of(5), seed=None) for _ in range(2)]
        for answer in answers:
            answer.wait()
        assert answers[0].token_ids != answers[1].token_ids


def test_a_seed_of_any_size_is_taken() -> None:
    with Worker() as worker:
        answer = worker.submit(prompt_of(5), seed=-1)
        answer.wait()
        assert answer.token_ids == reference(prompt_of(5), max_tokens=6, seed=(1 << 64) - 1)


def test_abort_while_waiting_running_and_after_the_end() -> None:
    gate = Gate()
    with Worker(max_num_seqs=1) as worker:
        worker.runner.before = gate
        running = worker.submit(prompt_of(9), max_tokens=100, request_id="running")
        waiting = worker.submit(prompt_of(9, start=1), request_id="waiting")
        gate.wait_arrived(1)
        worker.engine.check()
        worker.engine.abort("waiting")
        worker.engine.abort("nobody")
        gate.let_through(2)
        last = waiting.wait()
        assert last.finish_reason == "abort" and last.report is not None and last.report.computed_tokens == 0
        worker.engine.abort("running")
        gate.let_through()
        last = running.wait()
        assert last.finish_reason == "abort" and last.report is not None and last.report.computed_tokens == 9
        worker.engine.abort("running")
        after = worker.submit(prompt_of(9))
        after.wait()
        assert after.token_ids == reference(prompt_of(9), max_tokens=6)


def test_an_abort_right_behind_its_submit_is_obeyed() -> None:
    gate = Gate()
    with Worker() as worker:
        worker.runner.before = gate
        worker.submit(prompt_of(3), max_tokens=1, request_id="busy")
        gate.wait_arrived(1)
        answer = worker.submit(prompt_of(3), request_id="x")
        worker.engine.abort("x")
        gate.let_through()
        assert answer.wait().finish_reason == "abort"
        assert not answer.token_ids


def test_a_request_id_may_be_used_again_after_the_end() -> None:
    with Worker() as worker:
        worker.submit(prompt_of(3), request_id="x").wait()
        worker.submit(prompt_of(3), request_id="x").wait()


def test_what_cannot_run_is_refused_with_a_reason() -> None:
    with Worker(num_blocks=8, max_model_len=100) as worker:
        with pytest.raises(RequestError, match="prompt is empty"):
            worker.submit([])
        with pytest.raises(RequestError, match="token id 1000, but fake knows ids 0 to 999"):
            worker.submit([1, VOCAB_SIZE])
        with pytest.raises(RequestError, match="token id -1"):
            worker.submit([1, -1])
        with pytest.raises(RequestError, match="max_tokens is 0"):
            worker.submit([1], max_tokens=0)
        with pytest.raises(ContextLengthError, match="101 together, but this worker's context is 100"):
            worker.submit(prompt_of(60), max_tokens=41)
        with pytest.raises(ContextLengthError, match="KV cache holds 32 tokens"):
            worker.submit(prompt_of(20), max_tokens=14)
        with pytest.raises(UnsupportedError, match="no KV transfer configured and cannot serve the prefill role"):
            worker.submit([1], transfer=transfer("prefill"))
        with pytest.raises(UnsupportedError, match="cannot serve the decode role"):
            worker.submit([1], transfer=transfer("decode"))
        answer = worker.submit(prompt_of(20), max_tokens=13, request_id="fits")
        with pytest.raises(RequestError, match="in use"):
            worker.submit(prompt_of(3), request_id="fits")
        answer.wait()
        assert answer.token_ids == reference(prompt_of(20), max_tokens=13)


def test_an_error_of_the_model_ends_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    with Worker(max_num_seqs=1) as worker:
        failing = [True]

        def fail_once(plan: StepPlan) -> None:
            if failing.pop() if failing else False:
                raise MemoryError("no memory")

        worker.runner.before = fail_once
        gate = threading.Event()
        bad, good = worker.submit(prompt_of(9)), worker.submit(prompt_of(9, start=2))
        gate.set()
        last = bad.wait()
        assert last.finish_reason == "error" and "model failed" in last.error and last.report is not None
        good.wait()
        assert good.token_ids == reference(prompt_of(9, start=2), max_tokens=6)
        assert "A step over 1 requests failed" in caplog.text and "no memory" in caplog.text


def test_a_sampler_that_miscounts_is_an_error_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    with Worker() as worker:
        worker.runner.run = lambda plan, on_layer: []  # type: ignore[method-assign]
        assert worker.submit(prompt_of(3)).wait().finish_reason == "error"
    assert "A step over 1 requests failed" in caplog.text


def test_text_that_cannot_be_made_ends_its_own_request_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(prompt_of(5), max_tokens=6)

    def push(self: object, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        if token_id == expected[2]:
            raise KeyError(token_id)
        return "", None

    monkeypatch.setattr("tests.engine.fakes.FakeStream.push", push)
    with Worker() as worker:
        bad, good = worker.submit(prompt_of(5)), worker.submit(prompt_of(5, start=1))
        assert bad.wait().finish_reason == "error"
        assert good.wait().finish_reason == "length"
    assert "could not be turned into text" in bad.last.error


def test_a_sink_that_raises_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    def sink(output: object) -> None:
        raise RuntimeError("bad sink")

    with Worker() as worker:
        worker.engine.submit(
            EngineRequest(request_id="bad", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1), sink=sink)
        )
        worker.submit(prompt_of(3)).wait()
    assert "The sink of request bad raised" in caplog.text


def test_a_broken_loop_tells_everyone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(self: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("tollbridge.sched.scheduler.Scheduler.schedule", schedule)
    sender = ScriptedSender()
    worker = Worker(sender=sender)
    answer = worker.submit(prompt_of(3))
    assert answer.wait().finish_reason == "error"
    with pytest.raises(UnavailableError, match="failed"):
        worker.submit(prompt_of(3))
    worker.engine.shutdown()
    assert "The engine's loop failed" in caplog.text
    assert sender.closed


def test_shutdown_aborts_everything_and_refuses_more() -> None:
    gate = Gate()
    worker = Worker(max_num_seqs=1)
    worker.runner.before = gate
    answers = [worker.submit(prompt_of(5, start=i), max_tokens=100) for i in range(2)]
    gate.wait_arrived(1)
    answers.append(worker.submit(prompt_of(5)))
    stopper = threading.Thread(target=worker.engine.shutdown)
    stopper.start()
    gate.let_through()
    stopper.join(TIMEOUT_S)
    assert [answer.last.finish_reason for answer in answers] == ["abort"] * 3
    worker.assert_empty()
    with pytest.raises(UnavailableError, match="shutting down"):
        worker.submit(prompt_of(3))
    worker.engine.shutdown()


def test_statistics_while_a_step_runs() -> None:
    gate = Gate()
    with Worker(max_num_seqs=1, max_num_batched_tokens=8) as worker:
        worker.runner.before = gate
        first = worker.submit(prompt_of(20), max_tokens=3)
        gate.wait_arrived(1)
        second = worker.submit(prompt_of(7), max_tokens=1)
        statistics = worker.engine.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.steps_total) == (1, 1, 1)
        assert statistics.waiting_prefill_tokens == 27
        assert statistics.num_free_blocks == 64 - 5
        gate.let_through()
        first.wait(), second.wait()
        statistics = worker.engine.statistics()
        assert statistics.prompt_tokens_total == 27 and statistics.generation_tokens_total == 4
        assert statistics.steps_total == len(worker.runner.plans)


def test_a_report_tells_the_times() -> None:
    clock = ManualClock(100.0)
    with Worker(clock=clock) as worker:
        worker.runner.before = lambda plan: clock.advance(0.25)
        report = worker.submit(prompt_of(40), arrival_s=98.0).wait().report
        assert report is not None and report.role == "local" and report.transfer is None
        assert (report.queue_s, report.prefill_s) == (2.0, 0.5)
        assert (report.prompt_tokens, report.computed_tokens, report.generated_tokens) == (40, 40, 6)


def test_events_name_the_blocks_of_a_prompt() -> None:
    with Worker() as worker:
        prompt = prompt_of(10)
        worker.submit(prompt, max_tokens=1).wait()
        hashes = [event_hash(value) for value in prompt_hashes(prompt, BLOCK_SIZE)]
        assert worker.engine.take_events() == [
            BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=prompt[:8], block_size=BLOCK_SIZE)
        ]
        assert worker.engine.take_events() == []


def test_a_sink_may_call_the_engine() -> None:
    with Worker() as worker:
        inner: list[Answer] = []

        class Chain(Answer):
            def __call__(self, output: object) -> None:
                super().__call__(output)  # type: ignore[arg-type]
                worker.engine.statistics()
                if self.last.finish_reason:
                    inner.append(worker.submit(prompt_of(4)))

        chain = Chain()
        worker.engine.submit(
            EngineRequest(
                request_id="outer", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2), sink=chain
            )
        )
        chain.wait()
        worker.submit(prompt_of(3)).wait()
        inner[0].wait()


def test_submit_and_abort_from_many_threads() -> None:
    answers: list[list[Answer]] = [[] for _ in range(6)]

    def client(number: int) -> None:
        for i in range(15):
            answers[number].append(worker.submit(prompt_of(3 + i, start=number % 2), max_tokens=4, seed=i))
            if i % 3 == 0:
                worker.engine.abort(answers[number][-1].request_id)
            worker.engine.check()
            worker.engine.statistics()

    with Worker(num_blocks=20) as worker:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        for number, own in enumerate(answers):
            assert len(own) == 15
            for i, answer in enumerate(own):
                aborted = answer.wait().finish_reason == "abort"
                expected = reference(prompt_of(3 + i, start=number % 2), max_tokens=4, seed=i)
                assert answer.token_ids == (expected[: len(answer.token_ids)] if aborted else expected)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_the_fake_reads_its_memory() -> None:
    """The other tests mean something only if wrong KV gives wrong tokens."""
    with Worker() as worker:

        def corrupt(plan: StepPlan) -> None:
            if len(worker.runner.plans) == 3:
                chunk = plan.chunks[0]
                runner: FakeRunner = worker.runner
                runner.memory.views(1, chunk.block_table, 2, 1)[0][0] ^= 1

        worker.runner.before = corrupt
        answer = worker.submit(prompt_of(6))
        answer.wait()
        assert answer.token_ids[:2] == reference(prompt_of(6), max_tokens=2)
        assert answer.token_ids[2] != reference(prompt_of(6), max_tokens=3)[2]
