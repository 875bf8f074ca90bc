"""The embedded engine: a thread around the loop, and a door that any thread may knock at.

The thread sleeps on one condition. Three things wake it: a command (submit, abort), a transfer that has something to
tell, shutdown. It never polls.
"""

from __future__ import annotations

import logging
import random
import threading

from tollbridge.clock import Clock, SystemClock
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import EngineRequest, EngineStatistics, ModelInfo, Structure, Tokenizer
from tollbridge.engine.draws import Draw
from tollbridge.engine.loop import Command, Delivery, EngineLoop, ReleaseSend
from tollbridge.engine.ports import Runner, Sampler, TextStreamFactory
from tollbridge.engine.requests import LiveRequest, check_request
from tollbridge.engine.structure import Structures
from tollbridge.engine.transfers import TransferDesk
from tollbridge.errors import RequestError, UnavailableError, UnsupportedError
from tollbridge.kv.hashes import HashChain
from tollbridge.sched.sequence import TokenSequence
from tollbridge.transfer.base import KVReceiver, KVSender, content_digest
from tollbridge.wire.events import KVEvent

logger = logging.getLogger(__name__)


class EmbeddedEngine:
    """`engine.base.Engine` over a runner, a sampler and the KV transfer. Owns, and closes, sender and receiver."""

    def __init__(
        self,
        *,
        info: ModelInfo,
        config: EngineConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        sampler: Sampler,
        text_streams: TextStreamFactory,
        structures: Structures | None = None,  # None: structured output is refused
        sender: KVSender | None = None,
        receiver: KVReceiver | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,  # draws the seeds of requests that bring none
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._text_streams = text_streams
        self._structures = structures
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._desk = TransferDesk(sender, receiver)
        self._loop = EngineLoop(
            info=info, config=config, runner=runner, sampler=sampler, desk=self._desk, clock=self._clock
        )

        self._wake = threading.Condition()  # guards what follows
        self._inbox: list[Command] = []
        self._request_ids: set[str] = set()  # between submit and the last output
        self._transfers_call = False
        self._closed_because = ""  # why nothing is accepted any more

        self._thread = threading.Thread(target=self._serve, name="tollbridge-engine", daemon=True)
        self._desk.set_listener(self._on_transfer)
        self._thread.start()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def check_structure(self, structure: Structure) -> None:
        """Compile `structure` for requests to come; RequestError or UnsupportedError when it cannot be used."""
        self._compiler().check(structure)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; RequestError or ContextLengthError when it can never run, UnavailableError when stopped."""
        check_request(request, self._info)
        self._loop.check_fits(len(request.prompt_token_ids), request.sampling.max_tokens)
        live = self._prepare(request)
        with self._wake:
            if self._closed_because:
                raise UnavailableError(self._closed_because)
            if request.request_id in self._request_ids:
                raise RequestError(f"Request id {request.request_id} is in use: send another one.", param="request_id")
            if request.transfer is not None:
                self._desk.claim(request.transfer)
            self._request_ids.add(request.request_id)
            self._inbox.append(live)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort" at the next step; unknown or ended ids are ignored."""
        with self._wake:
            if request_id in self._request_ids:
                self._inbox.append(request_id)
                self._wake.notify()

    def release_send(self, transfer_id: str) -> None:
        """Cancel a send that nobody will fetch (any thread); unknown and ended ones are ignored."""
        with self._wake:
            self._inbox.append(ReleaseSend(transfer_id))
            self._wake.notify()

    def take_events(self) -> list[KVEvent]:
        """Return the KV cache events since the last call (any thread)."""
        return self._loop.take_events()

    def statistics(self) -> EngineStatistics:
        """Return gauges and counters; a request counts as waiting from `submit` on."""
        with self._wake:
            queued = [command for command in self._inbox if isinstance(command, LiveRequest)]
        return self._loop.statistics(queued)

    def check(self) -> None:
        """Raise AssertionError when an invariant of pool, prefix cache, scheduler or transfers is broken."""
        self._loop.check()

    def shutdown(self) -> None:
        """Abort everything, close sender and receiver, stop and join the thread. Not to be called from a sink."""
        with self._wake:
            self._closed_because = self._closed_because or "This worker is shutting down: try another one."
            self._wake.notify()
        self._thread.join()

    def _prepare(self, request: EngineRequest) -> LiveRequest:
        """Do what is slow for a long prompt, hashing, in the caller's thread."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        role = request.transfer.role if request.transfer else None
        chain = HashChain(self._info.block_size, cache_salt=request.cache_salt)
        chain.grow(prompt)
        return LiveRequest(
            request,
            TokenSequence(
                request_id=request.request_id,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                chain=chain,
                remote=role == "decode",
                awaited=role == "prefill",
                veto_tokens=request.transfer.veto_tokens if request.transfer else 0,
                priority=request.priority,
                scores_prompt=sampling.prompt_logprobs is not None and len(prompt) > 1,
            ),
            self._text_streams(prompt, sampling),
            Draw(
                sampling,
                prompt,
                seed=self._rng.getrandbits(64) if sampling.seed is None else sampling.seed,
                num_continued=request.num_continued_tokens,
                end_ids=self._info.eos_token_ids,
                matcher=self._compiler().start(sampling.structure) if sampling.structure else None,
            ),
            arrival_s=request.arrival_s or self._clock.monotonic(),
            eos_token_ids=self._info.eos_token_ids,
            digest=content_digest(prompt, cache_salt=request.cache_salt) if request.transfer else b"",
        )

    def _compiler(self) -> Structures:
        if self._structures is None:
            raise UnsupportedError("This engine has no structured output.", param="response_format")
        return self._structures

    def _on_transfer(self) -> None:
        """Wake the loop; called by any thread of sender and receiver."""
        with self._wake:
            self._transfers_call = True
            self._wake.notify()

    def _serve(self) -> None:
        """Run until shutdown. The boundary of the thread: whatever happens, every request gets its last output."""
        try:
            while (commands := self._wait()) is not None:
                self._deliver(self._loop.step(commands))
            self._deliver(self._loop.abort_all(self._take_inbox()))
        except Exception:  # a broken loop cannot go on: say so to everyone, and refuse what comes
            logger.exception("The engine's loop failed")
            error = "The engine of this worker failed; see its log."
            with self._wake:
                self._closed_because = error
            self._deliver(self._loop.abandon(self._take_inbox(), error))
            self._desk.close()
        else:
            self._loop.close()

    def _wait(self) -> list[Command] | None:
        """Sleep until there is something to do; return the commands, None at shutdown."""
        with self._wake:
            while self._loop.is_idle and not (self._inbox or self._transfers_call or self._closed_because):
                self._wake.wait()
            if self._closed_because:
                return None
            self._transfers_call = False
        return self._take_inbox()

    def _take_inbox(self) -> list[Command]:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        return inbox

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """Call the sinks. An id may be used again as soon as its last output is out."""
        ended = [output.request_id for _, output in deliveries if output.finish_reason is not None]
        if ended:
            with self._wake:
                self._request_ids.difference_update(ended)
        for sink, output in deliveries:
            try:
                sink(output)
            except Exception:  # a sink that raises breaks its promise, but must not take the engine along
                logger.exception("The sink of request %s raised", output.request_id)
