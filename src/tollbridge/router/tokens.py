"""The token ids of a request, as its worker will compute them: without them no prefix can be looked up.

Ids need nothing. A text or a chat is tokenised here, by the model's own tokenizer and template, if those have once
given the same ids as a worker for a probe; otherwise a ready worker is asked (/tokenize). Both are bounded in time.
What is not known by then is looked up by its text, which says nothing about a cache but what this router sent there.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tollbridge.errors import TollbridgeError
from tollbridge.kv.content import TOKEN_BYTES, Content
from tollbridge.router.fleet import Fleet, Worker
from tollbridge.router.ingress import Call
from tollbridge.router.limits import Limits
from tollbridge.router.prompt import NOTHING, Prompt, Source, maybe_ids, maybe_long_ids, maybe_source, salt_of
from tollbridge.router.tokenizer import LocalTokenizer, TemplateError, maybe_load
from tollbridge.router.upstream import Upstream

log = logging.getLogger("tollbridge.router")

INLINE_BYTES = 512  # a shorter prompt is tokenised faster than a thread is woken
_PROBE = "A toll of 3.50 € is due:\n\n  pay — or turn back?  你好, мост! <|im_end|>\t100000 x"
_PROBE_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _PROBE}]
_MODELS_REMEMBERED = 64
_NO_SUCH_THING = (200, 404, 405, 501)  # statuses of an answer without tokens, whatever the prompt


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class TokensStatistics:
    num_remembered: int
    remembered_bytes: int
    hits_total: int
    misses_total: int
    asked_total: int  # workers asked
    failed_total: int  # in vain, or too late


class Tokens:
    """Owns two threads and the probes under way; `close` it."""

    def __init__(self, folder: Path | None, fleet: Fleet, upstream: Upstream, limits: Limits) -> None:
        self._folder = folder
        self._fleet = fleet
        self._upstream = upstream
        self._limits = limits
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._local: LocalTokenizer | None = None
        self._trusted: dict[str | None, frozenset[str]] = {}  # model -> "text", "chat": what agreed with a worker
        self._probes: set[asyncio.Task[None]] = set()
        self._remembered: OrderedDict[bytes, bytes] = OrderedDict()  # packed ids
        self._remembered_bytes = 0
        self._mute: dict[str, str] = {}  # worker -> the life in which it had no /tokenize
        self._hits = self._misses = self._asked = self._failed = 0

    async def load(self) -> None:
        """Load the model's own tokenizer, if it is at hand."""
        if self._folder is not None:
            self._local = await asyncio.get_running_loop().run_in_executor(self._threads, maybe_load, self._folder)

    async def close(self) -> None:
        for probe in list(self._probes):
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of(self, call: Call, lora: str | None = None) -> Prompt:
        """Return the prompt of `call`, computed under the adapter `lora`. Never raises for what a client sent."""
        salt = salt_of(call.body)
        long = maybe_long_ids(call.body, lora, salt)
        if long is not None:
            return Prompt(content=long, num_tokens=long.num_units, origin="ids")
        ids = maybe_ids(call.body)
        if ids is not None:
            return _prompt(ids, lora, salt, "ids")
        source = maybe_source(call)
        if source is None:
            return NOTHING
        key = source.key(call.model)
        packed = self._recall(key)
        if packed is not None:
            root = Content.of_tokens((), lora=lora, salt=salt).root
            content = Content(packed, TOKEN_BYTES, root)
            return Prompt(content=content, num_tokens=content.num_units, origin="memory")
        return await self._tokenise(call, source, key, lora, salt)

    def statistics(self) -> TokensStatistics:
        return TokensStatistics(
            num_remembered=len(self._remembered),
            remembered_bytes=self._remembered_bytes,
            hits_total=self._hits,
            misses_total=self._misses,
            asked_total=self._asked,
            failed_total=self._failed,
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._remembered_bytes == sum(map(len, self._remembered.values())) <= self._limits.remembered_token_bytes

    # --- inside

    async def _tokenise(self, call: Call, source: Source, key: bytes, lora: str | None, salt: str | None) -> Prompt:
        text = Prompt(content=Content.of_text(source.raw, lora=lora, salt=salt), num_tokens=None, origin="text")
        if source.num_bytes > self._limits.max_tokenize_bytes:
            return text
        local = self._trusts(call.model, source)
        try:
            async with asyncio.timeout(self._limits.tokenize_timeout_s):
                ids = await (self._here(source) if local else self._there(call.model, source))
        except (TimeoutError, TemplateError, TollbridgeError):
            ids = None
        prompt = _prompt(ids, lora, salt, "tokenizer" if local else "worker") if ids is not None else None
        if prompt is None or prompt.content is None:
            self._failed += 1
            return text
        self._remember(key, prompt.content.data)
        return prompt

    async def _here(self, source: Source) -> list[int]:
        if source.num_bytes <= INLINE_BYTES:
            return self._compute(source)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compute, source)

    def _compute(self, source: Source) -> list[int]:
        assert self._local is not None
        if source.messages is not None:
            return self._local.chat(source.messages, add_generation_prompt=source.flag)
        return self._local.text(source.text or "", add_special_tokens=source.flag)

    async def _there(self, model: str | None, source: Source) -> list[int] | None:
        worker = self._worker(model)
        if worker is None:
            return None
        body: dict[str, Any] = dict(source.shaping)
        body |= {"messages": source.messages} if source.messages is not None else {"prompt": source.text}
        return await self._ask(worker, model, body)

    async def _ask(self, worker: Worker, model: str | None, body: dict[str, Any]) -> list[int] | None:
        """Return the ids by a worker's /tokenize, None when it does not give any; UnavailableError when it is gone."""
        self._asked += 1
        body = body if model is None else {**body, "model": model}
        headers = {"content-type": "application/json"}
        data = msgspec.json.encode(body)
        async with self._upstream.request(worker, "POST", "/tokenize", body=data, headers=headers) as response:
            answer = await self._upstream.read(worker, response)
        try:
            if response.status == 200:
                return msgspec.json.decode(answer, type=_Tokens).tokens
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        if response.status in _NO_SUCH_THING:
            self._mute[worker.name] = worker.life
        return None

    def _worker(self, model: str | None) -> Worker | None:
        able = [worker for worker in self._fleet if worker.ready and worker.serves(model) and not self._is_mute(worker)]
        return min(able, key=lambda worker: worker.num_prefills + worker.num_decodes, default=None)

    def _is_mute(self, worker: Worker) -> bool:
        """Whether it has no /tokenize: to ask it again would only delay requests, until it is another process."""
        return self._mute.get(worker.name) == worker.life

    # --- whether our own tokenizer may be believed

    def _trusts(self, model: str | None, source: Source) -> bool:
        """Return whether our own tokenizer will do for `source`; of a model not tried yet, begin to find out."""
        if self._local is None or not source.is_plain:
            return False
        if model not in self._trusted and len(self._trusted) < _MODELS_REMEMBERED:
            self._trusted[model] = frozenset()
            probe = asyncio.create_task(self._probe(model), name="tokenizer probe")  # owned by `close`
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)
        return ("chat" if source.messages is not None else "text") in self._trusted.get(model, ())

    async def _probe(self, model: str | None) -> None:
        """Compare our ids of a text and of a chat with a worker's. Without an answer the next request tries again."""
        probes = {"text": Source(text=_PROBE, raw=b"", shaping={})}
        probes["chat"] = Source(messages=_PROBE_CHAT, raw=b"", shaping={})
        agreed = set()
        try:
            for kind, source in probes.items():
                async with asyncio.timeout(self._limits.check_timeout_s):
                    theirs = await self._there(model, source)
                if theirs is None and kind == "text":
                    raise TemplateError("no answer")  # a chat may have none: the model has no template
                if theirs is not None and theirs == self._compute_or_none(source):
                    agreed.add(kind)
        except (TimeoutError, TemplateError, TollbridgeError):
            self._trusted.pop(model, None)
            return
        self._trusted[model] = frozenset(agreed)
        if len(agreed) < len(probes):
            log.warning(
                "tokenizer differs: model=%s folder=%s agrees on %s only; workers are asked for the rest",
                model, self._folder, " and ".join(sorted(agreed)) or "nothing",
            )  # fmt: skip

    def _compute_or_none(self, source: Source) -> list[int] | None:
        try:
            return self._compute(source)
        except TemplateError:
            return None

    # --- memory

    def _recall(self, key: bytes) -> bytes | None:
        packed = self._remembered.get(key)
        if packed is None:
            self._misses += 1
            return None
        self._hits += 1
        self._remembered.move_to_end(key)
        return packed

    def _remember(self, key: bytes, packed: bytes) -> None:
        bound = self._limits.remembered_token_bytes
        if len(packed) > bound // 4:
            return
        self._remembered_bytes += len(packed) - len(self._remembered.pop(key, b""))
        self._remembered[key] = packed
        while self._remembered_bytes > bound:
            self._remembered_bytes -= len(self._remembered.popitem(last=False)[1])


def _prompt(ids: list[int], lora: str | None, salt: str | None, origin: Any) -> Prompt:
    """Return the prompt of `ids`; NOTHING when they are no token ids, which the worker will say better."""
    try:
        content = Content.of_tokens(ids, lora=lora, salt=salt)
    except struct.error:
        return NOTHING
    return Prompt(content=content, num_tokens=len(ids), origin=origin)
