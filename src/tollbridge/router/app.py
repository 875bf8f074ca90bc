"""The aiohttp application: routes, lifespan, and the order of checks in front of every request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from aiohttp import web

from tollbridge.clock import Clock, SystemClock
from tollbridge.config.calibration import Calibration, read_calibration
from tollbridge.config.cluster import ClusterConfig
from tollbridge.cost.model import CostModel
from tollbridge.discovery.base import Discovery
from tollbridge.discovery.make import make_discovery
from tollbridge.errors import TollbridgeError
from tollbridge.obs.tracing import NoTracer, Tracer, trace_of
from tollbridge.policy import registry
from tollbridge.router import fanout, forward, ingress, openapi, views
from tollbridge.router.admission import Admission
from tollbridge.router.answers import Handler, errors_as_json, json_answer
from tollbridge.router.budget import RetryBudget
from tollbridge.router.client import Client
from tollbridge.router.context import Context
from tollbridge.router.decide import decide_call
from tollbridge.router.decisions import Decisions
from tollbridge.router.fleet import Fleet
from tollbridge.router.flow import Flow
from tollbridge.router.health import Monitor
from tollbridge.router.index import IndexFeeder
from tollbridge.router.knowledge import KnowledgeCollector
from tollbridge.router.kvsize import kv_bytes_per_token
from tollbridge.router.learn import Learner
from tollbridge.router.limits import Limits
from tollbridge.router.metrics import RouterMetrics
from tollbridge.router.outcome import Arrival
from tollbridge.router.release import Releaser
from tollbridge.router.roster import DiscoveryCollector, Roster
from tollbridge.router.sessions import Sessions
from tollbridge.router.tenants import Tenants
from tollbridge.router.tokenizer import maybe_folder
from tollbridge.router.tokens import Tokens
from tollbridge.router.trials import Trials
from tollbridge.router.upstream import Upstream
from tollbridge.wire.bodies import Bodies

log = logging.getLogger("tollbridge.router")

CONTEXT = web.AppKey("context", Context)
REQUEST_ID = web.RequestKey("request_id", str)
TENANT = web.RequestKey("tenant", str)
OPEN_PATHS = web.AppKey("open_paths", set[str])  # carry no API key
PROBED_PATHS = ("/health", "/metrics")
Extension = Callable[[web.Application, Context], None]  # adds routes of a higher layer: the dashboard


def make_context(
    cluster: ClusterConfig,
    secret: bytes,
    *,
    limits: Limits | None = None,
    clock: Clock | None = None,
    tracer: Tracer | None = None,
    discovery: Discovery | None = None,
) -> Context:
    """Assemble what the requests share; ConfigError when the cluster file does not fit together."""
    router = cluster.router
    registry.find(router.policy)
    limits, clock = limits or Limits(), clock or SystemClock()
    upstream, metrics, tenants = Upstream(limits), RouterMetrics(), Tenants(router)
    folder = maybe_folder(cluster.model)
    fleet = Fleet(
        cluster.workers if cluster.lists_workers else (),
        clock=clock,
        kv_bytes_per_token=kv_bytes_per_token(folder, cluster.dtype),
    )
    admission = Admission(
        tenants.weights,
        clock=clock,
        max_in_flight=router.max_concurrent,
        max_waiting=router.max_queue,
        max_waiting_bytes=limits.max_waiting_bytes,
    )
    metrics.watch(lambda: admission.statistics().in_flight, lambda: admission.statistics().waiting)
    feeder = IndexFeeder(fleet, limits, clock)
    tokens = Tokens(folder, fleet, upstream, limits)
    metrics.registry.register(KnowledgeCollector(feeder, tokens))
    discovery = discovery or make_discovery(cluster, clock)
    metrics.registry.register(DiscoveryCollector(discovery))
    learner = Learner(
        cost=_cost_model(cluster),
        slo=cluster.slo,
        explore=cluster.router.explore,
        fleet=fleet,
        clock=clock,
        metrics=metrics,
    )
    return Context(
        config=cluster,
        secret=secret,
        limits=limits,
        clock=clock,
        fleet=fleet,
        discovery=discovery,
        roster=Roster(fleet, metrics, learner),
        upstream=upstream,
        feeder=feeder,
        tokens=tokens,
        releaser=Releaser(upstream),
        sessions=Sessions(lasts_s=limits.expect_alone_s),
        decisions=Decisions(limits.num_decisions),
        metrics=metrics,
        learner=learner,
        tracer=tracer or NoTracer(),
        budget=RetryBudget(fraction=limits.retry_fraction, burst=limits.retry_burst),
        tenants=tenants,
        admission=admission,
        bodies=Bodies(
            who="router",
            timeout_s=limits.body_timeout_s,
            idle_s=limits.body_idle_s,
            max_bytes=limits.max_bodies_bytes,
        ),
    )


def _cost_model(cluster: ClusterConfig) -> CostModel:
    """Start from what was measured before: the calibration file, and the links that the cluster file states."""
    calibration = read_calibration(Path(cluster.calibration)) if cluster.calibration else None
    stated = [
        (link.from_host, link.to_host, link.goodput_bytes_per_s) for link in cluster.links if link.goodput_bytes_per_s
    ]
    if calibration is not None and cluster.lists_workers:
        _warn_of_strangers(cluster, calibration)
    return CostModel.seeded(calibration, stated)


def _warn_of_strangers(cluster: ClusterConfig, calibration: Calibration) -> None:
    """What was measured under a name that nobody has is never used."""
    names, hosts = {worker.name for worker in cluster.workers}, {worker.host for worker in cluster.workers}
    strangers = [f"engine {name}" for name in calibration.engines if name not in names]
    strangers += [f"link {pair}" for pair in calibration.links if not hosts >= set(pair.split(">"))]
    if strangers:
        log.warning(
            "calibration has names that nobody has: %s; workers are %s on %s", ", ".join(sorted(strangers)),
            ", ".join(sorted(names)), ", ".join(sorted(hosts)),
        )  # fmt: skip


def make_app(context: Context, extensions: Sequence[Extension] = ()) -> web.Application:
    """Return the application; its start-up checks every worker once, so that the first request finds them."""
    app = web.Application(
        middlewares=[identify, errors_as_json, check_key, know_fleet],
        client_max_size=context.config.router.max_body_mib << 20,
    )
    app[CONTEXT] = context
    app[OPEN_PATHS] = set(PROBED_PATHS)
    app.cleanup_ctx.append(_lifespan)
    app.on_response_prepare.append(_name_response)
    for path in ingress.PROMPT_FIELD:
        app.router.add_post(path, generate)
    for path in forward.PATHS:
        app.router.add_post(path, pass_on)
    show: dict[str, Callable[[Context, web.Request], web.Response]] = {
        "/v1/models": lambda context, _: views.models(context),
        "/v1/models/{model:.+}": lambda context, request: views.model(context, request.match_info["model"]),
        "/health": lambda context, _: views.health(context),
        "/metrics": lambda context, _: views.metrics(context),
        "/fleet": lambda context, _: views.fleet(context),
        "/decisions": lambda context, request: views.decisions(context, request.query.get("limit", "50")),
        "/openapi.json": lambda *_: json_answer(openapi.document()),
        "/decisions/{id:.+}": lambda context, request: views.decision(context, request.match_info["id"]),
    }
    for path, view in show.items():
        app.router.add_get(path, _handler(view))
    for extend in extensions:
        extend(app, context)
    return app


async def generate(request: web.Request) -> web.StreamResponse:
    """① to ⑥ for completions and chat completions."""
    context = request.app[CONTEXT]
    context.drain.check()
    arrived_s = context.clock.monotonic()
    with context.name(request[REQUEST_ID]) as request_id:
        request[REQUEST_ID] = request_id
        async with AsyncExitStack() as stack:
            trace = context.tracer.begin(trace_of(request.headers))
            try:
                with trace.span("admission", id=request_id, tenant=request[TENANT]):
                    call = await ingress.read(request, context.config.router, request_id, context.bodies)
                    queue_s = await stack.enter_async_context(context.place(call, request[TENANT], arrived_s))
                with trace.span("decide", policy=call.override or context.config.router.policy):
                    decision = await decide_call(context, call)
            except BaseException as error:
                if isinstance(error, TollbridgeError | web.HTTPException):
                    context.metrics.refused.labels(str(error.status)).inc()
                trace.end(error=str(error) or type(error).__name__)
                raise
            arrival = Arrival(at_s=arrived_s, queue_s=queue_s, tenant=request[TENANT], trace=trace)
            client = Client(request, patience_s=context.config.router.idle_timeout_s)
            if decision.reason == fanout.REASON:
                await stack.aclose()  # each prompt needs a place of its own
                return await fanout.Fanout(context, call, client, arrival).run()
            return await Flow(context, call, client, decision, arrival).run()


async def pass_on(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    context.drain.check()
    arrived_s = context.clock.monotonic()
    with context.name(request[REQUEST_ID]) as request_id:
        call = await ingress.read(request, context.config.router, request_id, context.bodies)
        async with context.place(call, request[TENANT], arrived_s):
            return await forward.forward(context, call, request, context.left_s(call, arrived_s))


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request its id, refused ones included."""
    request[REQUEST_ID] = ingress.request_id_of(request)
    return await handler(request)


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path not in request.app[OPEN_PATHS]:
        request[TENANT] = request.app[CONTEXT].tenants.tenant_of(request)
    return await handler(request)


@web.middleware
async def know_fleet(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let the first requests wait for the first complete list of workers, rather than refuse them."""
    context = request.app[CONTEXT]
    if request.path.startswith("/v1/") and not context.roster.known.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(context.limits.first_patience_s):
                await context.roster.known.wait()
    return await handler(request)


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    request_id = request.get(REQUEST_ID)
    if request_id is not None:  # an Expect that is not supported is refused before any middleware runs
        response.headers["x-request-id"] = request_id


def _handler(view: Callable[[Context, web.Request], web.Response]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return view(request.app[CONTEXT], request)

    return handle


async def _lifespan(app: web.Application) -> AsyncIterator[None]:
    context = app[CONTEXT]
    monitor = Monitor(context.fleet, context.upstream, context.limits, context.metrics, context.clock)
    async with context.upstream:
        await context.tokens.load()
        runs = {
            "discovery": context.discovery.run(context.roster.told),
            "first list": context.roster.first(),
            "fleet health": monitor.run(),
            "prefix index": context.feeder.run(),
            "link trials": Trials(context).run(),
        }
        tasks = [asyncio.create_task(run, name=name) for name, run in runs.items()]  # owned by the application
        for task in tasks:
            task.add_done_callback(_report)
        try:
            await _first_list(context, *tasks[:2])
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await context.tokens.close()
        await context.releaser.close()
    await asyncio.to_thread(context.tracer.close)


async def _first_list(context: Context, discovery: asyncio.Task[None], first: asyncio.Task[None]) -> None:
    """Wait until it is known who serves, but not for ever; ConfigError when it never will be."""
    patience_s = context.limits.first_list_s
    await asyncio.wait({discovery, first}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    if discovery.done():
        discovery.result()
    if not first.done():
        log.warning("nobody knows yet who serves, after %g s: %s", patience_s, context.discovery.statistics().error)


def _report(task: asyncio.Task[None]) -> None:
    """None of these tasks should end: say so, because the router goes on without it."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, TollbridgeError):
        log.critical("the task %r ended", task.get_name(), exc_info=error)
