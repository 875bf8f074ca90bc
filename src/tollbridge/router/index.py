"""Feeds the prefix index: from the KV events of each worker that publishes them, and from what this router sends.

One task per worker. It listens while the worker is in one life (incarnation) and at one endpoint; in the next life
everything it held is gone, so the index forgets it and the listening begins again. A worker without events is known by
what was sent to it alone, for `expect_alone_s`; one with events is expected to tell of it within `expect_told_s`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from tollbridge.clock import Clock
from tollbridge.kv.content import TOKEN_BYTES, Prompted
from tollbridge.kv.index import PrefixIndex
from tollbridge.router.fleet import Fleet, Worker
from tollbridge.router.limits import Limits
from tollbridge.router.listener import Listener, ListenerStatistics
from tollbridge.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Decoded, KVEvent

log = logging.getLogger("tollbridge.router")

TEXT_BLOCK_BYTES = 64  # of a prompt whose tokens are not known
_PAUSE_S = 0.5  # between two looks at a worker that publishes nothing


@dataclass
class Following:
    """What is known about the events of one worker."""

    listener: Listener | None = None
    statistics: ListenerStatistics = field(default_factory=ListenerStatistics)

    @property
    def listens(self) -> bool:
        """Whether what the worker tells is known, from its past too."""
        return self.listener is not None and self.listener.is_following


class IndexFeeder:
    """Owns the index, the sockets and the tasks that follow the workers. `run` never ends; cancel it."""

    def __init__(self, fleet: Fleet, limits: Limits, clock: Clock) -> None:
        self.index = PrefixIndex(
            max_entries=limits.index_entries, max_entries_per_worker=limits.index_entries_per_worker
        )
        self.texts = PrefixIndex(max_entries=limits.index_entries // 4, max_entries_per_worker=1 << 14)
        self.following: dict[str, Following] = {}  # by the name of a worker
        self._fleet = fleet
        self._limits = limits
        self._clock = clock

    async def run(self) -> None:
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._expire())
                async for worker in self._fleet.arrivals():
                    tasks.create_task(self._follow(worker, context))
        finally:
            context.destroy(linger=0)

    def match(self, content: Prompted) -> dict[str, int]:
        """Return the leading units of `content` that each worker has, or is about to have."""
        return (self.index if content.unit_bytes == TOKEN_BYTES else self.texts).match(content)

    def listens(self, worker: Worker) -> bool:
        """Return whether what `worker` tells is known."""
        following = self.following.get(worker.name)
        return following is not None and following.listens

    def sent(self, worker: Worker, content: Prompted, *, loads: bool = False) -> None:
        """`content` was sent to `worker`, which will have it in its cache.

        Who computes a prompt has it for all that wait behind it. Who `loads` one has not: another prompt that begins
        alike and is sent there meanwhile is computed there. So of that counts what the worker tells, if it does.
        """
        report = worker.load.report
        if worker.left or not report.caches_prefixes:
            return
        now_s = self._clock.monotonic()
        if content.unit_bytes != TOKEN_BYTES:
            expires_s = now_s + self._limits.expect_alone_s
            self.texts.expect(worker.name, content, TEXT_BLOCK_BYTES, expires_s=expires_s)
            return
        tells = self.listens(worker)
        if loads and tells:
            return
        lasts_s = self._limits.expect_told_s if tells else self._limits.expect_alone_s
        room = None if tells or report.total_kv_tokens is None else report.total_kv_tokens // worker.block_size
        self.index.expect(worker.name, content, worker.block_size, expires_s=now_s + lasts_s, most=room)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for index in (self.index, self.texts):
                index.expire(self._clock.monotonic())

    async def _follow(self, worker: Worker, context: zmq.asyncio.Context) -> None:
        """Follow one worker through its lives, until it leaves."""
        following = self.following[worker.name] = Following()
        life = None
        while not worker.left:
            if worker.ready and worker.life != life:
                life = worker.life
                self._forget(worker.name)
            source = worker.events
            if not worker.ready or source is None:
                await asyncio.sleep(_PAUSE_S)
                continue
            listener = Listener(
                source=source,
                context=context,
                apply=lambda batch: self._apply(worker, batch),
                lost=lambda: self._lost(worker),
                is_current=lambda life=life, source=source: (  # type: ignore[misc]
                    not worker.left and (worker.life, worker.events) == (life, source)
                ),
                statistics=following.statistics,
            )
            following.listener = listener
            log.info("following the KV events of %s at %s", worker.name, source.events)
            try:
                await listener.run()
            except zmq.ZMQError as error:
                log.warning("KV events of %s cannot be followed at %s: %s", worker.name, source.events, error)
                worker.events = None  # until its next life
            finally:
                following.listener = None
        if worker.name not in self._fleet:  # and no other of its name is followed by now
            self.following.pop(worker.name, None)
            for index in (self.index, self.texts):
                index.forget_worker(worker.name)

    def _lost(self, worker: Worker) -> None:
        if worker.left:
            return
        log.warning("KV events of %s were lost: what it has cached is learnt anew", worker.name)
        self._forget(worker.name)

    def _forget(self, worker: str) -> None:
        for index in (self.index, self.texts):
            index.clear(worker)

    def _apply(self, worker: Worker, batch: Decoded) -> None:
        for event in batch.events if not worker.left else ():
            self._apply_event(worker.name, event)

    def _apply_event(self, worker: str, event: KVEvent) -> None:
        if isinstance(event, BlockStored):
            self.index.stored(
                worker,
                block_hashes=event.block_hashes,
                parent=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                medium=event.medium,
                lora=event.lora_name,
                extra_keys=event.extra_keys,
            )
        elif isinstance(event, BlockRemoved):
            self.index.removed(worker, event.block_hashes, medium=event.medium)
        elif isinstance(event, AllBlocksCleared):
            self._forget(worker)
