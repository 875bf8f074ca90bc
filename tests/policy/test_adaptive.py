"""The decision over made-up fleets whose engines and links are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.test_rules import KV
from tollbridge.config.calibration import Calibration, DecodeFit, EngineCalibration, LinkCalibration, PrefillFit
from tollbridge.config.cluster import SloConfig
from tollbridge.cost.habits import Rate
from tollbridge.cost.model import CostModel
from tollbridge.errors import UnavailableError
from tollbridge.policy.adaptive import adaptive
from tollbridge.policy.decide import decide
from tollbridge.policy.pricing import Pricing
from tollbridge.policy.views import FleetView, RequestView, WorkerView
from tollbridge.wire.decision import Decision

KAPPA = 46_080.0  # bytes per token: SmolLM2 in float32
SLO = SloConfig(ttft_s=2.0, tpot_s=0.1, itl_p99_s=0.2)
MEGABIT = 1e6 / 8


def cost(goodput: float | None, *, engines: bool = True, ended: int = 10) -> CostModel:
    """500 prompt tokens/s, a step of 30 ms and 1 ms per stream; one link. So many requests have `ended`."""
    engine = EngineCalibration(
        prefill=PrefillFit(alpha_s=0.02, beta_s_per_token=0.002, residual=0.05),
        decode=DecodeFit(step_s=0.03, per_decode_s=0.001, residual=0.05),
    )
    links = {"hp>hd": LinkCalibration(goodput_bytes_per_s=goodput)} if goodput else {}
    model = CostModel.seeded(Calibration(engines={"p0": engine, "d0": engine} if engines else {}, links=links))
    for _ in range(ended):
        model.output_tokens.add(50, 50)
    return model


def worker(name: str, prefer: str, **more: object) -> WorkerView:
    known: dict[str, object] = {
        "host": "hp" if prefer == "prefill" else "hd",
        "kv": KV,
        "kv_bytes_per_token": KAPPA,
        "max_num_batched_tokens": 512,
        "free_kv_tokens": 10_000,
    }
    return WorkerView(name=name, prefer=prefer, **{**known, **more})  # type: ignore[arg-type]


def fleet(model: CostModel, *workers: WorkerView, explore: float = 0.0) -> FleetView:
    return FleetView(workers=workers, pricing=Pricing(cost=model, slo=SLO, explore=explore))


def pair(p: dict[str, object] | None = None, d: dict[str, object] | None = None) -> tuple[WorkerView, WorkerView]:
    return worker("p0", "prefill", **(p or {})), worker("d0", "decode", **(d or {}))


def ask(num_tokens: int, view: FleetView, **more: object) -> Decision:
    known: dict[str, object] = {"id": "r", "prompt_tokens": num_tokens, "max_tokens": 50}
    return adaptive(RequestView(**{**known, **more}), view)  # type: ignore[arg-type]


BUSY = {"num_running": 4, "num_decodes": 4}


def test_local_goes_where_it_stops_nobody() -> None:
    """On d0 it would stop four streams for more than a second."""
    decision = ask(768, fleet(cost(1e6), *pair(d=BUSY)))
    assert (decision.choice, decision.decode) == ("local", "p0")


def test_a_stream_that_would_be_stalled_where_it_decodes_is_decoded_elsewhere() -> None:
    """Long prompts come all the time: whoever decodes on p0 is stopped again and again, so its KV is shipped away."""
    model = cost(1e9)
    for at in range(60):
        model.stalling(500, at * 0.5)
    view = FleetView(workers=pair(d=BUSY), pricing=Pricing(cost=model, slo=SLO, explore=0.0, now_s=30.0))
    decision = ask(500, view)
    assert (decision.choice, decision.prefill, decision.decode) == ("split", "p0", "d0")
    assert decision.reason == "split_pays"
    assert "The split is cheaper" in decision.why


def test_streams_are_kept_off_the_worker_that_long_prompts_are_left_to() -> None:
    """Although it is idle. Over a link too slow to split, it is a worker like the other one."""
    for goodput, expected in ((1e9, "d0"), (1e5, "p0")):
        model = cost(goodput)
        for at in range(60):
            model.stalling(500, at * 0.5)
        view = FleetView(workers=pair(d=BUSY), pricing=Pricing(cost=model, slo=SLO, explore=0.0, now_s=30.0))
        assert ask(32, view).decode == expected


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, "local"), (50, "split")])
def test_an_answer_of_two_tokens_is_no_stream_to_keep_off_a_prefill_worker(max_tokens: int, expected: str) -> None:
    """Now and then a long prompt comes, d0 has streams that it would stop, and the KV is some way off."""
    model = cost(40e6)
    for at in range(3):
        model.stalling(500, at * 10.0)
    for _ in range(20):
        model.output_tokens.add(2, 2)
    view = FleetView(workers=pair(d=BUSY), pricing=Pricing(cost=model, slo=SLO, explore=0.0, now_s=30.0))
    decision = ask(500, view, max_tokens=max_tokens)
    assert (decision.choice, decision.prefill or decision.decode) == (expected, "p0")


def test_streams_are_kept_off_a_prefill_worker_while_nobody_knows_what_will_come() -> None:
    d = {"num_running": 1, "num_decodes": 1}
    assert ask(32, fleet(cost(1e9, ended=0), *pair(d=d))).decode == "d0"
    assert ask(32, fleet(cost(1e9, ended=10), *pair(d=d))).decode == "p0"  # the next one may use the idle worker


def test_a_prompt_that_would_stop_newcomers_is_split_though_nobody_decodes_yet() -> None:
    """Once such prompts are known to come, and so do others."""
    model = cost(1e9)
    assert ask(500, fleet(model, *pair())).choice == "local"
    for at in range(60):
        model.stalling(500, at * 0.5)
        model.started(at * 0.5)
    view = FleetView(workers=pair(), pricing=Pricing(cost=model, slo=SLO, explore=0.0, now_s=30.0))
    assert ask(500, view).choice == "split"
    assert ask(32, view).choice == "local"


@pytest.mark.parametrize("megabits", [1, 10, 30])
def test_a_cold_short_prompt_is_never_shipped_over_a_slow_link(megabits: int) -> None:
    """Whatever the load, and however much exploring is allowed."""
    for p in ({}, BUSY):
        for d in ({}, BUSY, {"waiting_prefill_tokens": 2000}):
            for explore in (0.0, 1.0):
                decision = ask(20, fleet(cost(megabits * MEGABIT), *pair(p, d), explore=explore))
                assert (decision.choice, decision.reason) != ("split", "split_pays")
                assert decision.choice == "local"


def test_a_slow_link_is_not_worth_it() -> None:
    decision = ask(768, fleet(cost(10 * MEGABIT), *pair(d=BUSY)))
    assert decision.choice == "local"
    assert decision.terms["toll_s"] > 20.0
    assert "MB/s" in decision.why


def test_local_takes_the_worker_that_has_the_prefix() -> None:
    view = fleet(cost(1e9), *pair())
    assert ask(1000, view, cached={"p0": 960}).decode == "p0"
    assert ask(1000, view, cached={"d0": 960}).decode == "d0"


def test_what_decode_has_is_not_shipped() -> None:
    view = fleet(cost(1e6), *pair())
    assert ask(1000, view, cached={"d0": 640}).terms["wire_bytes"] == pytest.approx(KAPPA * 359, rel=1e-4)


def test_queues_count() -> None:
    """Local on an idle worker beats local behind 3,000 tokens."""
    decision = ask(200, fleet(cost(1e9), *pair(d={"waiting_prefill_tokens": 3000})))
    assert (decision.choice, decision.decode) == ("local", "p0")


def test_transfers_in_flight_make_the_link_slower() -> None:
    alone = ask(768, fleet(cost(1e7), *pair())).terms
    shared = ask(768, fleet(cost(1e7), *pair(p={"num_sending": 3, "sending_bytes": 9e7}))).terms
    assert shared["split_ttft_s"] > alone["split_ttft_s"] + 5.0
    assert shared["flows"] == 3


def test_workers_of_one_host_share_its_nic() -> None:
    other = worker("p1", "prefill", num_sending=2, sending_bytes=5e7)
    assert ask(768, fleet(cost(1e7), *pair(), other)).terms["flows"] == 2


def test_nothing_known_is_served_locally_and_says_so() -> None:
    decision = ask(768, fleet(cost(None, engines=False), *pair(), explore=1.0))
    assert (decision.choice, decision.reason) == ("local", "unknown")


def test_an_unknown_link_is_served_locally_and_explored_within_its_bound() -> None:
    model = cost(None)
    split = 0
    for index in range(1000):
        decision = ask(300, fleet(model, *pair(), explore=0.02), id=f"r{index}")
        assert decision.reason in ("unknown_link", "explore")
        split += decision.choice == "split"
    assert 60 < split < 140  # five times the rate of a known link


def test_a_known_link_is_explored_within_its_bound_and_the_same_request_always_so() -> None:
    view = fleet(cost(1e7), *pair(), explore=0.02)
    chosen = {f"r{i}": ask(200, view, id=f"r{i}").reason for i in range(1000)}
    assert 5 < sum(reason == "explore" for reason in chosen.values()) < 40
    assert chosen == {name: ask(200, view, id=name).reason for name in chosen}


def test_exploring_puts_no_slo_at_risk() -> None:
    decisions = [ask(768, fleet(cost(10 * MEGABIT), *pair(), explore=1.0), id=f"r{i}") for i in range(50)]
    assert {decision.choice for decision in decisions} == {"local"}


@pytest.mark.parametrize(
    ("more", "p", "d", "reason"),
    [
        ({"unsplittable": "prompt_list"}, {}, {}, "prompt_list"),
        ({}, {"ready": False}, {}, "no_ready_prefill"),
        ({}, {"pinned_full": True}, {}, "pinned_bound"),
        ({}, {}, {"free_kv_tokens": 100}, "no_kv_room"),
    ],
)
def test_vetoes_are_reasons(more: dict[str, object], p: dict[str, object], d: dict[str, object], reason: str) -> None:
    decision = ask(768, fleet(cost(1e9), *pair(p, d), explore=1.0), **more)
    assert (decision.choice, decision.reason) == ("local", reason)
    assert "first token" in decision.why


def test_decode_may_veto_what_it_computes_in_time_for_everybody() -> None:
    """A chunk of 88 tokens beside four streams takes 0.2 s, the SLO of a gap."""
    model = cost(1e9)
    for at in range(60):
        model.stalling(500, at * 0.5)
    view = FleetView(workers=pair(d=BUSY), pricing=Pricing(cost=model, slo=SLO, explore=0.0, now_s=30.0))
    decision = ask(500, view)
    assert decision.reason == "split_pays"
    assert decision.terms["veto_tokens"] == pytest.approx(88, abs=2)


def test_who_wants_a_split_for_another_reason_gets_no_veto() -> None:
    """Nor does one that is to teach what the link carries."""
    view = fleet(cost(1e7), *pair(), explore=1.0)
    forced = decide(RequestView(id="r", prompt_tokens=100), view, "local", "split")
    explored = ask(200, view)
    assert (forced.choice, explored.reason) == ("split", "explore")
    assert "veto_tokens" not in forced.terms and "veto_tokens" not in explored.terms


def test_a_full_worker_is_avoided() -> None:
    decision = ask(768, fleet(cost(1e6), *pair(d={"free_kv_tokens": 100})))
    assert (decision.choice, decision.decode) == ("local", "p0")


def test_a_session_stays_where_it_is_on_a_near_tie() -> None:
    workers = [worker(f"d{i}", "decode") for i in range(6)]
    model = cost(1e6)
    homes = {
        s: {ask(100, fleet(model, *workers), id=f"{s}{i}", session=s).decode for i in range(5)} for s in "abcdefgh"
    }
    assert all(len(home) == 1 for home in homes.values())
    assert len({*next(iter(homes.values()))} | set().union(*homes.values())) > 1
    busy = [w if {w.name} != homes["a"] else worker(w.name, "decode", waiting_prefill_tokens=5000) for w in workers]
    assert {ask(100, fleet(model, *busy), session="a").decode} != homes["a"]


@pytest.mark.parametrize("away", [{"ready": False}, {"ready": False, "kv": None}, {"pinned_full": True}])
def test_fail_refuses_what_would_have_been_split_and_nothing_else(away: dict[str, object]) -> None:
    """Long prompts come all the time, so they are split; short ones are served where they are."""
    model = cost(1e9)
    for at in range(60):
        model.stalling(500, at * 0.5)
    pricing = Pricing(cost=model, slo=SLO, explore=0.0, now_s=30.0)
    here, gone = (FleetView(workers=pair(p=p, d=BUSY), pricing=pricing) for p in ({}, away))
    long, short = (RequestView(id="r", prompt_tokens=n, max_tokens=50) for n in (500, 20))
    assert [decide(r, here, "adaptive").choice for r in (long, short)] == ["split", "local"]
    with pytest.raises(UnavailableError, match='is "fail"'):
        decide(long, gone, "adaptive", on_no_prefill="fail")
    assert decide(short, gone, "adaptive", on_no_prefill="fail").choice == "local"
    assert decide(long, gone, "adaptive").choice == "local"


def test_with_no_prefill_worker_at_all_nobody_knows_that_a_split_would_pay() -> None:
    alone = fleet(cost(1e9), worker("d0", "decode", **BUSY))
    request = RequestView(id="r", prompt_tokens=768, max_tokens=50)
    assert decide(request, alone, "adaptive", on_no_prefill="fail").choice == "local"


def test_a_suspect_comes_last_but_it_comes() -> None:
    assert ask(100, fleet(cost(1e6), *pair(d={"suspect": True}))).decode == "p0"
    assert ask(100, fleet(cost(1e6), worker("d0", "decode", suspect=True))).decode == "d0"


def test_terms_hold_the_figures() -> None:
    terms = ask(768, fleet(cost(1e7), *pair(d=BUSY))).terms
    assert {
        "local_ttft_s", "split_ttft_s", "toll_s", "wire_bytes", "goodput_bytes_per_s", "wait_s", "slowed_s", "j_local",
        "j_split", "ttft_s", "prefill_s",
    } <= set(terms)  # fmt: skip


@pytest.mark.parametrize(("policy", "goodput"), [("local", None), ("split", 1e7), ("llm-d", 1e7)])
def test_what_other_rules_choose_is_priced_too(policy: str, goodput: float | None) -> None:
    view = fleet(cost(goodput), *pair(d=BUSY))
    decision = decide(RequestView(id="r", prompt_tokens=600, max_tokens=50), view, policy)
    assert decision.terms["ttft_s"] > 1.0
    assert ("toll_s" in decision.terms) is (decision.choice == "split")


def test_a_forced_split_over_a_strange_link_has_no_price() -> None:
    view = fleet(cost(None), *pair())
    assert decide(RequestView(id="r", prompt_tokens=600), view, "local", "split").terms == {}


@given(
    st.integers(1, 3000),
    st.floats(1e5, 1e10),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 4000),
    st.integers(0, 4000),
    st.text(max_size=5),
)
def test_any_state(
    num_tokens: int, goodput: float, r_p: int, r_d: int, wait_p: int, wait_d: int, request_id: str
) -> None:
    """The choice is the cheaper one unless it explores; the order of the fleet does not matter."""
    workers = pair(
        {"num_running": r_p, "waiting_prefill_tokens": wait_p}, {"num_running": r_d, "waiting_prefill_tokens": wait_d}
    )
    decision = ask(num_tokens, fleet(cost(goodput), *workers, explore=0.02), id=request_id)
    assert decision == ask(num_tokens, fleet(cost(goodput), *reversed(workers), explore=0.02), id=request_id)
    terms = decision.terms
    if decision.reason == "split_pays":
        assert terms["j_split"] < terms["j_local"]
    if decision.choice == "local":
        assert terms["j_local"] <= terms["j_split"] + 0.02 + terms["ttft_sigma_s"] + 1.0
    assert terms["split_ttft_s"] >= 0.0 and terms["local_ttft_s"] > 0.0


def test_a_long_prompt_joins_another_that_stops_the_streams_anyway() -> None:
    """Over a slow link both are local. Four streams on either worker, and a long prompt waits at d0."""
    d = {**BUSY, "num_running": 5, "waiting_prefill_tokens": 512}
    model = cost(1e5)
    model.stalling(512, 0.0)
    decision = ask(512, fleet(model, *pair(BUSY, d)))
    assert (decision.choice, decision.decode) == ("local", "d0")


class Steady(Rate):
    """So many a second, whenever one asks."""

    def __init__(self, per_s: float) -> None:
        self._steady = per_s

    def per_s(self, now_s: float) -> float:
        return self._steady


def test_the_margin_is_in_requests_whatever_the_slo() -> None:
    """Seconds that are not known well count as the share of the SLO that they are: all times three, the same choice."""
    choices = []
    for factor in (1.0, 3.0):
        engine = EngineCalibration(
            prefill=PrefillFit(alpha_s=0.02 * factor, beta_s_per_token=0.002 * factor, residual=0.4),
            decode=DecodeFit(step_s=0.03 * factor, per_decode_s=0.001 * factor, residual=0.4),
        )
        links = {"hp>hd": LinkCalibration(goodput_bytes_per_s=2e7 / factor)}
        slo = SloConfig(ttft_s=2.0 * factor, tpot_s=0.1 * factor, itl_p99_s=0.2 * factor)
        model = CostModel.seeded(Calibration(engines={"p0": engine, "d0": engine}, links=links))
        model.stalling(500, 0.0)
        model.stalls = Steady(0.5 / factor)
        for p in range(6):
            view = FleetView(workers=pair({"num_running": p}, BUSY), pricing=Pricing(cost=model, slo=slo, explore=0.0))
            choices.append([ask(n, view).choice for n in range(50, 1500, 50)])
    assert choices[:6] == choices[6:]
    assert {each for row in choices for each in row} == {"local", "split"}
