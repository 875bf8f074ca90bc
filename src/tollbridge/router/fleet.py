"""The workers the router knows: where they are, whether they serve, what they are doing for us.

Ownership: `roster` lets workers enter and leave, and bars them; `health.Monitor` writes health and what a worker says
about itself; `flow` writes loads and failures. Everything runs on one event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from tollbridge.clock import Clock
from tollbridge.config.address import WILDCARDS
from tollbridge.config.cluster import WorkerConfig
from tollbridge.errors import ConfigError, ModelNotFoundError, OverloadedError, UnavailableError, UpstreamError
from tollbridge.policy.pricing import Pricing
from tollbridge.policy.views import FleetView, WorkerView
from tollbridge.router.breaker import Breaker
from tollbridge.router.cards import Cards, Census, Named
from tollbridge.router.load import Load, Report, Transfer, Work
from tollbridge.router.sources import Source

Leg = Literal["prefill", "decode"]
Address = tuple[str, int]
Handover = dict[str, msgspec.Raw]  # `kv_transfer_params` of a stock connector, relayed as they came

MAX_GONE = 1024  # workers that have left and are still known by name
MOST_STREAMS = 256  # of one answer that run at once: vLLM's default for all of a worker's
DEFAULT_BLOCK_SIZE = 16  # tokens, of a worker that does not say
_UNPRICED = Pricing()  # who decides puts the prices in


@dataclass(kw_only=True, eq=False)
class Worker:
    """One worker. `detail` says in one sentence why it is not healthy, `barred` why nobody may go there even so."""

    config: WorkerConfig
    url: str  # without a trailing slash
    uid: str = ""  # tells it from another worker of its name
    ready: bool = False  # healthy and not barred
    # --- written by the roster
    barred: str = ""
    left: bool = False  # it is in the fleet no more; what runs there may end
    # --- written by the health monitor
    healthy: bool = False
    checked: asyncio.Event = field(default_factory=asyncio.Event)  # it has been, once at least
    detail: str = "It has not been checked yet."
    kv: Address | None = None
    incarnation: str | None = None
    num_returns: int = 0  # times that it became healthy
    events: Source | None = None  # where it publishes its KV events
    models: Cards = ()  # cards of /v1/models
    status: dict[str, Any] = field(default_factory=dict)  # /tollbridge/status as it came
    # --- what it said about its load, and what the flows have sent since
    load: Load = field(default_factory=Load)
    # --- written by the flows
    num_prefills: int = 0
    num_decodes: int = 0
    num_served: int = 0
    listener: Handover | None = None  # where its stock connector listens, from its last answer; None: not known
    breaker: Breaker = field(default_factory=lambda: Breaker(first_s=0.25, longest_s=1.0))
    recheck: asyncio.Event = field(default_factory=asyncio.Event)
    waits: set[Callable[[str], None]] = field(default_factory=set)  # ends the waits of the flows for this worker
    _names: Named = field(default_factory=lambda: Named.of(()))
    _view: WorkerView | None = None  # made of `_seen`, and good as long as that is the same
    _seen: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def is_done(self) -> bool:
        """Whether it has left and nobody waits for it any more."""
        return self.left and not self.waits

    def judge(self, *, healthy: bool | None = None, barred: str | None = None) -> None:
        """Take what is known of its health, or of why nobody may go there; "": everybody may."""
        self.healthy = self.healthy if healthy is None else healthy
        self.barred = self.barred if barred is None else barred
        self.ready = self.healthy and not self.barred and not self.left

    @property
    def why(self) -> str:
        """Return why it is not ready, "" when it is."""
        return self.barred or self.detail

    @property
    def life(self) -> str:
        """A name of the process behind the URL: in another life its cache is empty. Guessed when it does not say."""
        return self.incarnation or f"return {self.num_returns}"

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.load.report.block_size or DEFAULT_BLOCK_SIZE

    @property
    def pinned_full(self) -> bool:
        """Whether it said last that it holds as many pinned blocks as it may."""
        return self.load.report.pinned_full

    def serves(self, model: str | None) -> bool:
        return model is None or model in self.named().ids

    def named(self) -> Named:
        """Return what its cards say, read once."""
        if self._names.models is not self.models:
            self._names = Named.of(self.models)
        return self._names

    def view(self, now_s: float) -> WorkerView:
        """Return it as a policy sees it now. Cheap when nothing has changed: every decision asks every worker."""
        suspect, report, now = self.breaker.refuses(now_s), self.load.report, self.load.figures()
        counts = self.num_prefills, self.num_decodes, self.num_served
        seen = (self.ready, suspect, self.kv, self.config, report, now, counts)
        if self._view is None or seen != self._seen:
            self._view, self._seen = self._see(suspect=suspect), seen
        return self._view

    def _see(self, *, suspect: bool) -> WorkerView:
        config, report, now = self.config, self.load.report, self.load.figures()
        return WorkerView(
            name=config.name,
            prefer=config.prefer,
            ready=self.ready,
            connector=config.connector,
            revision=config.revision,
            kv=None if suspect else self.kv,  # decode alone is the better bet than a split with a suspect
            pinned_full=report.pinned_full,
            suspect=suspect,
            num_prefills=self.num_prefills,
            num_decodes=self.num_decodes,
            num_served=self.num_served,
            host=config.host,
            block_size=report.block_size or DEFAULT_BLOCK_SIZE,
            kv_bytes_per_token=report.kv_bytes_per_token,
            max_num_batched_tokens=report.max_num_batched_tokens,
            waiting_prefill_tokens=now.waiting_prefill_tokens,
            num_running=now.num_running,
            free_kv_tokens=now.free_kv_tokens,
            used_kv_tokens=max((report.total_kv_tokens or 0) - (now.free_kv_tokens or 0), 0),
            pinned_tokens=report.pinned_tokens,
            num_sending=now.num_sending,
            sending_bytes=now.sending_bytes,
            num_receiving=now.num_receiving,
            receiving_bytes=now.receiving_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class FleetStatistics:
    num_workers: int
    num_ready: int
    num_prefills: int
    num_decodes: int


class Fleet:
    """All workers, in the order in which they entered."""

    def __init__(self, workers: Sequence[WorkerConfig], *, clock: Clock, kv_bytes_per_token: float = 0.0) -> None:
        """`kv_bytes_per_token` is taken to be that of workers that do not say; 0: not known."""
        self._clock = clock
        self._unsaid = Report(kv_bytes_per_token=kv_bytes_per_token)
        self._transfers: dict[Transfer, tuple[str, str]] = {}  # of this router
        self._workers = {config.name: self._make(config) for config in workers}
        self._gone: OrderedDict[str, Worker] = OrderedDict()  # those that left last: requests may still name them
        self._arrivals: set[asyncio.Queue[Worker]] = set()
        self._census: Census[Worker] = Census(())
        if len(self._workers) != len(workers):
            raise ConfigError("Two workers of the cluster file have the same name: give each its own.", param="workers")

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def __getitem__(self, name: str) -> Worker:
        """Return a worker, also one that left a while ago; UnavailableError when nobody has that name."""
        worker = self._workers.get(name) or self._gone.get(name)
        if worker is None:
            raise UnavailableError(f"Worker {name!r} has left the fleet.")
        return worker

    def enter(self, config: WorkerConfig, uid: str = "") -> Worker:
        """Add a worker, which nobody has checked yet; ConfigError when its address is none."""
        assert config.name not in self._workers
        worker = self._workers[config.name] = self._make(config, uid)
        self._gone.pop(config.name, None)
        for queue in self._arrivals:
            queue.put_nowait(worker)
        return worker

    def leave(self, worker: Worker) -> None:
        """Remove a worker. What it has to do ends as it may."""
        self._gone[worker.name] = self._workers.pop(worker.name)
        worker.left = True
        worker.judge()
        worker.recheck.set()
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    async def arrivals(self) -> AsyncIterator[Worker]:
        """Yield every worker, then each that enters. Never ends."""
        queue: asyncio.Queue[Worker] = asyncio.Queue()  # bounded by the fleet
        for worker in self:
            queue.put_nowait(worker)
        self._arrivals.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._arrivals.discard(queue)

    def view(self, model: str | None) -> FleetView:
        """Return the workers that serve `model` as a policy sees them; ModelNotFoundError when ready ones do not.

        With no worker ready nobody knows which models exist: the view is then empty of ready workers.
        """
        workers = self.serving_model(model)
        if not workers and (ready := [worker for worker in self if worker.ready]):
            known = ", ".join(sorted({str(card.get("id")) for worker in ready for card in worker.models}))
            raise ModelNotFoundError(f"The model {str(model)[:200]!r} is not served here: use {known}.", param="model")
        now_s = self._clock.monotonic()
        return FleetView(workers=tuple([worker.view(now_s) for worker in workers]), pricing=_UNPRICED)

    def adapter(self, model: str | None) -> str | None:
        """Return `model` when it is a LoRA adapter of another one: then its KV is its own."""
        return model if self._counted().is_adapter(model) else None

    def serving_model(self, model: str | None) -> Sequence[Worker]:
        """Return the workers that serve `model`, ready or not. None: all of them."""
        return self._counted().serving(model)

    def _counted(self) -> Census[Worker]:
        workers = list(self._workers.values())
        if not self._census.is_of(workers):
            self._census = Census(workers)
        return self._census

    @contextmanager
    def serving(
        self, worker: Worker, leg: Leg, *, prefill_tokens: int = 0, kv_tokens: int = 0, num_choices: int = 1
    ) -> Iterator[Callable[[], None]]:
        """Count one request in flight on `worker` while the context lasts; call what it yields at the first token.

        `prefill_tokens` of its prompt have to be computed there; its KV needs room for `kv_tokens`. An answer is
        `num_choices` streams.
        """
        work = Work(
            prefill_tokens=prefill_tokens,
            kv_tokens=kv_tokens,
            num_streams=min(num_choices, MOST_STREAMS) if leg == "decode" else 0,
            sent_s=self._clock.monotonic(),
        )
        worker.num_served += 1
        self._add(worker, leg, 1)
        request = object()
        worker.breaker.begin(request, self._clock.monotonic())
        worker.load.begin(work)
        try:
            yield lambda: worker.load.prefilled(work)
        finally:
            worker.breaker.end(request)
            worker.load.end(work)
            self._add(worker, leg, -1)

    def begin_transfer(self, prefill: Worker, decode: Worker, num_tokens: int) -> Callable[[], None]:
        """KV of `num_tokens` begins to cross; the flow calls what is returned when it has crossed, or never will.

        That is idempotent.
        """
        transfer = Transfer(num_tokens=num_tokens, sent_s=self._clock.monotonic())
        prefill.load.begin_transfer(transfer, outward=True)
        decode.load.begin_transfer(transfer, outward=False)
        self._transfers[transfer] = (prefill.name, decode.name)

        def end() -> None:
            if self._transfers.pop(transfer, None):
                prefill.load.end_transfer(transfer, outward=True)
                decode.load.end_transfer(transfer, outward=False)

        return end

    def links(self) -> dict[tuple[str, str], int]:
        """Return how many transfers of ours are under way between which workers: (prefill, decode) -> number."""
        return dict(Counter(self._transfers.values()))

    def noticed(self, worker: Worker, error: UnavailableError) -> None:
        """A request ended with `error` on `worker`. A full queue is no reason to suspect it."""
        if isinstance(error, UpstreamError):
            self.failed(worker)
        elif not isinstance(error, OverloadedError):  # it may be draining: as it refuses at once, it would seem idle
            worker.recheck.set()

    def failed(self, worker: Worker) -> None:
        """A request failed on `worker`: make it the last choice for a while, and check it at once."""
        worker.listener = None  # it may have restarted
        self.doubt(worker)
        worker.recheck.set()

    def doubt(self, worker: Worker) -> None:
        """Make `worker` the last choice for a while."""
        worker.breaker.failed(self._clock.monotonic())

    def succeeded(self, worker: Worker) -> None:
        """A request went well on `worker`: it is no suspect any more."""
        worker.breaker.succeeded()

    def is_suspect(self, worker: Worker) -> bool:
        return worker.breaker.refuses(self._clock.monotonic())

    def statistics(self) -> FleetStatistics:
        return FleetStatistics(
            num_workers=len(self._workers),
            num_ready=self._sum(lambda worker: worker.ready),
            num_prefills=self._sum(lambda worker: worker.num_prefills),
            num_decodes=self._sum(lambda worker: worker.num_decodes),
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for worker in self:
            assert worker.num_prefills >= 0
            assert worker.num_decodes >= 0
            worker.breaker.check()
            worker.load.check()
            now_s = self._clock.monotonic()
            fresh = worker._see(suspect=worker.breaker.refuses(now_s))
            assert worker.view(now_s) == fresh, "a change was not noticed"

    def _sum(self, number: Callable[[Worker], int]) -> int:
        return sum(map(number, self))

    def view_of(self, worker: Worker) -> WorkerView:
        """Return `worker` as a policy sees it now."""
        return worker.view(self._clock.monotonic())

    def _make(self, config: WorkerConfig, uid: str = "") -> Worker:
        return Worker(config=config, url=_url(config), uid=uid, load=Load(self._unsaid))

    @staticmethod
    def _add(worker: Worker, leg: Leg, number: int) -> None:
        if leg == "prefill":
            worker.num_prefills += number
        else:
            worker.num_decodes += number


def parse_address(text: str) -> Address | None:
    """Return (host, port) of "host:port" or "[v6]:port"; None when malformed or when the port is 0 (not chosen yet)."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def kv_address(config: WorkerConfig, said: str | None) -> Address | None:
    """Return where other workers can dial this worker's KV port, None when it is not known yet.

    The cluster file counts when it names a port (a proxy or a forwarded port is its author's business); otherwise what
    the worker says. A worker that listens on every interface cannot know the address others use: then the URL's host.
    """
    address = parse_address(config.kv) or (parse_address(said) if said else None)
    if address is None:
        return None
    host = urlsplit(config.url).hostname if address[0] in ("", *WILDCARDS) else address[0]
    return (host, address[1]) if host else None


def _url(config: WorkerConfig) -> str:
    """Return the worker's URL without a trailing slash; ConfigError when the router cannot dial it."""
    parts = urlsplit(config.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ConfigError(
            f"Worker {config.name!r} has the url {config.url!r}: the router needs http://host:port with the real port.",
            param="workers",
        )
    return config.url.rstrip("/")
