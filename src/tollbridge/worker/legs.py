"""③⑤ The role of a request. It comes with the request (`kv_transfer_params`), never with the server.

The three roles are one path with one word of difference, so the role is data. The engine publishes (prefill) or parks
and loads (decode) by it; here a leg is authenticated and held to its promise:

    prefill ③  computes the prompt, publishes its KV, generates exactly one token; the router discards that token
    decode  ⑤  loads the KV that it lacks, then serves the client
    local      no params: both on this worker
"""

from __future__ import annotations

from collections.abc import Sequence

from tollbridge.errors import AuthenticationError, RequestError
from tollbridge.wire import params as wire
from tollbridge.wire.params import TransferParams
from tollbridge.worker.job import Branch


def transfer_params(value: object, *, secret: bytes | None, now_s: float) -> TransferParams | None:
    """Return the verified params of a leg, None for a local request; AuthenticationError when not to be trusted."""
    if value is None:
        return None
    if not secret:
        raise AuthenticationError(
            "kv_transfer_params are refused because this worker has no cluster secret: set TOLLBRIDGE_SECRET.",
            param="kv_transfer_params",
        )
    params = wire.parse(value)
    if params is not None:
        wire.verify(params, secret, now_s=now_s)
    return params


def check_leg(params: TransferParams | None, branches: Sequence[Branch]) -> None:
    """Raise RequestError when a leg has several prompts, a prefill leg more than its one token, or a release any."""
    if params is None:
        return
    if params.role == "release":
        raise RequestError(f"This worker takes a release at {wire.RELEASE_PATH} only.", param="kv_transfer_params")
    if sum(branch.leader is None for branch in branches) > 1:
        raise RequestError("A leg of a split has one prompt, not several.", param="prompt")
    if params.role == "prefill" and len(branches) > 1:
        raise RequestError("The prefill leg of a split has one choice: send n 1.", param="n")
    num_tokens = branches[0].sampling.max_tokens
    if params.role == "prefill" and num_tokens != 1:
        raise RequestError(
            f"The prefill leg of a split generates one token, not {num_tokens}: send max_tokens 1.",
            param="max_tokens",
        )
