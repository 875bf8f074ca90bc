"""Which role a new request has: signed params, checked, and what cannot be split served locally.

A connector cannot refuse a request. One whose params are not to be trusted, or that asks for something this worker
cannot split, is served locally: slower, never wrong. It says so once in the log, and in the report of the request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tollbridge.clock import Clock
from tollbridge.errors import RequestError, UnsupportedError
from tollbridge.transfer.base import content_digest
from tollbridge.vllm.support import why_not_split
from tollbridge.wire.params import TransferParams, parse, verify

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One leg of a split, as it enters the scheduler."""

    request_id: str
    params: TransferParams
    digest: bytes  # of what its KV is computed from
    num_tokens: int  # of the prompt


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that came with params and is served locally nevertheless."""

    transfer_id: str
    role: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Release:
    """The router says that nobody will fetch a send. The request that carries it is an ordinary one of one token."""

    transfer_id: str


class Admission:
    """Turns vLLM's requests into legs."""

    def __init__(self, *, secret: bytes, clock: Clock, tp_size: int, sends: bool, loads: bool) -> None:
        self._secret = secret
        self._clock = clock
        self._tp_size = tp_size
        self._roles = {"prefill": sends, "decode": loads}
        self._said: set[str] = set()

    def admit(self, request: Any) -> Leg | Refused | Release | None:
        """Return what `request` is, None for a local one. Never raises: that would end the engine."""
        value = request.kv_transfer_params
        if value is None:
            return None
        try:
            params = parse(value)
            assert params is not None
            self._check(params, request)
        except RequestError as error:
            self._say(error.message)
            named = value.get("tollbridge") if isinstance(value, dict) else None
            fields = named if isinstance(named, dict) else {}
            return Refused(
                transfer_id=str(fields.get("transfer_id", "")), role=str(fields.get("role", "")), detail=error.message
            )
        if params.role == "release":
            return Release(transfer_id=params.transfer_id)
        return Leg(
            request_id=request.request_id,
            params=params,
            digest=content_digest(request.prompt_token_ids, cache_salt=request.cache_salt),
            num_tokens=len(request.prompt_token_ids),
        )

    def _check(self, params: TransferParams, request: Any) -> None:
        verify(params, self._secret, now_s=self._clock.wall())
        if params.role == "release":
            return
        if not self._roles[params.role]:
            raise UnsupportedError(f"This vLLM's kv_role does not allow the {params.role} role: use kv_both.")
        if params.tp_size != self._tp_size:
            raise UnsupportedError(
                f"The prefill worker has tensor parallel size {params.tp_size} and this worker {self._tp_size}: "
                "both must have the same."
            )
        reason = why_not_split(request)
        if reason is not None:
            raise UnsupportedError(reason)

    def _say(self, message: str) -> None:
        """Log a refusal the first time; ids and times in it would make each one new, so the kind counts."""
        kind = message.partition(":")[0][:40]
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("A split request is served locally: %s (said once)", message)
