"""Everything together: from inputs to the document that terminal, JSON and HTML show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tollbridge.config.calibration import Calibration, EngineCalibration
from tollbridge.errors import ConfigError
from tollbridge.kv.geometry import KVGeometry
from tollbridge.kv.models import geometry
from tollbridge.plan import catalogue
from tollbridge.plan.inputs import KV_DTYPES, Link, PlanInput, check, links_of, read_model, seconds, size
from tollbridge.plan.memory import Memory, memory_of
from tollbridge.plan.prefill import Prefill, Sample
from tollbridge.plan.ratio import Ratio, ratio_of
from tollbridge.plan.terms import Engine, Load, Setting, Terms, terms_of
from tollbridge.plan.verdict import LengthVerdict, Verdict, conclude, judge

KV_AT = (128, 1024, 8192, 32768)


class Kv(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `bytes_per_token_long` is what one more token adds when every window is full."""

    model_type: str
    dtype: str
    bytes_per_token: int
    bytes_per_token_long: int
    fixed_bytes: int
    windows: tuple[int, ...]
    bytes_at: dict[str, int]


class Length(msgspec.Struct, frozen=True, kw_only=True):
    terms: Terms
    verdict: LengthVerdict


class OnLink(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one link."""

    link: Link
    break_even_bytes_per_s: tuple[float, float]  # over the lengths: from here on the wire keeps up with prefill
    lengths: list[Length]
    verdict: Verdict
    ratio: Ratio | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    kv: Kv
    assumed: list[str]  # what nobody measured, in sentences
    memory: Memory | None = None
    links: list[OnLink] = []


def make_plan(given: PlanInput, calibration: Calibration | None = None) -> Plan:
    """Return the plan; with a model alone only its KV. Raises ConfigError or UnsupportedError for senseless inputs."""
    check(given)
    model = read_model(_required(given.model))
    kv = geometry(model, _dtype(given.kv_dtype))
    lengths = sorted(set(given.workload.prompt_tokens))
    shown = kv_of(kv, [*KV_AT, *lengths])
    assumed: list[str] = []
    engine = _engine(given, model, calibration, assumed)
    links = links_of(given) or _calibrated_links(calibration)
    if engine is None or not links or not lengths:
        return Plan(kv=shown, assumed=assumed, memory=_memory(given, kv, lengths, assumed))
    return Plan(
        kv=shown,
        assumed=assumed,
        memory=_memory(given, kv, lengths, assumed),
        links=[_on_link(given, kv, engine, link, lengths) for link in links],
    )


def kv_of(kv: KVGeometry, at: Sequence[int]) -> Kv:
    """Return the sizes at the lengths `at`."""
    return Kv(
        model_type=kv.model_type,
        dtype=kv.dtype,
        bytes_per_token=kv.bytes_per_token,
        bytes_per_token_long=kv.bytes_per_token_long,
        fixed_bytes=kv.fixed_bytes,
        windows=kv.windows,
        bytes_at={str(tokens): kv.bytes_at(tokens) for tokens in sorted(set(at))},
    )


def _on_link(given: PlanInput, kv: KVGeometry, engine: Engine, link: Link, lengths: Sequence[int]) -> OnLink:
    work = given.workload
    setting = Setting(
        engine=engine,
        link=link,
        load=Load(concurrency=work.concurrency, gpus=given.gpus, output_tokens=work.output_tokens),
        slo=given.slo,
        hop_s=seconds(given.hop, "hop"),
        num_layers=max(kv.num_layers, 1),
    )
    all_terms = [
        terms_of(setting, tokens, kv.bytes_at(tokens), int(work.cached_fraction * tokens)) for tokens in lengths
    ]
    ratio = _ratio(given, setting, all_terms) if given.gpus > 1 else None
    made = [
        Length(terms=terms, verdict=judge(setting, terms, _offered(given, terms, ratio, len(lengths))))
        for terms in all_terms
    ]
    break_even = [terms.break_even_bytes_per_s for terms in all_terms]
    return OnLink(
        link=link,
        break_even_bytes_per_s=(min(break_even), max(break_even)),
        lengths=made,
        verdict=conclude(setting, [(length.terms, length.verdict) for length in made]),
        ratio=ratio,
    )


def _offered(given: PlanInput, terms: Terms, ratio: Ratio | None, num_lengths: int) -> float:
    """Return the bytes/s that requests of one length put on the link of each worker of the smaller role.

    All lengths are equally frequent. 0 without a rate: then `concurrency` bounds what is under way, and no queue grows.
    """
    rate = given.workload.requests_per_s
    if rate is None or ratio is None:
        return 0.0
    return rate / num_lengths * terms.kv_bytes / min(ratio.prefill, ratio.decode)


def _ratio(given: PlanInput, setting: Setting, lengths: Sequence[Terms]) -> Ratio:
    """Return the ratio for the mean of the lengths, at the given rate or the one that the concurrency allows."""
    prefill_s = sum(terms.prefill_s for terms in lengths) / len(lengths)
    kv_bytes = sum(terms.kv_bytes for terms in lengths) // len(lengths)
    work, engine = given.workload, setting.engine
    round_s = prefill_s + work.output_tokens * engine.decode_s(setting.load.streams_per_gpu)
    return ratio_of(
        engine,
        given.slo,
        gpus=given.gpus,
        requests_per_s=work.requests_per_s or work.concurrency / round_s,
        prefill_s=prefill_s,
        output_tokens=work.output_tokens,
        kv_bytes=kv_bytes,
        goodput_bytes_per_s=setting.link.low,
    )


def _memory(given: PlanInput, kv: KVGeometry, lengths: Sequence[int], assumed: list[str]) -> Memory:
    wanted = given.memory
    if wanted.process is None:
        assumed.append("Memory: a worker that serves nothing is taken to need 2.5 GiB; measure yours.")
    return memory_of(
        process=None if wanted.process is None else size(wanted.process, "memory.process"),
        shm=size(wanted.shm, "memory.shm"),
        ring=size(wanted.ring, "memory.ring"),
        request_kv=kv.bytes_at(max(lengths, default=0)),
        concurrency=given.workload.concurrency,
        staging_copies=wanted.staging_copies,
        limit=None if wanted.limit is None else size(wanted.limit, "memory.limit"),
    )


def _engine(
    given: PlanInput, model: dict[str, Any], calibration: Calibration | None, assumed: list[str]
) -> Engine | None:
    """Return the engine: measured in the plan file, else calibrated, else from the catalogue; None when nothing is."""
    wanted = given.engine
    step_s = per_decode_s = None
    if wanted.decode is not None:
        step_s = seconds(wanted.decode.step, "engine.decode.step")
        per_decode_s = seconds(wanted.decode.per_decode, "engine.decode.per_decode")
    samples = _samples(wanted.prefill) if wanted.prefill else None
    uncertainty = 0.0
    fitted = next(iter(calibration.engines.values()), None) if calibration else None
    if fitted is not None:
        samples = samples or _sampled(fitted, fitted.max_num_batched_tokens or wanted.max_num_batched_tokens)
        if step_s is None and fitted.decode is not None:
            step_s, per_decode_s = fitted.decode.step_s, fitted.decode.per_decode_s
    if wanted.gpu and (samples is None or step_s is None):
        guess = catalogue.guess(wanted.gpu, model)
        uncertainty = guess.uncertainty
        assumed.append(
            f"Speed of {wanted.gpu}: from its data sheet, within {100 * uncertainty:.0f} % either way; measure with "
            "`tollbridge probe engine`."
        )
        samples = samples or [Sample(tokens=1, seconds=guess.per_token_s)]
        step_s = guess.step_s if step_s is None else step_s
    if samples is None:
        return None
    if step_s is None:
        assumed.append("Decode: nobody measured a step; it is taken to last as long as 32 tokens of prefill.")
        step_s = 32 * Prefill(samples).per_token_s(512)
    return Engine(
        prefill=Prefill(samples),
        step_s=step_s,
        per_decode_s=per_decode_s or 0.0,
        budget=wanted.max_num_batched_tokens,
        uncertainty=uncertainty,
    )


def _samples(prefill: Any) -> list[Sample] | None:
    if prefill.samples:
        return list(prefill.samples)
    if prefill.per_token is None:
        return None
    per_token = seconds(prefill.per_token, "engine.prefill.per_token")
    overhead = seconds(prefill.overhead, "engine.prefill.overhead")
    return [Sample(tokens=tokens, seconds=overhead + per_token * tokens) for tokens in (1, 1 << 20)]


def _sampled(fitted: EngineCalibration, budget: int) -> list[Sample]:
    """Return points of a calibration's fit: T(m) = alpha per chunk of `budget` + beta m + gamma m^2 / 2."""
    fit = fitted.prefill
    points = []
    for tokens in (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        chunks = -(-tokens // budget)
        time_s = chunks * fit.alpha_s + tokens * (fit.beta_s_per_token + fit.gamma_s_per_token2 * tokens / 2)
        points.append(Sample(tokens=tokens, seconds=time_s))
    return points


def _calibrated_links(calibration: Calibration | None) -> list[Link]:
    links = calibration.links.items() if calibration else ()
    return [Link(name=name, low=link.goodput_bytes_per_s, high=link.goodput_bytes_per_s) for name, link in links]


def _required(model: str | None) -> str:
    if not model:
        raise ConfigError("A plan needs a model: give --model with a folder or a config.json.", param="model")
    return model


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    dtype = KV_DTYPES.get(name) or (name if name in KV_DTYPES.values() else None)
    if dtype is None:
        raise ConfigError(f"--kv-dtype {name!r} is unknown: use {', '.join(KV_DTYPES)}.", param="kv_dtype")
    return dtype
