"""Who is in the fleet: applies what the discovery tells, and shows how well it sees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tollbridge.discovery.base import Discovery, Endpoint
from tollbridge.errors import ConfigError
from tollbridge.router.fleet import Fleet, Worker
from tollbridge.router.learn import Learner
from tollbridge.router.metrics import RouterMetrics

log = logging.getLogger("tollbridge.router")

_BARRED = {
    "serving": "",
    "not_ready": "Its pod is not ready.",
    "draining": "It is being deleted: it finishes what it has and takes nothing new.",
}


class Roster:
    """Lets workers enter and leave. `known` is set once it is known who serves and each was checked."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, learner: Learner) -> None:
        self.known = asyncio.Event()
        self._complete = asyncio.Event()
        self._fleet = fleet
        self._metrics = metrics
        self._learner = learner

    def told(self, endpoints: Sequence[Endpoint]) -> None:
        """Make the fleet what `endpoints` says, all of it: see `discovery.base.Tell`."""
        wanted = {endpoint.name: endpoint for endpoint in endpoints}
        left = [worker for worker in self._fleet if not _is(worker, wanted.get(worker.name))]
        for worker in left:
            self._leave(worker)
        for endpoint in endpoints:
            entered = self._fleet[endpoint.name] if endpoint.name in self._fleet else self._enter(endpoint)
            if entered is not None:
                self._bar(entered, _BARRED[endpoint.standing])
        if left:
            workers = list(self._fleet)
            self._learner.keep({worker.name for worker in workers}, {worker.config.host for worker in workers})
        self._complete.set()

    async def first(self) -> None:
        """Set `known` once the first list is complete and every worker in it has been checked."""
        await self._complete.wait()
        for worker in list(self._fleet):
            await worker.checked.wait()
        self.known.set()

    def _enter(self, endpoint: Endpoint) -> Worker | None:
        try:
            worker = self._fleet.enter(endpoint.worker, endpoint.uid)
        except (ConfigError, ValueError) as error:  # an address that is none
            log.warning("worker cannot be taken in: name=%s url=%s %s", endpoint.name, endpoint.worker.url, error)
            return None
        log.info("worker entered: name=%s url=%s revision=%s", worker.name, worker.url, worker.config.revision)
        return worker

    def _leave(self, worker: Worker) -> None:
        self._fleet.leave(worker)
        log.info("worker left: name=%s url=%s requests=%d", worker.name, worker.url, len(worker.waits))
        self._metrics.forget(worker.name)

    def _bar(self, worker: Worker, why: str) -> None:
        if worker.barred == why:
            return
        was_ready = worker.ready
        worker.judge(barred=why)
        worker.recheck.set()
        if worker.ready != was_ready:
            log.info("worker %s: name=%s %s", "ready" if worker.ready else "not ready", worker.name, worker.why)
            self._metrics.worker_ready.labels(worker.name).set(worker.ready)


def _is(worker: Worker, endpoint: Endpoint | None) -> bool:
    return endpoint is not None and (worker.config, worker.uid) == (endpoint.worker, endpoint.uid)


class DiscoveryCollector(Collector):
    """Reads the statistics of the discovery at each scrape."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def collect(self) -> Iterator[Metric]:
        now, prefix = self._discovery.statistics(), "tollbridge_router_discovery_"
        yield GaugeMetricFamily(
            f"{prefix}up",
            "0 while who serves cannot be seen, and what was known last stands.",
            float(now.error is None),
        )
        yield GaugeMetricFamily(f"{prefix}endpoints", "Workers that it names, ready or not.", now.num_endpoints)
        yield GaugeMetricFamily(f"{prefix}ignored", "What it saw and took for no worker.", now.num_ignored)
        if now.age_s is not None:
            yield GaugeMetricFamily(f"{prefix}age_seconds", "Since what it named was last known to be true.", now.age_s)
        yield CounterMetricFamily(
            f"{prefix}looks", "Complete looks: lists, rounds of names, readings.", now.looks_total
        )
        yield CounterMetricFamily(f"{prefix}failures", "Looks and watches that failed.", now.failures_total)

    def describe(self) -> Iterator[Metric]:
        return iter(())
