"""`calibration.json`: what `tollbridge probe` measured, for router, planner and simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tollbridge.errors import ConfigError

VERSION = 1
NonNegative = Annotated[float, Meta(ge=0)]


class PrefillFit(msgspec.Struct, frozen=True, kw_only=True):
    """T(m, ctx) = chunks x alpha + beta m + gamma m (ctx + m/2). `residual` is a relative standard deviation."""

    alpha_s: NonNegative
    beta_s_per_token: NonNegative
    gamma_s_per_token2: NonNegative = 0.0
    residual: NonNegative = 0.1


class DecodeFit(msgspec.Struct, frozen=True, kw_only=True):
    """s(R, 0) = step + per_decode x R."""

    step_s: NonNegative
    per_decode_s: NonNegative = 0.0
    residual: NonNegative = 0.1


class EngineCalibration(msgspec.Struct, frozen=True, kw_only=True):
    prefill: PrefillFit
    decode: DecodeFit | None = None
    samples: list[Any] = []


class LinkCalibration(msgspec.Struct, frozen=True, kw_only=True):
    goodput_bytes_per_s: Annotated[float, Meta(gt=0)]
    raw_bytes_per_s: NonNegative | None = None
    rtt_s: NonNegative | None = None
    streams: int | None = None
    samples: list[Any] = []


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Engines by worker name, links by "from>to" of hosts."""

    version: int = VERSION
    engines: dict[str, EngineCalibration] = {}
    links: dict[str, LinkCalibration] = {}
    measured_at: Any = None


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in `path`; ConfigError with what to do when it is missing or malformed."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        raise ConfigError(
            f"The calibration file {path} does not exist: run `tollbridge probe`, or leave `calibration` out.",
            param="calibration",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"The calibration file {path} cannot be read: {error.strerror}.", param="calibration"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The calibration file {path} is malformed: {error}.", param="calibration") from None
    if calibration.version != VERSION:
        raise ConfigError(
            f"The calibration file {path} has version {calibration.version}, but this is version {VERSION}: "
            "run `tollbridge probe` again.",
            param="calibration",
        )
    return calibration
