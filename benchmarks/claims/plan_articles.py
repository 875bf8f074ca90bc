"""The arithmetic of the two articles behind the project, from their inputs alone (`benchmarks/plans/*.yaml`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.support.result import ClaimResult, Table
from tollbridge.plan.inputs import read_plan
from tollbridge.plan.plan import OnLink, Plan, make_plan
from tollbridge.plan.published import mooncake_bandwidth
from tollbridge.plan.terms import Terms

DESCRIPTION = "`tollbridge plan` finds what the articles measured and concluded, from model, link, prefill and workload"
PLANS = Path(__file__).parents[1] / "plans"
MIB = 1 << 20

Check = tuple[str, Callable[[], float], float, float]  # figure, value, lowest, highest


def run(quick: bool) -> ClaimResult:
    """Make both plans and compare; nothing is timed, so `quick` changes nothing."""
    small, large = _plan("qwen3-0.6b-1gbe"), _plan("qwen2.5-7b-l40s")
    ethernet, inside = small.links
    raw, nixl = large.links
    checks: list[Check] = [
        ("qwen3_0_6b_bytes_per_token", lambda: small.kv.bytes_per_token, 114_688, 114_688),
        ("qwen2_5_7b_bytes_per_token", lambda: large.kv.bytes_per_token, 57_344, 57_344),
        ("request_mb", lambda: _terms(ethernet, 2371).kv_bytes / 1e6, 271.5, 272.5),
        ("wire_inside_one_server_s", lambda: _terms(inside, 2371).wire_s[0], 0.245, 0.255),
        ("wire_1gbe_best_s", lambda: _terms(ethernet, 2371).wire_s[0], 2.25, 2.35),
        ("wire_1gbe_worst_s", lambda: _terms(ethernet, 2371).wire_s[1], 2.45, 2.55),
        ("break_even_low_mib_per_s", lambda: raw.break_even_bytes_per_s[0] / MIB, 716, 720),
        ("break_even_high_mib_per_s", lambda: raw.break_even_bytes_per_s[1] / MIB, 809, 813),
        ("burst_of_4_through_nixl_s", lambda: _terms(nixl, 2048).ttft_burst_sequential_s[0], 2.2, 2.4),
        ("killed_in_request", lambda: _killed(small), 4, 5),
        ("mooncake_8_a800_gb_per_s", lambda: _mooncake(312e12), 5.7, 6.3),
        ("mooncake_8_h800_gb_per_s", lambda: _mooncake(989e12), 18.05, 19.95),
    ]
    figures: dict[str, object] = {name: value() for name, value, _, _ in checks}
    bounds = {name: f"{low:g} to {high:g}" for name, _, low, high in checks}
    verdicts = {f"verdict_{link.link.name}": link.verdict.answer for link in (*small.links, *large.links)}
    holds = all(low <= value() <= high for _, value, low, high in checks)
    return ClaimResult(
        holds=holds and set(verdicts.values()) == {"do not split"},
        figures=figures | verdicts | _flips(small, large),
        bounds=bounds | dict.fromkeys(verdicts, "do not split"),
        conditions={"inputs": [str(path.relative_to(PLANS.parents[1])) for path in sorted(PLANS.glob("*.yaml"))]},
        table=Table(
            title="plan-articles",
            columns=["figure", "plan", "article"],
            rows=[[name, f"{value():.5g}", bounds[name]] for name, value, _, _ in checks]
            + [[name, answer, "do not split"] for name, answer in verdicts.items()],
        ),
    )


def _plan(name: str) -> Plan:
    return make_plan(read_plan(PLANS / f"{name}.yaml"))


def _terms(link: OnLink, tokens: int) -> Terms:
    return next(length.terms for length in link.lengths if length.terms.prompt_tokens == tokens)


def _killed(plan: Plan) -> float:
    assert plan.memory is not None
    return plan.memory.requests_until_killed or 0


def _mooncake(flops: float) -> float:
    return mooncake_bandwidth(num_tokens=8192, hidden_size=8192, gqa=8, flops=8 * flops) / 1e9


def _flips(*plans: Plan) -> dict[str, object]:
    """Return what would change each verdict: a link, or streams beside the prefill where no link would."""
    found: dict[str, object] = {}
    for link in (link for plan in plans for link in plan.links):
        flips = link.verdict.flips_at_bytes_per_s
        streams = [length.verdict.flips_with_streams_per_gpu for length in link.lengths]
        known = [number for number in streams if number]
        by_load = f"{min(known):.0f} streams a GPU" if known else "nothing here"
        found[f"flips_{link.link.name}"] = f"a link of {flips / MIB:.0f} MiB/s" if flips else by_load
    return found
