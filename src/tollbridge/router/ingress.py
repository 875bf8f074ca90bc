"""① What a client may send: shape, size, identity. Everything that crosses a trust boundary is checked or dropped here.

The body is decoded one level deep: values stay the client's own bytes (`msgspec.Raw`), so that what a worker
receives is what the client wrote, and a long list of token ids is never turned into Python integers.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web

from tollbridge.config.cluster import RouterConfig
from tollbridge.errors import RequestError
from tollbridge.obs.tracing import trace_of
from tollbridge.policy import registry
from tollbridge.wire.bodies import Bodies

OVERRIDE_HEADER = "x-tollbridge-policy"
PRIORITY_HEADER = "x-tollbridge-priority"  # lower is served earlier, among the requests of one tenant
TIMEOUT_HEADER = "x-request-timeout"  # seconds
MAX_PRIORITY = 100
MAX_TIMEOUT_S = 86_400.0
SESSION_HEADER = "x-session-id"
GENERATE = "/inference/v1/generate"  # vLLM's: token ids in, token ids out
PROMPT_FIELD = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", GENERATE: "token_ids"}

Body = dict[str, msgspec.Raw]

_MAX_SESSION = 256  # characters
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MANY_BRACKETS = 400  # below the depth at which the decoder gives up
_SPARE_FRAMES = 200
_BODY = msgspec.json.Decoder(Body)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One accepted request."""

    id: str
    path: str
    body: Body  # without kv_transfer_params
    body_bytes: int
    model: str | None
    stream: bool
    override: str | None
    trace: dict[str, str]
    priority: int = 0
    timeout_s: float | None = None
    session: str | None = None  # requests that belong together, by the client's word

    @property
    def sampling(self) -> Body:
        """The fields that say how to draw tokens; empty where they cannot be read, which the worker refuses."""
        return self.body if self.path != GENERATE else maybe_object(self.body.get("sampling_params")) or {}


class _Head(msgspec.Struct, frozen=True):
    """The fields the router itself reads; a wrong type is the client's error."""

    model: str | None = None
    stream: bool | None = None


async def read(request: web.Request, config: RouterConfig, request_id: str, bodies: Bodies) -> Call:
    """Return the accepted call; RequestError (400) or what `Bodies.read` raises otherwise."""
    override = override_of(request, config)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise RequestError(f"Content-Encoding {encoding[:40]!r} is not supported: send plain JSON.")
    priority, timeout_s = _priority(request), _timeout_s(request, config)
    raw = await bodies.read(request)
    body = parse_body(raw)
    head = _head(raw)
    prompt = PROMPT_FIELD.get(request.path)
    if prompt is not None and prompt not in body:
        raise RequestError(f"The field {prompt!r} is missing from the request body.", param=prompt)
    return Call(
        id=request_id,
        path=request.path,
        body=body,
        body_bytes=len(raw),
        model=head.model,
        stream=bool(head.stream),
        override=override,
        trace=trace_of(request.headers),  # the only headers of the client that a worker sees
        priority=priority,
        timeout_s=timeout_s,
        session=_session(request, body),
    )


def _session(request: web.Request, body: Body) -> str | None:
    """Return the client's name of a session: its header, or the fields that OpenAI has for it."""
    given = request.headers.get(SESSION_HEADER)
    if given:
        return given[:_MAX_SESSION]
    for name in ("prompt_cache_key", "user"):
        value = bytes(body.get(name, b""))
        if value.startswith(b'"') and len(value) > 2:
            return value.decode(errors="replace")[1:-1][:_MAX_SESSION]
    return None


def _priority(request: web.Request) -> int:
    given = request.headers.get(PRIORITY_HEADER, "0")
    if not re.fullmatch(r"-?[0-9]{1,3}", given) or abs(int(given)) > MAX_PRIORITY:
        raise RequestError(
            f"{PRIORITY_HEADER} must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}.", param=PRIORITY_HEADER
        )
    return int(given)


def _timeout_s(request: web.Request, config: RouterConfig) -> float | None:
    """Return the shorter of the client's and the configured deadline."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return config.request_timeout_s
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", given) or not 0 < float(given) <= MAX_TIMEOUT_S:
        raise RequestError(
            f"{TIMEOUT_HEADER} must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}.", param=TIMEOUT_HEADER
        )
    return min(float(given), config.request_timeout_s or MAX_TIMEOUT_S)


def parse_body(raw: bytes) -> Body:
    """Return the body's top-level fields less `kv_transfer_params`; RequestError when it is not a JSON object."""
    may_be_deep = raw.count(b"[") + raw.count(b"{") > _MANY_BRACKETS
    try:
        body = _decode(raw, _SPARE_FRAMES if may_be_deep else 0)
    except msgspec.ValidationError:
        raise RequestError("The request body must be a JSON object.") from None
    except RecursionError:
        raise RequestError("The JSON of the request is nested too deeply: flatten it.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The request body is not valid JSON: {error}.") from None
    body.pop("kv_transfer_params", None)
    _refuse_smuggled_params(body)
    return body


def _decode(raw: bytes, num_frames: int) -> Body:
    """Decode below so many frames of our own: what can be read there, nobody later fails to read for its depth."""
    return _decode(raw, num_frames - 1) if num_frames else _BODY.decode(raw)


def maybe_object(raw: msgspec.Raw | None) -> Body | None:
    """Return the fields of a JSON object, None when it is something else."""
    try:
        return _BODY.decode(raw) if raw is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def request_id_of(request: web.Request) -> str:
    """Return the client's x-request-id when it is sane (1 to 128 printable ASCII characters), else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def override_of(request: web.Request, config: RouterConfig) -> str | None:
    """Return the policy that the client asks for by header; RequestError when it may not, or the name is unknown.

    "loopback" looks at the TCP peer: behind a proxy on the same machine every client is a loopback peer.
    """
    name = request.headers.get(OVERRIDE_HEADER)
    if name is None:
        return None
    if not _may_override(config.allow_override, request):
        raise RequestError(
            f"This router takes {OVERRIDE_HEADER} from {_WHO[config.allow_override]} (router.allow_override is "
            f"{config.allow_override!r}): send the request without it.",
            param=OVERRIDE_HEADER,
        )
    if name not in registry.POLICIES:
        known = ", ".join(registry.POLICIES)
        raise RequestError(f"{OVERRIDE_HEADER} {name[:40]!r} is unknown: choose one of {known}.", param=OVERRIDE_HEADER)
    return name


_WHO = {"never": "nobody", "loopback": "loopback peers only", "always": "everybody"}


def _may_override(allow: Literal["never", "loopback", "always"], request: web.Request) -> bool:
    if allow != "loopback":
        return allow == "always"
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return isinstance(peer, tuple) and is_loopback(str(peer[0]))


def is_loopback(host: str) -> bool:
    """Return whether `host`, an address literal, is this machine's own."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _head(raw: bytes) -> _Head:
    try:
        return msgspec.json.decode(raw, type=_Head)
    except msgspec.ValidationError as error:
        raise RequestError(f"The request body has a field of a wrong type: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # in a value, which `parse_body` does not look into
        raise RequestError(f"The request body is not valid JSON: {error}.") from None


def _refuse_smuggled_params(body: Body) -> None:
    """vLLM hands `vllm_xargs`, and `extra_args` of `sampling_params`, to its connector as it hands over
    `kv_transfer_params`: no way in for a client.
    """
    _refuse_params_in(body.get("vllm_xargs"), "vllm_xargs")
    sampling = _maybe_fields(body.get("sampling_params"), "sampling_params") or {}
    _refuse_params_in(sampling.get("extra_args"), "sampling_params.extra_args")


def _refuse_params_in(extra: msgspec.Raw | None, name: str) -> None:
    if "kv_transfer_params" in (_maybe_fields(extra, name) or {}):
        raise RequestError(f"{name} must not carry kv_transfer_params: the router sets them.", param=name)


def _maybe_fields(raw: msgspec.Raw | None, name: str) -> Body | None:
    """Return the fields of `raw`, None when it is no object, so that nothing can be in it; else RequestError."""
    if raw is None:
        return None
    try:
        return _BODY.decode(raw)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{name} is not valid JSON: {error}.", param=name) from None
