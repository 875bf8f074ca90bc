"""What a request teaches, with a clock that the test owns; then once through a router and stub workers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tests.support.router_rig import rig
from tests.support.stub_worker import StubWorker
from tollbridge.clock import ManualClock
from tollbridge.config.calibration import Calibration, LinkCalibration
from tollbridge.config.cluster import ClusterConfig, LinkConfig, WorkerConfig
from tollbridge.router.app import make_context
from tollbridge.router.context import Context
from tollbridge.router.learn import TRIAL
from tollbridge.router.load import Report, Work
from tollbridge.wire.decision import Decision, Happened
from tollbridge.wire.params import TransferReport, WorkerReport

WORKERS = [
    WorkerConfig(name="p0", prefer="prefill", url="http://127.0.0.1:1", host="hp"),
    WorkerConfig(name="d0", prefer="decode", url="http://127.0.0.1:2", host="hd"),
]


@pytest.fixture
def context() -> Context:
    return make_context(ClusterConfig(workers=WORKERS), b"a secret for tests only", clock=ManualClock())


def decision(choice: str, **terms: float) -> Decision:
    return Decision(
        id="r", policy="adaptive", choice=choice, decode="d0", prefill="p0" if choice == "split" else None,
        reason="", why="", terms=terms,
    )  # type: ignore[arg-type]  # fmt: skip


def local(prefill_s: float = 0.5, num_tokens: int = 500) -> Happened:
    report = WorkerReport(
        role="local", queue_s=0.1, prefill_s=prefill_s, prompt_tokens=num_tokens, computed_tokens=num_tokens
    )
    return Happened(
        status="ok", ttft_s=0.62, total_s=1.62, prompt_tokens=num_tokens, completion_tokens=21, decode_report=report
    )


def split(payload_bytes: int = 5_000_000, wire_s: float = 1.0, prefill_s: float = 0.5) -> Happened:
    transfer = TransferReport(
        transfer_id="t", side="receive", outcome="done", num_tokens=500, payload_bytes=payload_bytes,
        wire_s=wire_s, total_s=1.1,
    )  # fmt: skip
    return Happened(
        status="ok",
        ttft_s=1.2,
        total_s=2.2,
        completion_tokens=21,
        prefill_report=WorkerReport(role="prefill", prefill_s=prefill_s, prompt_tokens=501, computed_tokens=501),
        decode_report=WorkerReport(
            role="decode", prefill_s=0.05, prompt_tokens=501, loaded_tokens=500, transfer=transfer
        ),
    )


def teach(context: Context, made: Decision, happened: Happened) -> dict[str, float]:
    lesson = context.learner.lesson(made)
    lesson.first_token()
    return dict(lesson.end(happened, made))


def test_prefill_and_steps_are_learnt(context: Context) -> None:
    for _ in range(5):
        teach(context, decision("local"), local())
    engine = context.learner.cost.engine("d0")
    assert engine.prefill_s(500, 0, 2048) == pytest.approx(0.5, rel=0.05)
    assert engine.step_s(1) == pytest.approx(0.05, rel=0.1)
    assert context.learner.cost.output_tokens.value(0.0) == pytest.approx(21)
    assert context.learner.cost.local_overhead_s.value(0.0) == pytest.approx(0.02)


def test_several_choices_teach_no_step_and_the_length_of_one(context: Context) -> None:
    engine = context.learner.cost.own_engine("d0")
    before_s = engine.step_s(1)
    several = msgspec.structs.replace(local(), completion_tokens=63, num_choices=3)
    assert "step" not in teach(context, decision("local"), several)
    assert engine.step_s(1) == before_s
    assert context.learner.cost.output_tokens.value(0.0) == pytest.approx(21)


@pytest.mark.parametrize(
    ("prompt", "num_choices"), [([1, 2], 2), ("a", 2), (["a"], 2), (["a", "b", "c"], 6), ([[1], [2]], 4)]
)
async def test_choices_of_all_prompts_are_counted(prompt: object, num_choices: int) -> None:
    async with rig(StubWorker("d0", "decode"), policy="local") as r:
        await r.post({"prompt": prompt, "max_tokens": 8, "n": 2, "stream": True}, x_request_id="several")
        assert (await r.record("several"))["happened"]["num_choices"] == num_choices


def test_streams_beside_a_split_prefill_are_those_of_the_fleet(context: Context) -> None:
    """A prefill that is sent while others run teaches what it takes beside these; split prefills are no streams."""
    fleet, engine = context.fleet, context.learner.cost.own_engine("d0")
    for _ in range(4):
        engine.observe_step(0.05 + 0.01 * 2, 2)
        engine.observe_step(0.05 + 0.01 * 8, 8)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(fleet.serving(fleet["d0"], "decode", num_choices=2))()
        stack.enter_context(fleet.serving(fleet["d0"], "decode"))  # waits for its first token
        stack.enter_context(fleet.serving(fleet["d0"], "prefill"))
        for _ in range(20):
            teach(context, decision("local"), local(prefill_s=0.5))
    assert engine.prefill_s(500, 0, 2048, 6) == pytest.approx(0.5, rel=0.02)
    assert engine.prefill_s(500, 0, 2048, 0) == pytest.approx(0.5 - 6 * engine.rho_s, rel=0.02)


def test_errors_are_relative_and_counted(context: Context) -> None:
    errors = teach(context, decision("local", ttft_s=0.31), local())
    assert errors["ttft"] == pytest.approx(-0.5)
    samples = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in context.metrics.registry.collect()
        for sample in family.samples
    }
    assert samples["tollbridge_router_prediction_error_ratio_count", "ttft"] == 1.0
    assert samples["tollbridge_router_prediction_bias_ratio", "ttft"] == pytest.approx(-0.5)


def test_a_link_is_learnt(context: Context) -> None:
    teach(context, decision("split"), split())
    cost = context.learner.cost
    assert cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(5e6)
    assert cost.wire_bytes_per_token.value(0.0) == pytest.approx(10_000)
    assert cost.engine("p0").prefill_s(501, 0, 2048) == pytest.approx(0.5, rel=0.05)


def test_sharing_and_prefill_pace_are_not_learnt_as_a_slower_link(context: Context) -> None:
    for _ in range(10):
        teach(context, decision("split"), split())
    for _ in range(10):  # two at a time: each sees half
        first, second = (context.learner.lesson(decision("split")) for _ in range(2))
        for lesson in (first, second):
            lesson.first_token()
            lesson.end(split(wire_s=2.0), decision("split"))
    teach(context, decision("split"), split(wire_s=4.0, prefill_s=4.0))
    assert context.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(5e6, rel=0.01)


def test_a_slower_link_is_learnt(context: Context) -> None:
    for _ in range(10):
        teach(context, decision("split"), split())
    for _ in range(10):
        teach(context, decision("split"), split(wire_s=4.0))
    assert context.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(1.25e6, rel=0.1)


def test_what_went_wrong_or_was_retried_teaches_nothing(context: Context) -> None:
    lesson = context.learner.lesson(decision("split"))
    assert lesson.end(Happened(status="error"), decision("split")) == {}
    lesson = context.learner.lesson(decision("split"))
    assert lesson.end(local(), decision("local")) == {}
    assert not context.learner.cost.engine("d0").known
    assert all(engine.num_prefilling == 0 for engine in context.learner.engines.values())
    assert all(nic.num_active == 0 for nic in context.learner.nics.values())


def test_prefills_that_share_steps_count_less(context: Context) -> None:
    for _ in range(10):
        teach(context, decision("local"), local())
    lessons = [context.learner.lesson(decision("local")) for _ in range(3)]
    for lesson in lessons:
        lesson.first_token()
        assert "prefill" not in lesson.end(local(prefill_s=2.0), decision("local"))
    assert context.learner.cost.engine("d0").prefill_s(500, 0, 2048) < 0.75


async def test_through_the_router() -> None:
    """The first request teaches; the next one is priced, and its record says how far off the price was."""
    workers = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    for worker in workers:
        worker.report = {role: {"prefill_s": 0.01, "computed_tokens": 100} for role in ("local", "prefill")}
    body = {"prompt": list(range(100)), "max_tokens": 8, "stream": True}
    async with rig(*workers, policy="adaptive", explore=0.0) as r:
        first = await r.post(body)
        assert first.decision["reason"] == "unknown"
        second = await r.post(body, x_request_id="second")
        assert second.decision["reason"] == "unknown_link"
        assert second.decision["predicted"]["ttft_s"] > 0
        record = await r.record("second")
        assert "ttft" in record["happened"]["errors"]
        assert "first token" in record["decision"]["why"]
        fleet = (await r.get("/fleet")).json
        assert fleet["cost"]["engines"], json.dumps(fleet["cost"])


@pytest.fixture
def vllm() -> Context:
    """Workers of vLLM, which report nothing of a stream; a second to prefill 1,000 tokens of 10 kB."""
    made = make_context(ClusterConfig(workers=WORKERS), b"a secret for tests only", clock=ManualClock())
    made.fleet["p0"].load.told(Report(kv_bytes_per_token=10_000), 0.0)
    made.learner.cost.own_engine("p0").observe_prefill(1.0, 1000, 0, 2048)
    return made


def stream_split(context: Context, after_s: float, *, verified: bool = True) -> None:
    """Split a prompt of 1,001 tokens: prefill answers after a second, the first token comes `after_s` later."""
    made, clock = decision("split", prompt_tokens=1001, ttft_s=1.5), context.clock
    assert isinstance(clock, ManualClock)
    lesson = context.learner.lesson(made)
    clock.advance(1.0)
    lesson.prefill_done()
    clock.advance(after_s)
    lesson.first_token()
    lesson.end(Happened(status="ok", ttft_s=1.0 + after_s, split_verified=verified), made)


def test_a_stream_without_report_teaches_what_the_link_carries_at_least(vllm: Context) -> None:
    stream_split(vllm, after_s=1.0)
    assert vllm.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(10e6 / 2.0, rel=0.01)


def test_it_does_so_where_nobody_knows_the_prefill_either(context: Context) -> None:
    context.fleet["p0"].load.told(Report(kv_bytes_per_token=10_000), 0.0)
    stream_split(context, after_s=0.0)
    assert context.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(10e6, rel=0.01)


def test_a_stock_connector_never_says_what_kv_weighs_and_ours_soon_does() -> None:
    """A guess cancels out of prices as long as it stays the same; ours would mix it with the truth."""
    config = ClusterConfig(model="not/here", workers=WORKERS)
    context = make_context(config, b"a secret for tests only", clock=ManualClock())
    stream_split(context, after_s=1.0)
    assert not context.learner.cost.link("hp", "hd").known
    for name in ("p0", "d0"):
        worker = context.fleet[name]
        worker.config = msgspec.structs.replace(worker.config, connector="nixl")
    stream_split(context, after_s=1.0)
    link, cost = context.learner.cost.link("hp", "hd"), context.learner.cost
    assert 1000 * cost.kv_bytes(0.0) / link.goodput_bytes_per_s == pytest.approx(1.0, rel=0.01)


def test_nothing_is_learnt_from_kv_that_nobody_saw_arrive(vllm: Context) -> None:
    stream_split(vllm, after_s=1.0, verified=False)
    assert not vllm.learner.cost.link("hp", "hd").known


def test_kv_of_a_stock_connector_crosses_behind_the_prefill(vllm: Context) -> None:
    for name in ("p0", "d0"):
        worker = vllm.fleet[name]
        worker.config = msgspec.structs.replace(worker.config, connector="nixl")
    stream_split(vllm, after_s=1.0)
    assert vllm.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(10e6, rel=0.01)


def test_a_link_that_became_slower_is_noticed_without_reports(vllm: Context) -> None:
    stream_split(vllm, after_s=1.0)
    for _ in range(10):
        stream_split(vllm, after_s=19.0)
    assert vllm.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(10e6 / 20.0, rel=0.1)


def test_a_busy_decode_worker_is_no_slower_link(vllm: Context) -> None:
    stream_split(vllm, after_s=1.0)
    vllm.fleet["d0"].load.begin(Work(sent_s=0.0, prefilled=True))
    for _ in range(10):
        stream_split(vllm, after_s=19.0)
    assert vllm.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(10e6 / 2.0, rel=0.01)


def test_what_a_split_costs_beside_the_wire_is_learnt_without_reports(vllm: Context) -> None:
    stream_split(vllm, after_s=0.7)  # predicted: 1.5 s in all
    assert vllm.learner.cost.split_overhead_s.value(0.0) == pytest.approx(0.2)


def test_a_link_in_use_is_to_be_tried_again_when_nothing_bounds_it(vllm: Context) -> None:
    learner, clock = vllm.learner, vllm.clock
    assert isinstance(clock, ManualClock)
    assert learner.wants_trial("hp", "hd")
    stream_split(vllm, after_s=1.0)
    assert learner.wants_trial("hp", "hd")  # the first may have waited for a connection
    stream_split(vllm, after_s=1.0)
    assert not learner.wants_trial("hp", "hd")
    clock.advance(100.0)
    assert not learner.wants_trial("hp", "hd")  # it is not in use
    stream_split(vllm, after_s=0.0)
    assert learner.wants_trial("hp", "hd")
    stream_split(vllm, after_s=9.0)
    assert not learner.wants_trial("hp", "hd")
    clock.advance(1000.0)
    assert learner.wants_trial("hp", "hd")  # perhaps nobody uses it because it seemed slow


def test_a_whole_answer_without_report_says_nothing_of_the_link(vllm: Context) -> None:
    """Its first token is seen with its last."""
    made = decision("split", prompt_tokens=1001)
    lesson = vllm.learner.lesson(made)
    assert isinstance(vllm.clock, ManualClock)
    lesson.prefill_done()
    vllm.clock.advance(30.0)
    lesson.first_token()
    lesson.end(Happened(status="ok", ttft_s=None, split_verified=True), made)
    assert not vllm.learner.cost.link("hp", "hd").known


def test_a_prefill_on_the_decode_worker_is_no_slower_link(vllm: Context) -> None:
    stream_split(vllm, after_s=1.0)
    for _ in range(10):
        other = vllm.learner.lesson(decision("local", prompt_tokens=5000))
        stream_split(vllm, after_s=19.0)
        other.end(Happened(status="cancelled"), decision("local"))
    assert vllm.learner.cost.link("hp", "hd").goodput_bytes_per_s == pytest.approx(10e6 / 2.0, rel=0.01)


def test_a_trial_is_no_traffic(vllm: Context) -> None:
    made = msgspec.structs.replace(decision("split", prompt_tokens=1001), reason="trial")
    vllm.learner.lesson(made).end(Happened(status="ok"), made)
    assert vllm.learner.cost.arrivals.per_s(1.0) == 0.0


def test_a_link_that_was_stated_is_tried_once_the_router_has_run_for_a_while() -> None:
    """It may have been stated in another unit, or for another network card: then nobody is ever split over it."""
    links = [LinkConfig(from_host="hp", to_host="hd", goodput_bytes_per_s=1250.0)]
    clock = ManualClock()
    learner = make_context(ClusterConfig(workers=WORKERS, links=links), b"a secret for tests", clock=clock).learner
    assert not learner.wants_trial("hp", "hd")
    clock.advance(601.0)
    assert learner.wants_trial("hp", "hd")


def prefill_of_split(context: Context, seconds: float, *, computed: int, cached: int = 0, reason: str = "") -> None:
    """Split a prompt on vLLM workers: the prefill leg tells what it computed, not how long."""
    made = msgspec.structs.replace(decision("split", prompt_tokens=computed + cached), reason=reason)
    clock = context.clock
    assert isinstance(clock, ManualClock)
    lesson = context.learner.lesson(made)
    clock.advance(seconds)
    lesson.prefill_done()
    lesson.first_token()
    report = WorkerReport(
        role="prefill", prompt_tokens=computed + cached, computed_tokens=computed, cached_tokens=cached
    )
    lesson.end(Happened(status="ok", ttft_s=seconds, split_verified=True, prefill_report=report), made)


def test_the_prefill_of_a_split_is_learnt_by_the_routers_clock(context: Context) -> None:
    """A prefill worker of another speed than the decode worker, which alone serves the local requests."""
    for _ in range(3):
        teach(context, decision("local"), local(prefill_s=4.0))
        prefill_of_split(context, 0.5, computed=400, cached=100)
    cost = context.learner.cost
    assert cost.engine("p0").prefill_s(400, 100, 2048) == pytest.approx(0.5, rel=0.1)
    assert cost.engine("d0").prefill_s(500, 0, 2048) == pytest.approx(4.0, rel=0.1)


def test_a_trial_or_a_shared_prefill_says_nothing_of_the_prefill(context: Context) -> None:
    prefill_of_split(context, 9.0, computed=64, reason=TRIAL)
    other = context.learner.lesson(decision("split", prompt_tokens=5000))
    prefill_of_split(context, 9.0, computed=400)
    other.end(Happened(status="cancelled"), decision("split"))
    assert not context.learner.cost.own_engine("p0").known


def test_what_was_cached_after_all_is_taken_from_the_answer(context: Context) -> None:
    """Predicted: 900 of 1,000 tokens. The worker had none of them."""
    engine = context.learner.cost.own_engine("d0")
    for _ in range(10):
        engine.observe_prefill(1.0, 1000, 0, 2048)
        engine.observe_prefill(0.1, 100, 0, 2048)
    said = Happened(status="ok", ttft_s=1.0, total_s=1.0, prompt_tokens=1000, cached_tokens=0)
    for _ in range(10):
        teach(context, decision("local", prompt_tokens=1000, cached_tokens=900), said)
    assert engine.prefill_s(100, 0, 2048) == pytest.approx(0.1, rel=0.1)


def test_a_calibration_under_names_that_nobody_has_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "calibration.json"
    links = {pair: LinkCalibration(goodput_bytes_per_s=1e8) for pair in ("hp>hd", "node-a>hd")}
    file.write_bytes(msgspec.json.encode(Calibration(links=links)))
    config = ClusterConfig(workers=WORKERS, calibration=str(file))
    assert make_context(config, b"a secret for tests only", clock=ManualClock()).learner.cost.link("hp", "hd").known
    assert "link node-a>hd; workers are d0, p0 on hd, hp" in caplog.text
