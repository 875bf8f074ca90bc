"""The pods of a namespace, by list and watch: a reflector. What it needs of the API server: get, list, watch on pods.

    LIST ──> WATCH ──closed by the server, or silent beyond its deadline──> WATCH, from where the last one came to
     ^         │
     └─────────┴── 410, an error event, nonsense ──> LIST

A watch asks the server to close it after about `watch_s`, so one that is still open `grace_s` later is half open: the
server, or what is between, has forgotten it. Failures are followed by a pause that doubles, with jitter; meanwhile
what was told last stands.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from tollbridge.clock import Clock
from tollbridge.config.cluster import DiscoveryConfig
from tollbridge.discovery.account import Account
from tollbridge.discovery.base import DiscoveryStatistics, Endpoint, Sight, Tell
from tollbridge.discovery.pods import Pod
from tollbridge.discovery.watch import GONE, ExpiredError, Lines, Page, Store, WatchError

log = logging.getLogger("tollbridge.discovery")

MAX_PAGE_BYTES = 256 << 20
_TRANSIENT = frozenset({401, 403, 429, 500, 502, 503})  # of a watch: it may go on from where it was
_REFUSED = frozenset({401, 403})


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, but for `page_pods`."""

    watch_s: float = 50.0  # a watch lasts as long, a fifth more or less
    grace_s: float = 10.0
    list_s: float = 30.0  # deadline of a page
    connect_s: float = 5.0
    first_pause_s: float = 0.25
    longest_pause_s: float = 15.0
    page_pods: int = 500


class ApiError(Exception):
    """The API server answered with an error. `keeps`: the watch may go on from where it was."""

    def __init__(self, message: str, *, keeps: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.keeps = keeps
        self.retry_after_s = retry_after_s


class KubernetesDiscovery:
    """See the top of the file."""

    def __init__(
        self, config: DiscoveryConfig, clock: Clock, *, pace: Pace | None = None, rng: random.Random | None = None
    ) -> None:
        """Raise ConfigError when it is not known where the API server is."""
        self._account = Account(config)
        self._path = f"{self._account.url}/api/v1/namespaces/{self._account.namespace}/pods"
        self._selector = config.selector
        self._store = Store(config)
        self._clock = clock
        self._pace = pace or Pace()
        self._rng = rng or random.Random()
        self._pause_s = self._pace.first_pause_s
        self._began_s = 0.0  # the step
        self._told: list[Endpoint] | None = None
        where = f"pods of namespace {self._account.namespace} with {config.selector} at {self._account.url}"
        self._sight = Sight("kubernetes", where)

    def statistics(self) -> DiscoveryStatistics:
        return self._sight.statistics(self._clock.monotonic())

    async def run(self, tell: Tell) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._pace.connect_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                pause_s = await self._step(session, tell)
                await asyncio.sleep(pause_s)

    async def _step(self, session: aiohttp.ClientSession, tell: Tell) -> float:
        """List if need be, then watch as long as it lasts; return the seconds to pause then."""
        self._began_s = self._clock.monotonic()
        try:
            if self._store.version is None:
                await self._list(session, tell)
            await self._watch(session, tell)
        except ExpiredError:
            self._store.version = None
        except ApiError as error:
            return self._failed(str(error), keeps=error.keeps, at_least_s=error.retry_after_s)
        except WatchError as error:
            return self._failed(str(error))
        except TimeoutError:
            return self._failed("it did not answer in time, or a watch was half open", keeps=True)
        except (aiohttp.ClientError, OSError) as error:
            return self._failed(f"{error or type(error).__name__}", keeps=True)
        except Exception as error:  # a task boundary: without discovery the fleet would age unnoticed
            log.exception("discovery failed")
            return self._failed(f"an error of ours: {type(error).__name__}")
        lasted_s = self._clock.monotonic() - self._began_s
        return 0.0 if lasted_s > 1.0 else self._next_pause_s()  # a server that goes down closes each watch at once

    # --- the two requests

    async def _list(self, session: aiohttp.ClientSession, tell: Tell) -> None:
        pods: list[Pod] = []
        rest = ""
        while True:
            page = await self._page(session, rest)
            pods += page.items or ()
            rest = page.metadata.rest
            if not rest:
                break
        self._store.replace(pods, page.metadata.version)
        self._tell(tell, listed=True)

    async def _page(self, session: aiohttp.ClientSession, rest: str) -> Page:
        params = {"labelSelector": self._selector, "limit": str(self._pace.page_pods)}
        async with (
            asyncio.timeout(self._pace.list_s),
            self._get(session, params | ({"continue": rest} if rest else {})) as answer,
        ):
            body = await _bounded(answer)
        try:
            return msgspec.json.decode(body, type=Page)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(f"its list of pods cannot be read: {error}") from error

    async def _watch(self, session: aiohttp.ClientSession, tell: Tell) -> None:
        """Return when the server closes the watch."""
        watch_s = max(1.0, self._pace.watch_s * self._rng.uniform(0.8, 1.2))
        params = {
            "watch": "true",
            "labelSelector": self._selector,
            "resourceVersion": self._store.version or "",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(round(watch_s)),
        }
        lines = Lines()
        async with asyncio.timeout(round(watch_s) + self._pace.grace_s), self._get(session, params) as answer:
            self._saw()
            async for piece in answer.content.iter_any():
                self._take(lines.feed(piece), tell)
        self._saw()

    def _take(self, lines: list[bytes], tell: Tell) -> None:
        try:
            for line in lines:
                self._store.take(line)
        finally:  # what came before the end of the watch is true
            if lines:
                self._tell(tell)

    @asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, params: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer if it is 200; ExpiredError for 410, ApiError for any other."""
        async with session.get(
            self._path, params=params, headers=self._account.headers(), ssl=self._account.tls(), allow_redirects=False
        ) as answer:
            if answer.status != 200:
                await self._refuse(answer)
            yield answer

    async def _refuse(self, answer: aiohttp.ClientResponse) -> None:
        said = (await answer.content.read(4096)).decode(errors="replace")
        if answer.status == GONE:
            raise ExpiredError(said)
        hint = f"; the router's service account needs get, list and watch on pods in {self._account.namespace}"
        wait = answer.headers.get("Retry-After", "")
        raise ApiError(
            f"it answered {answer.status}: {_message(said)}{hint if answer.status in _REFUSED else ''}",
            keeps=answer.status in _TRANSIENT,
            retry_after_s=min(float(wait), 60.0) if wait.isascii() and wait.isdigit() else 0.0,
        )

    # --- what is told, and when

    def _tell(self, tell: Tell, *, listed: bool = False) -> None:
        endpoints = self._store.endpoints()
        if endpoints != self._told:  # and not for each heartbeat
            self._told = endpoints
            tell(endpoints)
        saw = self._sight.looked if listed else self._sight.true
        saw(len(endpoints), self._clock.monotonic(), num_ignored=self._store.num_ignored)

    def _saw(self) -> None:
        """The server answers, so what was told is true."""
        if self._sight.error is not None:
            log.info("the API server answers again")
        self._sight.true(len(self._store.endpoints()), self._clock.monotonic(), num_ignored=self._store.num_ignored)

    def _failed(self, what: str, *, keeps: bool = False, at_least_s: float = 0.0) -> float:
        if not keeps:
            self._store.version = None
        if self._sight.failed(f"The API server at {self._account.url} cannot be followed: {what}."):
            log.warning("discovery does not see, the last known workers stay: %s", self._sight.error)
        return max(self._next_pause_s(), at_least_s)

    def _next_pause_s(self) -> float:
        lasted_s = self._clock.monotonic() - self._began_s
        pause_s = self._pace.first_pause_s if lasted_s > self._pace.longest_pause_s else self._pause_s
        self._pause_s = min(pause_s * 2, self._pace.longest_pause_s)
        return pause_s * self._rng.uniform(0.5, 1.0)


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    pieces: list[bytes] = []
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        if sum(map(len, pieces)) > MAX_PAGE_BYTES:
            raise ApiError(f"its list of pods has more than {MAX_PAGE_BYTES} bytes")
    return b"".join(pieces)


def _message(body: str) -> str:
    """Return the sentence of a Status, or the start of whatever it is."""
    try:
        return msgspec.json.decode(body, type=_Status).message[:300]
    except msgspec.DecodeError:
        return body[:300]


class _Status(msgspec.Struct, frozen=True):
    message: str = ""
