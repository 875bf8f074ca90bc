"""What each worker is sent: bodies, headers, and the `kv_transfer_params` of a split."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from tollbridge.router.fleet import Handover
from tollbridge.router.ingress import GENERATE, Body, Call
from tollbridge.wire.params import VERSION, Role, TransferParams, sign

_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
# What makes no sense for one token that nobody reads.
_STREAM_ONLY = ("stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs", "echo")


def new_transfer_id() -> str:
    """Return 128 random bits as hex: whoever knows it may fetch the KV, so it must not be guessable."""
    return secrets.token_hex(16)


def params_for(
    roles: tuple[Role, ...],
    *,
    transfer_id: str,
    kv: tuple[str, int],
    expires: float,
    secret: bytes,
    veto_tokens: int = 0,
) -> tuple[TransferParams, ...]:
    """Return one signed TransferParams per role, equal in all but the role."""
    host, port = kv
    return tuple(
        sign(
            TransferParams(
                v=VERSION,
                transfer_id=transfer_id,
                role=role,
                host=host,
                port=port,
                expires=expires,
                veto_tokens=veto_tokens,
            ),
            secret,
        )
        for role in roles
    )


def local_body(call: Call, *, ask_usage: bool = False) -> bytes:
    """Return the client's own body, and a usage chunk asked for if so wanted."""
    return msgspec.json.encode({**call.body, **_asking(call)} if ask_usage else call.body)


def decode_body(call: Call, params: Mapping[str, object], *, ask_usage: bool = False) -> bytes:
    """Return the client's body with decode's part of the transfer, and a usage chunk asked for if so wanted."""
    asking = _asking(call) if ask_usage else {}
    return msgspec.json.encode({**call.body, **asking, "kv_transfer_params": params})


def _asking(call: Call) -> dict[str, object]:
    """Return the option that asks for a usage chunk; vLLM ignores `continuous_usage_stats` without it, and so do we."""
    options = _stream_options(call) or {}
    quiet = {"continuous_usage_stats": False} if "continuous_usage_stats" in options else {}
    return {"stream_options": {**options, "include_usage": True, **quiet}}


def lacks_usage(call: Call) -> bool:
    """Return whether the answer is a stream for which the client did not ask a usage chunk.

    An option of another kind is none to build upon: the worker refuses it.
    """
    options = _stream_options(call)
    return call.stream and options is not None and options.get("include_usage") in (None, False)


def _stream_options(call: Call) -> dict[str, object] | None:
    """Return the client's options, none given being empty ones; None when they are no object."""
    try:
        options = msgspec.json.decode(call.body.get("stream_options", b"null"))
    except msgspec.DecodeError:
        return None
    return {} if options is None else options if isinstance(options, dict) else None


def prefill_body(call: Call, params: Mapping[str, object]) -> bytes:
    """Return the body of leg 1: the same prompt and sampling, one token, not streamed."""
    body: dict[str, object] = {name: value for name, value in call.body.items() if name not in _STREAM_ONLY}
    sampling: Body = {name: value for name, value in call.sampling.items() if name not in _STREAM_ONLY}
    one = {name: _ONE for name in ("max_completion_tokens", "n", "best_of") if name in sampling} | {"max_tokens": _ONE}
    body |= {"sampling_params": sampling | one} if call.path == GENERATE else one
    return msgspec.json.encode({**body, "stream": _FALSE, "kv_transfer_params": params})


def headers_for(call: Call) -> dict[str, str]:
    """Return the headers of every leg; nothing else of the client's reaches a worker."""
    return {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "x-request-id": call.id,
        "x-tollbridge-report": "1",
        **call.trace,
    }


def transfer(params: TransferParams) -> dict[str, TransferParams]:
    """Return our connector's `kv_transfer_params`."""
    return {"tollbridge": params}


def handover_of(answer: bytes) -> Handover | None:
    """Return the `kv_transfer_params` that prefill answered with, to be relayed as they are; None without any.

    But for one: decode would report prefill's cached tokens as its own, and hide whether it loaded any KV.
    """
    try:
        params = msgspec.json.decode(answer, type=_Answer).kv_transfer_params or {}
    except msgspec.DecodeError:
        return None
    params.pop("remote_prefill_cached_tokens", None)
    return params or None


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: Handover | None = None
