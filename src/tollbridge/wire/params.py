"""`kv_transfer_params`: how the router tells two workers to share one request's KV, and what they report back.

On a request: `{"kv_transfer_params": {"tollbridge": TransferParams}}`, signed by the router with the cluster secret.
The same field from a client is stripped by the router. A worker that gets no params serves the request locally.
On a response (non-streaming body, or the last SSE chunk): `{"kv_transfer_params": {"tollbridge": WorkerReport}}`,
which the router reads for the decision record and strips before it relays.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

from tollbridge.errors import AuthenticationError, RequestError

VERSION = 1
RELEASE_PATH = "/tollbridge/release"  # POST to a prefill worker: its send will not be fetched
# "release" is for vLLM, whose server has no such path: a request of one token that asks for it on its way in
Role = Literal["prefill", "decode", "release"]
Outcome = Literal["done", "failed", "cancelled"]


class TransferParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One leg of a split request. Both legs carry the same `transfer_id`, `host` and `port`."""

    v: int
    transfer_id: str  # 128 random bits, 32 hex digits
    role: Role
    host: str  # the prefill worker's KV address
    port: int
    tp_size: int = 1
    expires: float  # Unix seconds; refused afterwards
    veto_tokens: int = 0  # decode computes what it lacks when that is no more: quicker than to fetch it
    sig: str = ""  # HMAC-SHA256 over the other fields, hex


class TransferReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one side saw a transfer end. Times in seconds, sizes in bytes."""

    transfer_id: str
    side: Literal["send", "receive"]
    outcome: Outcome
    reason: str = ""  # a short code, e.g. "checksum"; empty when done
    detail: str = ""  # one sentence for a person
    medium: str = ""  # what carried the payloads, e.g. "tcp"; empty when it never got to a connection
    num_tokens: int = 0  # tokens of KV in the accepted range
    payload_bytes: int = 0  # KV bytes on the wire, without headers
    wire_bytes: int = 0  # payload + frame headers + control messages of this transfer, as this side counted them
    num_frames: int = 0
    wait_s: float = 0.0  # open -> first payload byte
    wire_s: float = 0.0  # first payload byte -> last payload byte
    total_s: float = 0.0  # open -> end


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker did for one request; the router's source for the decision record."""

    role: Role | Literal["local"]
    queue_s: float = 0.0  # arrival -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token sampled (for decode: after the KV arrived)
    prompt_tokens: int = 0
    computed_tokens: int = 0  # prompt tokens whose KV this worker computed
    cached_tokens: int = 0  # prompt tokens taken from this worker's own prefix cache
    loaded_tokens: int = 0  # prompt tokens whose KV came over the wire and was accepted
    generated_tokens: int = 0
    transfer: TransferReport | None = None


def sign(params: TransferParams, secret: bytes) -> TransferParams:
    """Return `params` with `sig` set: HMAC-SHA256 of the other fields under the cluster secret."""
    return msgspec.structs.replace(params, sig=_mac(params, secret))


def verify(params: TransferParams, secret: bytes, *, now_s: float) -> None:
    """Raise AuthenticationError unless `params` is signed with `secret` and has not expired."""
    if params.v != VERSION:
        raise RequestError(
            f"kv_transfer_params version {params.v} is not supported: this worker speaks version {VERSION}.",
            param="kv_transfer_params",
        )
    if not hmac.compare_digest(params.sig.encode(), _mac(params, secret).encode()):
        raise AuthenticationError(
            f"kv_transfer_params of transfer {params.transfer_id} carry a wrong signature: "
            "router and worker must share one TOLLBRIDGE_SECRET.",
            param="kv_transfer_params",
        )
    if params.expires < now_s:
        raise AuthenticationError(
            f"kv_transfer_params of transfer {params.transfer_id} expired {now_s - params.expires:.1f} s ago: "
            "check the clocks of router and worker.",
            param="kv_transfer_params",
        )


def parse(value: object) -> TransferParams | None:
    """Return the params inside a request's `kv_transfer_params`, None when absent; RequestError when malformed."""
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"tollbridge"}:
        raise RequestError(
            'kv_transfer_params must be an object with the one key "tollbridge".', param="kv_transfer_params"
        )
    try:
        params = msgspec.convert(value["tollbridge"], TransferParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"kv_transfer_params are malformed: {error}.", param="kv_transfer_params") from None
    if len(params.transfer_id) != 32 or not all(c in "0123456789abcdef" for c in params.transfer_id):
        raise RequestError("kv_transfer_params.transfer_id must be 32 hex digits.", param="kv_transfer_params")
    return params


def _mac(params: TransferParams, secret: bytes) -> str:
    fields: tuple[object, ...] = (
        params.v,
        params.transfer_id,
        params.role,
        params.host,
        params.port,
        params.tp_size,
        params.expires,
    )
    fields = (*fields, params.veto_tokens) if params.veto_tokens else fields
    return hmac.new(secret, msgspec.json.encode(fields), hashlib.sha256).hexdigest()
