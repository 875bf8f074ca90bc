"""How the two legs of a split are sent, for each connector: data that the flow acts on alike.

    tollbridge  at once, under one signed transfer id
    nixl        in turn: decode is told what prefill answered, and reads the KV out of prefill's memory
    nixl-push   at once, under one request id; in turn until prefill has once said where it listens

The stock connectors' fields are those of vLLM 0.31, vllm/distributed/kv_transfer/kv_connector/v1/nixl.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from tollbridge.router import legs
from tollbridge.router.context import Context
from tollbridge.router.fleet import Handover, Worker
from tollbridge.router.ingress import Call
from tollbridge.wire.params import RELEASE_PATH, Role, TransferParams

_ASK_PREFILL: dict[str, object] = {
    "do_remote_decode": True, "do_remote_prefill": False,
    "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
_LISTENER = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "dcp_size", "transfer_mode")


class Split(Protocol):
    """The legs of one split."""

    transfer_id: str
    headers: dict[str, str]  # of both legs
    prefill: bytes
    patience_s: float | None  # how long decode may take to begin once prefill is complete; None: decode has a deadline
    prefill_outlives: bool  # prefill runs to its end when the request is over: decode would wait for its KV for ever

    def decode(self) -> bytes | None:
        """Return the body of the decode leg, None while it has to wait for what prefill answers."""

    def prefilled(self, answer: bytes) -> str:
        """Take prefill's answer; return the reason code why decode gets no KV, empty when it does."""

    def release(self, *, arrived: bool, answered: bool) -> None:
        """The split is over: let prefill drop KV that nobody fetches.

        `arrived`: decode said that it loaded everything. `answered`: it began to answer.
        """


def split_of(context: Context, call: Call, prefill: Worker, decode: Worker, *, veto_tokens: int = 0) -> Split:
    """Return how `call` is sent to the two workers, which have the same connector.

    Of our own connector, decode computes by itself what it lacks when that is at most `veto_tokens`.
    """
    if decode.config.connector == "nixl":
        return _Pull(context, call, decode)
    if decode.config.connector == "nixl-push":
        return _Push(context, call, prefill, decode)
    return _Tollbridge(context, call, prefill, decode, veto_tokens)


def asks_usage(call: Call, decode: Worker) -> bool:
    """Return whether the router has to ask for a usage chunk: a vLLM stream says only there what it loaded, and its
    lengths."""
    return decode.config.engine == "vllm" and legs.lacks_usage(call)


class _Tollbridge:
    """Our own connector, and the embedded engine."""

    patience_s: float | None = None
    prefill_outlives = False

    def __init__(self, context: Context, call: Call, prefill: Worker, decode: Worker, veto_tokens: int) -> None:
        assert prefill.kv is not None, "the policy chose it for having one"
        self._veto_tokens = veto_tokens
        self._context = context
        self._worker = prefill
        self._kv = prefill.kv  # as signed; the worker's own may change meanwhile
        self._model = call.model or (prefill.models[0].get("id") if prefill.models else None)
        self.transfer_id = legs.new_transfer_id()
        self.headers = legs.headers_for(call)
        for_prefill, for_decode = self._params("prefill", "decode")
        self.prefill = legs.prefill_body(call, legs.transfer(for_prefill))
        self._decode = legs.decode_body(call, legs.transfer(for_decode), ask_usage=asks_usage(call, decode))

    def decode(self) -> bytes:
        return self._decode

    def prefilled(self, answer: bytes) -> str:
        return ""

    def release(self, *, arrived: bool, answered: bool) -> None:
        if arrived:
            return
        is_vllm = self._worker.config.engine == "vllm"
        (params,) = self._params("release" if is_vllm else "prefill")  # signed anew: the others may have expired
        body: dict[str, object] = {"kv_transfer_params": legs.transfer(params)}
        if is_vllm:
            body |= {"model": self._model, "prompt": [0], "max_tokens": 1, "detokenize": False}
        path = "/v1/completions" if is_vllm else RELEASE_PATH
        self._context.releaser.send(self._worker, path, msgspec.json.encode(body), transfer=self.transfer_id)

    def _params(self, *roles: Role) -> tuple[TransferParams, ...]:
        return legs.params_for(
            roles,
            transfer_id=self.transfer_id,
            kv=self._kv,
            expires=self._context.clock.wall() + self._context.limits.params_valid_s,
            secret=self._context.secret,
            veto_tokens=self._veto_tokens,
        )


class _Pull:
    """NixlConnector."""

    patience_s: float | None = None
    prefill_outlives = False

    def __init__(self, context: Context, call: Call, decode: Worker) -> None:
        self._releaser = context.releaser
        self._call = call
        self._worker = decode
        self._handover: Handover | None = None
        self.transfer_id = legs.new_transfer_id()  # for the record; the workers have ids of their own
        self.headers = legs.headers_for(call)
        self.prefill = legs.prefill_body(call, _ASK_PREFILL)

    def decode(self) -> bytes | None:
        if self._handover is None:
            return None
        return legs.decode_body(self._call, self._handover, ask_usage=asks_usage(self._call, self._worker))

    def prefilled(self, answer: bytes) -> str:
        self._handover = legs.handover_of(answer)
        return "" if self._handover else "no_handover"

    def release(self, *, arrived: bool, answered: bool) -> None:
        """A request that decode refuses makes it tell prefill to drop the KV; otherwise that waits for its lease.

        Once decode has begun to answer it has told prefill itself.
        """
        if answered or self._handover is None:
            return
        body = {"model": "tollbridge-release", "prompt": [0], "max_tokens": 1, "kv_transfer_params": self._handover}
        self._releaser.send(self._worker, "/v1/completions", msgspec.json.encode(body), transfer=self.transfer_id)


class _Push:
    """NixlPushConnector: prefill writes into decode's memory once both have seen the request's id.

    The id is new for every attempt and cannot be guessed, so that no left-over of another request ever matches.
    Decode frees the blocks of a request that was aborted while it waited only when the KV has been written.
    """

    def __init__(self, context: Context, call: Call, prefill: Worker, decode: Worker) -> None:
        self.patience_s: float | None = context.limits.push_patience_s
        self._call = call
        self._prefill_worker, self._decode_worker = prefill, decode
        self.transfer_id = legs.new_transfer_id()
        self.headers = legs.headers_for(call) | {"x-request-id": f"{call.id}-{self.transfer_id}"}
        self.prefill = legs.prefill_body(call, _ASK_PREFILL)
        self._told = prefill.listener  # what decode is told before prefill has answered
        self._handover = self._expected(self._told) if self._told else None
        self.prefill_outlives = self._told is not None

    def decode(self) -> bytes | None:
        if self._handover is None:
            return None
        return legs.decode_body(self._call, self._handover, ask_usage=asks_usage(self._call, self._decode_worker))

    def prefilled(self, answer: bytes) -> str:
        handover = legs.handover_of(answer)
        if handover is None:
            return "no_handover"
        listener = {name: handover[name] for name in _LISTENER if name in handover}
        self._prefill_worker.listener = listener
        if self._told is None:
            self._handover = handover
            return ""
        return "" if listener == self._told else "prefill_restarted"

    def release(self, *, arrived: bool, answered: bool) -> None:
        """Nothing can be said: prefill keeps what was not written until its lease ends."""

    def _expected(self, listener: Handover) -> Handover:
        """Return the handover that prefill is going to answer, as far as decode needs it."""
        raw = msgspec.Raw
        return {
            **listener,
            "do_remote_prefill": raw(b"true"),
            "do_remote_decode": raw(b"false"),
            "remote_block_ids": raw(b"null"),
            "remote_request_id": raw(msgspec.json.encode(self.headers["x-request-id"])),  # mandatory, not looked at
        }
