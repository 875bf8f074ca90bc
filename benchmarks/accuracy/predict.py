"""From the calibration to predictions: the simulator on the very arrivals that the real stack will get. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.accuracy.calibrate import SENDING_TOKENS
from benchmarks.quality import cells
from benchmarks.quality.cells import Cell
from benchmarks.quality.drive import DRAIN_S
from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.config.cluster import EngineConfig, SloConfig
from tollbridge.cost.regression import non_negative
from tollbridge.sim.arrivals import Arrival, own_range
from tollbridge.sim.results import Record
from tollbridge.sim.run import Simulation
from tollbridge.sim.scenario import EngineSpec, GroupSpec, NetworkSpec, OverheadSpec, Scenario

KV_BYTES_PER_TOKEN = 46_080  # SmolLM2-135M in float32
NUM_LAYERS = 30
KV_CACHE_TOKENS = (512 << 20) // KV_BYTES_PER_TOKEN // 16 * 16


def scenario(measured: Mapping[str, Any], link: str, load: float = 0.0) -> Scenario:
    """Return the two hosts joined by `link`.

    At `load`, each engine finds the other one computing for that share of its time, and is slower then. What a split
    takes beside prefill and wire is what a short one alone took beyond its simulation.
    """
    alone = _plain(measured, link, 1.0)
    beyond = [real_s - _alone_s(alone, num_tokens) for num_tokens, real_s in measured["splits"][link]]
    local_s = max(0.0, statistics.median(measured["overheads_s"]))
    return msgspec.structs.replace(
        _plain(measured, link, 1.0 + load * (measured["slower_beside"] - 1.0)),
        overhead=OverheadSpec(local_s=local_s, split_s=max(local_s, statistics.median(beyond))),
    )


def _plain(measured: Mapping[str, Any], link: str, slower: float) -> Scenario:
    """Return it without overheads, its engines that much slower than measured alone."""
    return Scenario(
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        engine=EngineSpec(
            prefill=fit_prefill([(n, slower * s) for n, s in measured["prefills"]]),
            decode=fit_decode([(n, slower * s) for n, s in measured["steps"]]),
            num_layers=NUM_LAYERS,
            kv_cache_tokens=KV_CACHE_TOKENS,
            max_num_batched_tokens=EngineConfig().max_num_batched_tokens,
            max_num_seqs=EngineConfig().max_num_seqs,
            io_s_per_byte=fit_io(measured["sending"]),
        ),
        fleet=[GroupSpec(count=1, prefer="prefill"), GroupSpec(count=1, prefer="decode")],
        network=NetworkSpec(nic_bytes_per_s=measured["goodputs"][link]),
        slo=slo(measured),
        overhead=OverheadSpec(local_s=0.0, split_s=0.0),
    )


def slo(measured: Mapping[str, Any]) -> SloConfig:
    ttft_s, tpot_s, itl_p99_s = cells.Speed(measured["token_s"], measured["step_s"]).slo
    return SloConfig(ttft_s=ttft_s, tpot_s=tpot_s, itl_p99_s=itl_p99_s)


def fit_prefill(samples: Sequence[tuple[int, float]]) -> PrefillFit:
    """Fit T = k alpha + beta n + gamma n^2/2 by relative least squares, no coefficient below 0."""
    budget = EngineConfig().max_num_batched_tokens
    rows = np.array([[-(-n // budget) / s, n / 1e3 / s, n * n / 2e6 / s] for n, s in samples])
    alpha, beta, gamma = non_negative((rows.T @ rows).tolist(), rows.sum(axis=0).tolist())
    return PrefillFit(alpha_s=alpha, beta_s_per_token=beta / 1e3, gamma_s_per_token2=gamma / 1e6)


def fit_decode(samples: Sequence[tuple[int, float]]) -> DecodeFit:
    """Fit s = delta + rho R the same way."""
    rows = np.array([[1.0 / s, r / s] for r, s in samples])
    delta, rho = non_negative((rows.T @ rows).tolist(), rows.sum(axis=0).tolist())
    return DecodeFit(step_s=delta, per_decode_s=rho)


def fit_io(samples: Sequence[tuple[float, float, float]]) -> float:
    """Return what a byte of KV that leaves takes of the core that computes it: the median of what prefill lost."""
    num_bytes = KV_BYTES_PER_TOKEN * SENDING_TOKENS
    lost = [(with_s - alone_s) / min(num_bytes, rate * alone_s) for rate, alone_s, with_s in samples]
    return max(0.0, statistics.median(lost))


def _alone_s(made: Scenario, num_tokens: int) -> float:
    result = Simulation(made, "split", seed=1).run([Arrival(0.0, (own_range(0, num_tokens),), 4)])
    return result.ttft_s.p50


def predicted_records(
    measured: Mapping[str, Any], cell: Cell, arm: str, block: int, window_s: float
) -> list[dict[str, Any]]:
    """Return one record per request, in the form that the real window writes, by the same rule of when it is over."""
    speed = cells.Speed(measured["token_s"], measured["step_s"])
    rate = cells.arrival_rate(cell, speed)
    requests = cells.traffic(cell, block, arm, rate_per_s=rate, window_s=window_s)
    arrivals = [Arrival(each.at_s, _parts(each.prompt), each.max_tokens) for each in requests]
    records: list[dict[str, Any]] = [{} for _ in arrivals]
    load = (cells.LOADS | cells.MORE_LOADS)[cell.load]
    simulation = Simulation(scenario(measured, cell.link, load), arm, seed=cells.SEED)
    about = {"cell": cell.name, "block": block, "arm": arm, "slo": speed.slo}
    simulation.on_record = lambda index, record: records[index].update(
        about | _record(record, requests[index].max_tokens, window_s + DRAIN_S)
    )
    simulation.run(arrivals)
    return records


def _parts(prompt: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the very tokens, so that prefixes are shared as in the real window."""
    return tuple((token, 1) for token in prompt)


def _record(record: Record, max_tokens: int, over_s: float) -> dict[str, Any]:
    times = [time_s for time_s in record.token_times if time_s <= over_s]
    gaps = np.diff(times).tolist()
    has_first = record.ttft_s is not None and record.at_s + record.ttft_s <= over_s
    return {
        "at_s": record.at_s,
        "prompt_tokens": record.num_prompt,
        "num_tokens": len(times),
        "ttft_s": record.ttft_s if has_first else None,
        "tpot_s": sum(gaps) / len(gaps) if gaps else None,
        "itl_p99_s": float(np.percentile(gaps, 99)) if gaps else None,
        "gaps_s": gaps,
        "error": "" if len(times) >= max_tokens else "It did not end in time.",
        "choice": record.choice,
    }
