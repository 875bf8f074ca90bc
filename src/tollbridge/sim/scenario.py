"""What is simulated: the scenario file, with its defaults. Plain numbers, each with its unit in its name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.config.cluster import Count, Fraction, Positive, SloConfig
from tollbridge.config.quantity import LARGEST
from tollbridge.errors import ConfigError

NonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
MAX_WORKERS = 2000
MAX_ARRIVALS = 10_000_000  # they are drawn at once
MAX_SPAN_S = 1e7  # of arrivals: routers look at workers all the time, busy or not


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the scenario file."""


class EngineSpec(_Section, frozen=True, kw_only=True):
    """What every worker is: how fast (as a calibration file has it), and how much KV it holds."""

    prefill: PrefillFit = PrefillFit(alpha_s=5e-3, beta_s_per_token=7e-5, gamma_s_per_token2=1e-9)
    decode: DecodeFit = DecodeFit(step_s=2e-2, per_decode_s=1e-4)
    num_layers: Count = 28  # KV leaves layer by layer
    block_size: Count = 16
    kv_cache_tokens: Count = 65_536
    max_num_batched_tokens: Count = 2048
    max_num_seqs: Count = 64
    max_pinned_fraction: Fraction = 0.5
    io_s_per_byte: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of its core, for KV sent or received; 0: has its own core


class GroupSpec(_Section, frozen=True, kw_only=True):
    """`count` workers, `per_host` of them on one host (and its NIC)."""

    count: Count
    prefer: Literal["prefill", "decode", "any"] = "any"
    per_host: Count = 1
    first_host: Annotated[int, Meta(ge=0)] | None = None  # to share hosts with another group; None: new hosts


class NetworkSpec(_Section, frozen=True, kw_only=True):
    """Goodput in bytes per second. A NIC carries as much in either direction."""

    nic_bytes_per_s: Positive = 1.25e9
    bus_bytes_per_s: Positive = 2e10  # between two workers of one host
    hosts_per_switch: Count | None = None  # None: all hosts are at one switch
    switch_bytes_per_s: Positive | None = None  # what crosses a switch in all; None: never the bottleneck
    latency_s: NonNegative = 2e-4  # from asking for KV to its first byte


class LengthSpec(_Section, frozen=True, kw_only=True):
    """Lognormal around `median`; `sigma` 0 is a constant."""

    median: Positive
    sigma: NonNegative = 0.0
    min: Count = 1
    max: Count = 1 << 20


class ClassSpec(_Section, frozen=True, kw_only=True):
    """One kind of request. With `prefix_tokens`, each prompt begins with one of `num_prefixes` shared prefixes."""

    weight: Positive = 1.0
    prompt_tokens: LengthSpec = LengthSpec(median=1024, sigma=0.8, max=16_384)
    output_tokens: LengthSpec = LengthSpec(median=128, sigma=0.6, max=2048)
    prefix_tokens: Annotated[int, Meta(ge=0)] = 0
    num_prefixes: Count = 16


class TraceSpec(_Section, frozen=True, kw_only=True):
    """Requests as they came somewhere. `speed` 2 replays them twice as fast."""

    format: Literal["azure", "mooncake"]
    path: str
    speed: Positive = 1.0
    max_requests: Count | None = None
    bucket_s: NonNegative = 0.0  # arrivals are recorded in buckets of this length: spread them inside


class WorkloadSpec(_Section, frozen=True, kw_only=True):
    rate_per_s: Positive = 2.0
    burstiness_cv: NonNegative = 1.0  # of the gaps between arrivals: 1 Poisson, above 1 gamma with bursts, 0 even
    classes: list[ClassSpec] = msgspec.field(default_factory=lambda: [ClassSpec()])
    trace: TraceSpec | None = None  # instead of all of the above


class FailureSpec(_Section, frozen=True, kw_only=True):
    worker: str
    at_s: NonNegative
    down_s: Positive = 60.0


class RandomFailures(_Section, frozen=True, kw_only=True):
    """Each worker dies by itself, on average once in `mean_s`, and is back after `down_s` with an empty cache."""

    mean_s: Positive
    down_s: Positive = 60.0


class OverheadSpec(_Section, frozen=True, kw_only=True):
    """Fixed seconds of a request outside the engines: HTTP, tokenising, relay; `split_s` with the second leg."""

    local_s: NonNegative = 0.003
    split_s: NonNegative = 0.006


class Scenario(_Section, frozen=True, kw_only=True):
    """The whole file."""

    kv_bytes_per_token: Positive = 57_344
    engine: EngineSpec = EngineSpec()
    fleet: list[GroupSpec] = msgspec.field(
        default_factory=lambda: [GroupSpec(count=1, prefer="prefill"), GroupSpec(count=1, prefer="decode")]
    )
    network: NetworkSpec = NetworkSpec()
    workload: WorkloadSpec = WorkloadSpec()
    slo: SloConfig = SloConfig()
    overhead: OverheadSpec = OverheadSpec()
    policies: list[str] = msgspec.field(default_factory=lambda: ["local", "split", "adaptive"])
    duration_s: Positive = 300.0  # arrivals; what has arrived is served to its end
    warmup_s: NonNegative = 0.0  # arrivals before are served and not counted
    routers: Count = 1  # each has its own part of the fleet and every so-manieth request
    report_interval_s: Positive = 1.0  # between two looks of a router at a worker
    knows_speeds: bool = True  # adaptive starts from a calibration of engines and links; else it has to learn them
    explore: Fraction = 0.02
    failures: list[FailureSpec] = []
    random_failures: RandomFailures | None = None

    @property
    def num_workers(self) -> int:
        return sum(group.count for group in self.fleet)


def check(scenario: Scenario) -> None:
    """Raise ConfigError when a number is out of its range, or the parts do not fit together."""
    try:
        msgspec.convert(msgspec.to_builtins(scenario), Scenario)  # what flags have put in was not read from a file
    except msgspec.ValidationError as error:
        raise ConfigError(f"The scenario does not fit: {error}.", param="scenario") from None
    number = scenario.num_workers
    arrivals = scenario.workload.rate_per_s * scenario.duration_s
    if scenario.workload.trace is None and arrivals > MAX_ARRIVALS:
        raise ConfigError(
            f"{arrivals:.3g} requests would arrive: give a rate and a duration of at most {MAX_ARRIVALS:,}.",
            param="workload",
        )
    if scenario.duration_s > MAX_SPAN_S:
        raise ConfigError(f"duration_s is {scenario.duration_s:g}: give at most {MAX_SPAN_S:g}.", param="duration_s")
    if not scenario.policies:
        raise ConfigError("policies is empty: leave it out, or name one.", param="policies")
    if not 1 <= number <= MAX_WORKERS:
        raise ConfigError(f"The fleet has {number} workers: give 1 to {MAX_WORKERS}.", param="fleet")
    if scenario.routers > number:
        raise ConfigError(f"There are {scenario.routers} routers for {number} workers.", param="routers")
    if scenario.warmup_s >= scenario.duration_s:
        raise ConfigError("warmup_s must be shorter than duration_s.", param="warmup_s")
    if not scenario.workload.classes:
        raise ConfigError("workload.classes is empty: leave it out, or give a class.", param="workload")
    names = {f"w{index}" for index in range(number)}
    unknown = [failure.worker for failure in scenario.failures if failure.worker not in names]
    if unknown:
        raise ConfigError(f"failures names the worker {unknown[0]!r}: they are w0 to w{number - 1}.", param="failures")
