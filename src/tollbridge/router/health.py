"""Keeps the fleet's picture of each worker fresh: one task per worker, a check every second and after each failure.

A worker is healthy when /health says 200, and watched until it has left and nobody waits for it. What it says about
itself (/tollbridge/status: KV address, incarnation, load; /v1/models: models) is learnt on the way; stock servers have
no /tollbridge/status, which is fine.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import msgspec

from tollbridge.clock import Clock
from tollbridge.errors import UnavailableError, UpstreamError
from tollbridge.router.fleet import Fleet, Worker, kv_address, parse_address
from tollbridge.router.limits import Limits
from tollbridge.router.metrics import RouterMetrics
from tollbridge.router.reports import from_metrics, from_status
from tollbridge.router.sources import Source, said_by_vllm, source_of
from tollbridge.router.upstream import Upstream, failure_of

log = logging.getLogger("tollbridge.router")


class Monitor:
    """Checks every worker of `fleet`. `run` never ends; cancel it."""

    def __init__(self, fleet: Fleet, upstream: Upstream, limits: Limits, metrics: RouterMetrics, clock: Clock) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._silent: set[str] = set()  # names of workers without metrics

    async def run(self) -> None:
        """Check each worker at once, then after every interval, or when a flow asks for it."""
        async with asyncio.TaskGroup() as loops:
            async for worker in self._fleet.arrivals():
                loops.create_task(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        timeouts = await self.check(worker)
        worker.checked.set()
        while not worker.is_done:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(worker)):
                    await worker.recheck.wait()
            worker.recheck.clear()
            timeouts = await self.check(worker, timeouts)
        self._upstream.forget(worker)

    def _pause_s(self, worker: Worker) -> float:
        poll_s = self._limits.poll_interval_s
        return poll_s if worker.healthy else min(poll_s, self._limits.return_interval_s)

    async def check(self, worker: Worker, timeouts: int = 0) -> int:
        """Check one worker; return how many checks in a row it has let time out.

        A busy worker may be late, so it goes out of service only after several; a refusal counts at once.
        """
        try:
            async with asyncio.timeout(self._limits.check_timeout_s):
                await self._ask(worker)
        except TimeoutError:
            timeouts += 1
            self._fleet.doubt(worker)
            if not worker.healthy or timeouts >= self._limits.timeouts_until_down:
                self._set(worker, False, f"It did not answer a health check within {self._limits.check_timeout_s:g} s.")
            if timeouts >= self._limits.timeouts_until_lost:
                self._lose(worker, f"it left {timeouts} health checks in a row unanswered.")
            return timeouts
        except UnavailableError as error:
            self._set(worker, False, error.message)
        except Exception as error:  # a task boundary: one odd answer must not end the watch
            log.exception("health check failed: worker=%s", worker.name)
            self._set(worker, False, f"Its answer to a health check was not understood: {type(error).__name__}.")
        else:
            self._set(worker, True, "")
        return 0

    def _lose(self, worker: Worker, detail: str) -> None:
        """Give up what still waits for a worker that hangs: it may be stopped, with its connections open for ever."""
        if worker.waits:
            log.warning("worker lost: name=%s requests=%d %s", worker.name, len(worker.waits), detail)
        for give_up in list(worker.waits):
            give_up(detail)

    async def _ask(self, worker: Worker) -> None:
        await self._get(worker, "/health")
        asked_s = self._clock.monotonic()
        status = await self._get(worker, "/tollbridge/status", optional=True)
        worker.status = status if isinstance(status, dict) else {}
        if not worker.status and worker.config.engine == "embedded":
            raise UnavailableError(
                f"It has no /tollbridge/status, so it is no embedded worker: if it is a vLLM, write `engine: vllm` for "
                f"{worker.name} in the cluster file."
            )
        await self._ask_load(worker, asked_s)
        incarnation = _text(worker.status.get("incarnation"))
        said = _text(worker.status.get("kv"))
        if not worker.healthy or worker.incarnation != incarnation:
            worker.breaker.succeeded()  # it came back: what its predecessor did is no guide
            worker.models = _cards(await self._get(worker, "/v1/models"))
            worker.events = await self._events(worker)
            _warn_of_other_port(worker, said)
        worker.incarnation = incarnation
        takes_no_part = "kv" in worker.status and said is None
        worker.kv = None if takes_no_part else kv_address(worker.config, said)
        if worker.status.get("draining") is True:
            raise UnavailableError("It is draining: it finishes what it has and takes nothing new.")

    async def _events(self, worker: Worker) -> Source | None:
        """Return where it publishes its KV events: the cluster file, its status or vLLM's own list say so."""
        said = _text(worker.status.get("events")), _text(worker.status.get("replay"))
        if worker.config.engine == "vllm" and said[0] is None and worker.config.events is not None:
            said = said_by_vllm(await self._get(worker, "/kv_event_sources", optional=True))
        source = source_of(worker.url, worker.config.events, worker.config.replay, *said)
        if source is not None and source.replay is None and worker.config.engine == "vllm":
            return source.with_neighbour()  # as `tollbridge worker vllm` starts it
        return source

    async def _ask_load(self, worker: Worker, asked_s: float) -> None:
        """Learn how busy it is: from its status, or from the metrics of a stock server."""
        report = from_status(worker.status) if worker.status else None
        if report is None and worker.config.engine == "vllm":
            asked_s = self._clock.monotonic()
            report = from_metrics(await self._read(worker, "/metrics", optional=True), known=worker.load.report)
            self._note_silence(worker, is_silent=report is None)
        if report is not None:
            worker.load.told(report, asked_s)

    def _note_silence(self, worker: Worker, *, is_silent: bool) -> None:
        """A vLLM without metrics serves all the same, but how busy it is nobody knows then."""
        if is_silent and worker.name not in self._silent:
            log.warning(
                "worker says nothing of its load: name=%s its /metrics has nothing of vLLM (--disable-log-stats?), so "
                "its queue, its KV room and what others send there are unknown", worker.name,
            )  # fmt: skip
        (self._silent.add if is_silent else self._silent.discard)(worker.name)

    async def _get(self, worker: Worker, path: str, *, optional: bool = False) -> Any:
        """Return the JSON value at `path`, None when the body is not JSON; UnavailableError for an error answer."""
        try:
            return msgspec.json.decode(await self._read(worker, path, optional=optional))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    async def _read(self, worker: Worker, path: str, *, optional: bool = False) -> bytes:
        """Return the body at `path`, an empty one for 404 when `optional`; UnavailableError for an error answer."""
        async with self._upstream.request(worker, "GET", path) as response:
            body = await self._upstream.read(worker, response)
        if response.status == 404 and optional:
            return b""
        failure = failure_of(worker, response.status, body)
        if failure is None and response.status != 200:
            failure = UpstreamError(f"Worker {worker.name} answered {response.status} on {path}.")
        if failure is not None:
            raise failure
        return body

    def _set(self, worker: Worker, healthy: bool, detail: str) -> None:
        worker.num_returns += healthy and not worker.healthy
        if healthy != worker.healthy:
            log.log(
                logging.INFO if healthy else logging.WARNING,
                "worker %s: name=%s url=%s %s", "ready" if healthy else "not ready", worker.name, worker.url, detail,
            )  # fmt: skip
        worker.detail = detail
        worker.judge(healthy=healthy)
        if not healthy:
            worker.listener = None
        if not worker.left:
            self._metrics.worker_ready.labels(worker.name).set(worker.ready)


def _warn_of_other_port(worker: Worker, said: str | None) -> None:
    """A wrong KV port makes every split fail quietly into recomputation: say so when the worker comes up."""
    configured, reported = parse_address(worker.config.kv), parse_address(said or "")
    if configured and reported and configured[1] != reported[1]:
        log.warning(
            "KV port differs: worker=%s cluster_file=%d worker_says=%d; splits use the cluster file's",
            worker.name, configured[1], reported[1],
        )  # fmt: skip


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _cards(answer: object) -> tuple[dict[str, Any], ...]:
    data = answer.get("data") if isinstance(answer, dict) else None
    return tuple(card for card in data if isinstance(card, dict)) if isinstance(data, list) else ()
