"""`kv_connector_extra_config` of vLLM's `--kv-transfer-config`, checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from tollbridge.config.cluster import SecretConfig
from tollbridge.config.secret import require_secret
from tollbridge.errors import ConfigError
from tollbridge.obs.trace import Trace
from tollbridge.transfer.channel import TlsFiles
from tollbridge.transfer.options import AUTO, TransferOptions

DEFAULT_PORT = 7801
MAX_PORT = 65535

_OURS = {
    "kv_host": str,
    "kv_port": int,
    "secret_env": str,
    "allow_untested_vllm": bool,
    "max_pinned_fraction": float,
    "tls": TlsFiles,
    "trace": str,
}
_NOT_SETTABLE = {"secret", "bind_host", "bind_port", "tls"}  # they have names of their own here
_TRANSFER = {option.name for option in fields(TransferOptions)} - _NOT_SETTABLE


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings:
    """Where this worker listens for KV, the cluster secret, and the options of the transfer by name."""

    kv_host: str
    kv_port: int  # of tensor parallel rank 0; rank r listens on kv_port + r
    secret: bytes = field(repr=False)
    allow_untested_vllm: bool
    max_pinned_fraction: float  # of the blocks, for sends whose request has ended and that decode has not fetched
    tls: TlsFiles | None
    trace: str | None  # the folder of traces, None: none
    transfer: Mapping[str, Any]

    def options(self, tp_rank: int) -> TransferOptions:
        """Return the transfer options of one worker process."""
        port = self.kv_port + tp_rank if self.kv_port else 0
        return TransferOptions(
            **{"media": AUTO, **self.transfer},
            secret=self.secret,
            tls=self.tls,
            bind_host=self.kv_host,
            bind_port=port,
        )

    def maybe_trace(self, name: str) -> Trace | None:
        """Return a trace of this process, None when none is asked for."""
        return Trace(self.trace, name) if self.trace is not None else None


def read_settings(extra: Mapping[str, Any], environ: Mapping[str, str]) -> ConnectorSettings:
    """Return the settings in `extra`; ConfigError names the first mistake, and the closest key to an unknown one."""
    for key, value in extra.items():
        _check(key, value)
    settings = ConnectorSettings(
        kv_host=extra.get("kv_host", "127.0.0.1"),
        kv_port=extra.get("kv_port", DEFAULT_PORT),
        secret=require_secret(SecretConfig(env=extra.get("secret_env", "TOLLBRIDGE_SECRET")), environ),
        allow_untested_vllm=extra.get("allow_untested_vllm", False),
        max_pinned_fraction=float(extra.get("max_pinned_fraction", 0.5)),
        tls=msgspec.convert(extra["tls"], TlsFiles) if "tls" in extra else None,
        trace=extra.get("trace"),
        transfer={key: value for key, value in extra.items() if key in _TRANSFER},
    )
    if not 0 <= settings.kv_port <= MAX_PORT:
        raise ConfigError(f"kv_connector_extra_config.kv_port is {settings.kv_port}: it must be within 0..{MAX_PORT}.")
    if not 0 < settings.max_pinned_fraction <= 1:
        raise ConfigError(
            f"kv_connector_extra_config.max_pinned_fraction is {settings.max_pinned_fraction}: "
            "it must be above 0 and at most 1."
        )
    settings.options(tp_rank=0)
    return settings


def _check(key: str, value: Any) -> None:
    known = sorted(_OURS.keys() | _TRANSFER)
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}" if close else f"known are {', '.join(sorted(_OURS))}"
        raise ConfigError(f"kv_connector_extra_config has no key {key!r}: {hint}?")
    try:
        msgspec.convert(value, _OURS.get(key, Any))
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config.{key} is {value!r}: {error}.") from None
