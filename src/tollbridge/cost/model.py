"""What is known of what requests cost here: engines by worker, links by pair of hosts, habits of the traffic.

Predicts; is told what happened; knows how far off it is. The caller brings the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from tollbridge.config.calibration import Calibration, EngineCalibration, LinkCalibration
from tollbridge.cost.engine import EngineModel
from tollbridge.cost.habits import Average, OutputLengths, Rate
from tollbridge.cost.link import LinkModel

DEFAULT_OUTPUT_TOKENS = 128.0
DEFAULT_KV_BYTES = 131_072.0  # of a token of Llama-3.1-8B in bfloat16
MAX_LINKS = 1024  # that are kept although their hosts may be gone
RATE_WINDOW_S = 30.0


@dataclass(frozen=True, kw_only=True)
class CostStatistics:
    """Fits in the form of a calibration file, so that they can be kept."""

    engines: Mapping[str, EngineCalibration]
    links: Mapping[str, LinkCalibration]
    local_overhead_s: float
    split_overhead_s: float
    output_tokens: float
    arrivals_per_s: float


@dataclass(kw_only=True)
class CostModel:
    """One per router. Unknown engines are taken to be like the known ones; unknown links stay unknown."""

    local_overhead_s: Average = field(default_factory=Average)  # TTFT beyond wait and prefill: HTTP, tokenising, relay
    split_overhead_s: Average = field(default_factory=Average)  # the same of a split: what the second leg costs
    output_tokens: OutputLengths = field(default_factory=OutputLengths)
    arrivals: Rate = field(default_factory=lambda: Rate(RATE_WINDOW_S))
    wire_bytes_per_token: Average = field(default_factory=Average)  # as reported, so with codec and layout
    wire_factor: Average = field(default_factory=Average)  # of what the sender says its KV weighs: models differ
    stalls: Rate = field(default_factory=lambda: Rate(RATE_WINDOW_S))  # prompts that stop whoever decodes beside them
    stall_tokens: Average = field(default_factory=Average)  # their length
    _stranger: EngineModel = field(default_factory=EngineModel)  # of whom nothing is known; never learns
    _engines: dict[str, EngineModel] = field(default_factory=dict)
    _links: dict[tuple[str, str], LinkModel] = field(default_factory=dict)

    @classmethod
    def seeded(cls, calibration: Calibration | None = None, links: Iterable[tuple[str, str, float]] = ()) -> CostModel:
        """Return a model that starts from a calibration, and from (from host, to host, bytes/s) of the cluster file."""
        model = cls()
        calibration = calibration or Calibration()
        for name, engine in calibration.engines.items():
            model._engines[name] = EngineModel(engine.prefill, engine.decode)
        for pair, link in calibration.links.items():
            source, _, target = pair.partition(">")
            model._links[source, target] = LinkModel(link.goodput_bytes_per_s, spread=0.1)
        for source, target, goodput in links:
            model._links[source, target] = LinkModel(goodput, spread=0.1)
        return model

    def engine(self, worker: str) -> EngineModel:
        """Return the model of a worker's engine, or of a known one while this one is a stranger."""
        engine = self._engines.get(worker)
        if engine is not None and engine.known:
            return engine
        return next((other for other in self._engines.values() if other.known), engine or self._stranger)

    def own_engine(self, worker: str) -> EngineModel:
        """Return the model that this worker's observations go to."""
        engine = self._engines.get(worker)
        if engine is None:
            engine = self._engines[worker] = EngineModel()
        return engine

    def keep(self, workers: Set[str], hosts: Set[str]) -> None:
        """Forget engines of other workers, and links of other hosts once there are many.

        While none of `workers` is known, one that was stays: strangers are taken to be like it.
        """
        if not any(engine.known for name, engine in self._engines.items() if name in workers):
            workers = workers | {name for name, engine in self._engines.items() if engine.known}
        self._engines = {name: engine for name, engine in self._engines.items() if name in workers}
        if len(self._links) > MAX_LINKS:
            self._links = {pair: link for pair, link in self._links.items() if hosts >= set(pair)}

    def link(self, source: str, target: str) -> LinkModel:
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = LinkModel()
        return link

    def goodputs(self, sources: Iterable[str], targets: Sequence[str]) -> Iterator[float]:
        """Yield the goodput of each known link from one of `sources` to one of `targets`, bytes/s."""
        for source in sources:
            for target in targets:
                link = self._links.get((source, target))
                if link is not None and link.known:
                    yield link.goodput_bytes_per_s

    def weighed(self, bytes_per_token: float, stated: float) -> None:
        """Note what the KV of a token weighed on the wire, and what its sender states, 0 if nothing."""
        self.wire_bytes_per_token.add(bytes_per_token)
        if stated:
            self.wire_factor.add(bytes_per_token / stated)

    def kv_bytes(self, stated: float) -> float:
        """Return what the KV of a token of such a sender weighs on the wire.

        Where nobody says (vLLM's own connectors, without the model's folder), a guess has to do: links are measured in
        the same bytes, so it cancels out of every price over a link that was not stated.
        """
        return stated * self.wire_factor.value(1.0) if stated else self.wire_bytes_per_token.value(DEFAULT_KV_BYTES)

    def started(self, now_s: float) -> None:
        """Note that a request arrived."""
        self.arrivals.count(now_s)

    def stalling(self, num_tokens: float, now_s: float) -> None:
        """Note that a prompt arrived whose prefill breaks the gaps of whoever decodes on the same engine."""
        self.stalls.count(now_s)
        self.stall_tokens.add(num_tokens)

    def statistics(self, now_s: float) -> CostStatistics:
        engines = {name: engine.fits() for name, engine in self._engines.items() if engine.known}
        links = {f"{a}>{b}": link for (a, b), link in self._links.items() if link.known}
        return CostStatistics(
            engines={name: EngineCalibration(prefill=p, decode=d) for name, (p, d) in engines.items()},
            links={n: LinkCalibration(goodput_bytes_per_s=link.goodput_bytes_per_s) for n, link in links.items()},
            local_overhead_s=self.local_overhead_s.value(0.0),
            split_overhead_s=self.split_overhead_s.value(0.0),
            output_tokens=self.output_tokens.value(DEFAULT_OUTPUT_TOKENS),
            arrivals_per_s=self.arrivals.per_s(now_s),
        )
