"""What a plan is made from. One YAML file may say it all; the command line overrides single values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from tollbridge.config.cluster import Count, Fraction, Positive, SloConfig
from tollbridge.config.quantity import LARGEST, parse_bytes, parse_rate, parse_seconds
from tollbridge.errors import ConfigError
from tollbridge.plan.prefill import Sample

MIB = 1 << 20
PromptTokens = Annotated[int, Meta(ge=1, le=10_000_000)]
KV_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8", "int8": "int8"}


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the plan file."""


class PrefillInput(_Section, frozen=True, kw_only=True):
    """Either measured points, or a time per token with an overhead per request."""

    samples: list[Sample] = []
    per_token: str | float | None = None
    overhead: str | float = 0.0


class DecodeInput(_Section, frozen=True, kw_only=True):
    """s(R) = step + per_decode x R."""

    step: str | float
    per_decode: str | float = 0.0


class EngineInput(_Section, frozen=True, kw_only=True):
    prefill: PrefillInput | None = None
    decode: DecodeInput | None = None
    max_num_batched_tokens: Count = 2048
    gpu: str | None = None  # of the catalogue, where nothing was measured


class LinkInput(_Section, frozen=True, kw_only=True):
    """`goodput` is one rate, or the lowest and the highest."""

    name: str | None = None  # None: by its rate
    goodput: str | float | list[str | float]


class WorkloadInput(_Section, frozen=True, kw_only=True):
    prompt_tokens: list[PromptTokens] = msgspec.field(default_factory=lambda: [512, 2048, 8192])
    output_tokens: Count = 128
    concurrency: Count = 8  # requests in flight
    requests_per_s: Positive | None = None  # None: as many as `concurrency` allows
    cached_fraction: Fraction = 0.0  # of a prompt, found in the prefix cache of whoever prefills


class MemoryInput(_Section, frozen=True, kw_only=True):
    process: str | float | None = None  # resident memory of a worker that serves nothing
    shm: str | float = 0.0
    limit: str | float | None = None
    # of a request's KV that a transport without a bound keeps in host memory
    staging_copies: Annotated[float, Meta(ge=0, le=LARGEST)] = 1.0
    ring: str | float = 512 * MIB  # both of our rings together


class PlanInput(_Section, frozen=True, kw_only=True):
    model: Annotated[str, Meta(pattern=r"^[^\x00]*$")] | None = (
        None  # a folder, a config.json, or a hub id that is in the local cache
    )
    kv_dtype: str | None = None
    engine: EngineInput = EngineInput()
    links: list[LinkInput] = []
    workload: WorkloadInput = WorkloadInput()
    slo: SloConfig = SloConfig()
    memory: MemoryInput = MemoryInput()
    gpus: Count = 2
    hop: str | float = 0.005  # seconds: fixed cost of the second leg


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput as the interval that it is, bytes per second."""

    name: str
    low: float
    high: float


def read_plan(path: Path) -> PlanInput:
    """Return the plan file; ConfigError with one sentence when it cannot be read or does not fit."""
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"The plan file {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The plan file {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    try:
        plan = msgspec.convert(raw, PlanInput, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The plan file {path} does not fit: {error}.") from None
    model = Path(plan.model) if plan.model else None
    if model and not model.is_absolute() and (path.parent / model).exists():
        plan = msgspec.structs.replace(plan, model=str(path.parent / model))
    return plan


def check(plan: PlanInput) -> None:
    """Raise ConfigError when a number is out of its range: what flags have put in was not read from a file."""
    try:
        msgspec.convert(msgspec.to_builtins(plan), PlanInput)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The plan does not fit: {error}.", param="plan") from None


def read_model(name: str) -> dict[str, Any]:
    """Return the config.json of a model given as a folder, as the file itself, or as a hub id in the local cache."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        path = _in_cache(name) or path
    try:
        config = msgspec.json.decode(path.read_bytes())
    except OSError:
        raise ConfigError(
            f"The model {name!r} has no config.json here: give a folder, the file, or a model in the local cache.",
            param="model",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.", param="model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object.", param="model")
    return config


def links_of(plan: PlanInput) -> list[Link]:
    """Return the links with their goodput in bytes per second."""
    return [_link(link) for link in plan.links]


def seconds(value: str | float, param: str) -> float:
    return parse_seconds(value, param)


def size(value: str | float, param: str) -> float:
    return parse_bytes(value, param)


def _link(link: LinkInput) -> Link:
    given = link.goodput if isinstance(link.goodput, list) else [link.goodput]
    param = f"links.{link.name}.goodput" if link.name else "goodput"
    rates = [parse_rate(value, param) for value in given]
    if not 1 <= len(rates) <= 2 or min(rates) < 1:
        raise ConfigError(f"{param} must be one rate of 1 B/s or more, or the lowest and the highest.", param="links")
    name = link.name or f"a link of {'–'.join(str(value) for value in given)}"
    return Link(name=name, low=min(rates), high=max(rates))


def _in_cache(name: str) -> Path | None:
    """Return the newest config.json of a hub id in Hugging Face's cache on this machine."""
    if name.count("/") != 1 or ".." in name:
        return None
    folder = Path("~/.cache/huggingface/hub").expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None
