"""`calibration.json`: what `tollbridge probe` measured, for router, planner and simulator."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tollbridge.config.quantity import LARGEST
from tollbridge.errors import ConfigError

VERSION = 1
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]


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
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = (
        None  # the token budget of a step that the fit counted chunks with
    )
    samples: list[Any] = []


class LinkCalibration(msgspec.Struct, frozen=True, kw_only=True):
    goodput_bytes_per_s: Annotated[float, Meta(gt=0, le=LARGEST)]
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


def merge_calibration(
    path: Path,
    *,
    engines: Mapping[str, EngineCalibration] | None = None,
    links: Mapping[str, LinkCalibration] | None = None,
    measured_at: str,
) -> Calibration:
    """Put engines and links into `path`, in place of those with their names, and return the whole.

    Atomic: a reader sees the file of before or of after, and of two writers neither loses what the other put in.
    ConfigError when what is there is no calibration (it is left alone), or when the folder cannot be written.
    """
    try:
        with _alone(path.parent):
            old = read_calibration(path) if path.exists() else Calibration()
            new = Calibration(
                engines={**old.engines, **(engines or {})},
                links={**old.links, **(links or {})},
                measured_at=measured_at,
            )
            _replace(path, msgspec.json.format(msgspec.json.encode(new), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(
            f"The calibration file {path} cannot be written: {error.strerror}.", param="calibration"
        ) from None
    return new


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other writers of this folder out: the file itself is replaced, so it cannot be what is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
