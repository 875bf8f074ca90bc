"""An engine report for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tollbridge.config.quantity import show_seconds
from tollbridge.cost.engine import EngineModel
from tollbridge.probe.engine import EngineReport
from tollbridge.probe.fit import DecodeSample, PrefillSample


def render(report: EngineReport) -> RenderableType:
    """Return what `rich` prints: every case beside what the fit says of it, then the fit in a sentence each."""
    notes = [Text(note, style="yellow") for note in report.notes]
    return Group(_table(report), Text(prefill_sentence(report)), Text(decode_sentence(report)), *notes)


def prefill_sentence(report: EngineReport) -> str:
    fit = report.calibration.prefill
    gamma = show_seconds(1000 * fit.gamma_s_per_token2)
    beyond = "" if report.fixed_s is None else f" A request costs {show_seconds(report.fixed_s)} besides."
    return (
        f"Prefill of {report.served.model}: {show_seconds(fit.beta_s_per_token)} a token, {show_seconds(fit.alpha_s)} "
        f"a chunk of {report.calibration.max_num_batched_tokens:,}, and {gamma} a "
        f"token for each 1,000 of context; off by {100 * fit.residual:.1f} %.{beyond}"
    )


def decode_sentence(report: EngineReport) -> str:
    fit = report.calibration.decode
    assert fit is not None
    return (
        f"Decode: {show_seconds(fit.step_s)} a step and {show_seconds(fit.per_decode_s)} for each stream; "
        f"off by {100 * fit.residual:.1f} %."
    )


def _table(report: EngineReport) -> Table:
    calibration = report.calibration
    model = EngineModel(calibration.prefill, calibration.decode)
    budget = calibration.max_num_batched_tokens or 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case")
    for name in ("measured", "lowest", "highest", "fitted"):
        table.add_column(name, justify="right")
    for sample in calibration.samples:
        if isinstance(sample, PrefillSample):
            fitted = model.prefill_s(sample.tokens, sample.context, budget)
            after = f" after {sample.context:,}" if sample.context else ""
            case = f"prefill of {sample.tokens:,}{after}"
        else:
            assert isinstance(sample, DecodeSample)
            fitted, case = model.step_s(sample.batch), f"step of {sample.batch}"
        times = (sample.seconds, sample.low_s, sample.high_s, fitted)
        table.add_row(case, *(show_seconds(value) for value in times))
    return table
