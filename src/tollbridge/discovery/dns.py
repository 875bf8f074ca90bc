"""Workers behind names: each address that a name has is a worker. For headless Services, and wherever names are kept.

The `workers` of the cluster file are patterns: the host of `url` is looked up (A, or AAAA where there is no A; a name
that begins with an underscore has SRV records, which know the port), and its addresses take its place in url, kv,
events and replay. A name is asked again when its answer has lived as long as it says, within bounds.

An answer that does not come keeps the last one. One that says that nobody is left must come twice: name servers that
have just started say so too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import dns.asyncresolver
import dns.exception
import dns.resolver
import msgspec

from tollbridge.clock import Clock
from tollbridge.config.address import Address, parse_address
from tollbridge.config.cluster import DiscoveryConfig, WorkerConfig, machine_of
from tollbridge.discovery.base import DiscoveryStatistics, Endpoint, Sight, Tell
from tollbridge.errors import ConfigError

log = logging.getLogger("tollbridge.discovery")

LIFETIME_S = 5.0  # of one question, repetitions included


class Answer(NamedTuple):
    """Who is behind a name. Port 0: the pattern's own."""

    addresses: tuple[Address, ...]
    ttl_s: float


class Resolver(Protocol):
    async def ask(self, name: str) -> Answer:
        """Return who is behind `name`, nobody included; LookupError saying why nobody knows."""
        ...


class SystemResolver:
    """Asks the name servers of resolv.conf, with its search list."""

    def __init__(self, resolver: dns.asyncresolver.Resolver | None = None) -> None:
        try:
            self._resolver = resolver or dns.asyncresolver.Resolver()
        except dns.resolver.NoResolverConfiguration as error:
            raise ConfigError(f"discovery.kind is dns, but no name server is configured: {error}.") from None

    async def ask(self, name: str) -> Answer:
        if not name.startswith("_"):
            return await self._hosts(name)
        found = await self._records(name, "SRV")
        targets = [(record.target.to_text(), int(record.port)) for record in found or ()]
        behind = await asyncio.gather(*(self._hosts(target) for target, _ in targets))
        addresses = {
            Address(host=address.host, port=port)
            for (_, port), answer in zip(targets, behind, strict=True)
            for address in answer.addresses
        }
        ttls = [answer.ttl_s for answer in behind] + [_ttl_s(found)]
        return Answer(tuple(sorted(addresses, key=str)), min(ttls))

    async def _hosts(self, name: str) -> Answer:
        """Both families name the same workers, so one of them is enough."""
        found = await self._records(name, "A") or await self._records(name, "AAAA")
        hosts = sorted({str(record.address) for record in found or ()})
        return Answer(tuple(Address(host=host, port=0) for host in hosts), _ttl_s(found))

    async def _records(self, name: str, kind: str) -> dns.resolver.Answer | None:
        """Return the records, None when there are none; LookupError when nobody answers."""
        try:
            return await self._resolver.resolve(name, kind, search=True, lifetime=LIFETIME_S)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None
        except (dns.exception.DNSException, OSError) as error:
            raise LookupError(f"{name} ({kind}): {error}") from error


@dataclass
class _Pattern:
    """One entry of `workers`, and what is known of its name."""

    worker: WorkerConfig
    host: str
    port: int
    found: tuple[Address, ...] = ()
    was_asked: bool = False
    was_empty: bool = False  # the last answer, which does not count yet
    error: str = ""  # why its last question had no answer
    due_s: float = float("-inf")


class DnsDiscovery:
    """See the top of the file."""

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        config: DiscoveryConfig,
        clock: Clock,
        *,
        resolver: Resolver | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._resolver = resolver or SystemResolver()
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._patterns = [_pattern(worker) for worker in workers]
        self._sight = Sight("dns", ", ".join(sorted({pattern.host for pattern in self._patterns})))

    def statistics(self) -> DiscoveryStatistics:
        return self._sight.statistics(self._clock.monotonic())

    async def run(self, tell: Tell) -> None:
        while True:
            await self._sleep(await self.look(tell))

    async def look(self, tell: Tell) -> float:
        """Ask for what is due, tell, and return the seconds until the next is due."""
        due = [pattern for pattern in self._patterns if pattern.due_s <= self._clock.monotonic()]
        await asyncio.gather(*map(self._ask, due))
        failures = [pattern.error for pattern in self._patterns if pattern.error]
        if not all(pattern.was_asked for pattern in self._patterns) and not any(p.found for p in self._patterns):
            self._failed(failures)
            return self._pause_s()  # nothing is known yet, so it would be no complete set
        endpoints = [endpoint for pattern in self._patterns for endpoint in _endpoints(pattern)]
        tell(endpoints)
        if failures:
            self._failed(failures)
        else:
            self._sight.looked(len(endpoints), self._clock.monotonic())
        return self._pause_s()

    async def _ask(self, pattern: _Pattern) -> None:
        """Bring a pattern up to date."""
        config = self._config
        try:
            answer = await self._resolver.ask(pattern.host)
        except LookupError as error:
            pattern.due_s = self._clock.monotonic() + config.min_ttl_s
            pattern.error = str(error)
            return
        confirmed = not pattern.found or pattern.was_empty
        pattern.was_asked, pattern.was_empty, pattern.error = True, not answer.addresses, ""
        if answer.addresses or confirmed:
            pattern.found = answer.addresses
        lives_s = min(max(answer.ttl_s, config.min_ttl_s), config.max_ttl_s) if answer.addresses else config.min_ttl_s
        pattern.due_s = self._clock.monotonic() + lives_s

    def _failed(self, failures: list[str]) -> None:
        if self._sight.failed(f"Names cannot be looked up: {'; '.join(failures)[:500]}."):
            log.warning("discovery does not see, the last known workers stay: %s", self._sight.error)

    def _pause_s(self) -> float:
        due_s = min(pattern.due_s for pattern in self._patterns) - self._clock.monotonic()
        return min(max(due_s, 0.0), self._config.max_ttl_s)  # without any name nothing is ever due


def _pattern(worker: WorkerConfig) -> _Pattern:
    address = parse_address(worker.url, scheme="http://")
    fixed = _is_address(address.host)
    return _Pattern(
        worker=worker,
        host=address.host,
        port=address.port,
        found=(Address(host=address.host, port=0),) if fixed else (),
        was_asked=fixed,
        due_s=float("inf") if fixed else float("-inf"),
    )


def _endpoints(pattern: _Pattern) -> list[Endpoint]:
    if _is_address(pattern.host):
        return [Endpoint(worker=pattern.worker)]
    return [Endpoint(worker=_at(pattern, address)) for address in pattern.found]


def _at(pattern: _Pattern, address: Address) -> WorkerConfig:
    worker, host = pattern.worker, address.host
    name = f"{worker.name}-{host.replace('.', '-').replace(':', '-')}"
    return msgspec.structs.replace(
        worker,
        name=f"{name}-{address.port}" if address.port else name,
        url=f"http://{Address(host=host, port=address.port or pattern.port)}",
        kv=str(Address(host=host, port=parse_address(worker.kv).port)),
        events=_moved(worker.events, host),
        replay=_moved(worker.replay, host),
        host=host if worker.host == machine_of(worker.kv, worker.url) else worker.host,
    )


def _moved(endpoint: str | None, host: str) -> str | None:
    port = urlsplit(endpoint).port if endpoint else None
    return None if endpoint is None else f"tcp://{Address(host=host, port=port or 0)}"


def _ttl_s(answer: dns.resolver.Answer | None) -> float:
    return float("inf") if answer is None else float(answer.chaining_result.minimum_ttl)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
