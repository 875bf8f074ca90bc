"""How much of all prompts, split or not, is still to be computed here, and whether somebody waits for room.

Reads vLLM's requests by attribute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_WAITS_FOR_ROOM = frozenset({"WAITING", "PREEMPTED"})  # not for KV, nor for a grammar


@dataclass
class _Prompt:
    request: Any
    remaining: int  # tokens to be computed here


class Prompts:
    """By request id, from `add` to `remove`."""

    def __init__(self) -> None:
        self._live: dict[str, _Prompt] = {}
        self._open: dict[str, _Prompt] = {}  # those with something remaining
        self._waiting: dict[str, _Prompt] = {}  # those that do not run

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests that wait to be computed."""
        return sum(prompt.remaining for prompt in self._open.values())

    @property
    def starving(self) -> bool:
        """Whether a request waits for blocks or a place in the batch."""
        return any(prompt.request.status.name in _WAITS_FOR_ROOM for prompt in self._waiting.values())

    def add(self, request: Any) -> None:
        """A request comes in, or is preempted and starts over."""
        prompt = self._live[request.request_id] = _Prompt(request, request.num_tokens)
        self._open[request.request_id] = self._waiting[request.request_id] = prompt

    def preempted(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._live:
                self.add(self._live[request_id].request)

    def loading(self, request_id: str, num_tokens: int) -> None:
        """So many of its tokens come from elsewhere."""
        if request_id in self._live:
            self._set(request_id, self._live[request_id].remaining - num_tokens)

    def scheduled(self, output: Any) -> None:
        """Take a step (vLLM's SchedulerOutput)."""
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self._begin(request_id, start)
        if self._open:
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                if request_id in self._open:
                    self._set(request_id, self._open[request_id].remaining - num_tokens)

    def remove(self, request_id: str) -> None:
        for index in (self._live, self._open, self._waiting):
            index.pop(request_id, None)

    def check(self) -> None:
        """Raise AssertionError when the indexes disagree."""
        assert self._open.keys() <= self._live.keys() and self._waiting.keys() <= self._live.keys()
        assert all(prompt.remaining > 0 for prompt in self._open.values())

    def _begin(self, request_id: str, start: int) -> None:
        self._waiting.pop(request_id, None)
        if request_id in self._live:
            self._set(request_id, self._live[request_id].request.num_tokens - start)

    def _set(self, request_id: str, remaining: int) -> None:
        prompt = self._live[request_id]
        prompt.remaining = max(remaining, 0)
        if prompt.remaining:
            self._open[request_id] = prompt
        else:
            self._open.pop(request_id, None)
