"""Is the network slow, or the transport? And what of a link report goes into a calibration."""

from __future__ import annotations

from collections.abc import Callable

from tollbridge.config.calibration import LinkCalibration
from tollbridge.config.quantity import show_rate, show_seconds
from tollbridge.probe.link import LinkReport, LinkSample, Way
from tollbridge.transfer.memory import HostMemory

_KEEPS_UP = 0.9  # of what plain sockets carry
_FULL = 0.8  # of what the NIC says; TCP's headers take 6 % of it
_ONE_IS_ENOUGH = 0.8  # of what several connections carry together

Fits = Callable[[LinkSample], bool]


def calibrated(report: LinkReport, way: Way) -> LinkCalibration | None:
    """Return one direction for the calibration file, None when our transfer was not measured.

    Goodput is that of as many streams as workers use, on an idle link.
    """
    transfer = _chosen(report, way)
    if transfer is None:
        return None
    raw = best(report, lambda s: s.way == way and s.how == "raw" and not s.loaded)
    return LinkCalibration(
        goodput_bytes_per_s=transfer.bytes_per_s,
        raw_bytes_per_s=raw.bytes_per_s if raw else None,
        rtt_s=report.rtt_s,
        streams=transfer.streams,
        samples=[sample for sample in report.samples if sample.way == way],
    )


def verdict(report: LinkReport, way: Way, source: str, target: str) -> str:
    """Return one sentence that tells "the network is slow" and "the transport is slow" apart."""
    path = f"{source} to {target}"
    raw = best(report, lambda s: s.way == way and s.how == "raw" and not s.loaded)
    transfer = _chosen(report, way)
    assert raw is not None
    if transfer is None:
        return f"{path}: plain sockets carry {show_rate(raw.bytes_per_s)}; our transfer did not get through."
    share = transfer.bytes_per_s / raw.bytes_per_s
    both = f"our transfer moves {show_rate(transfer.bytes_per_s)}, plain sockets {show_rate(raw.bytes_per_s)}"
    if share < _KEEPS_UP:
        return f"{path}: the transport is slow: {both} ({100 * share:.0f} %): look for a busy core on either host."
    return f"{path}: {_network(report, raw)}: {both}{_alone(report, way, raw)}."


def _network(report: LinkReport, raw: LinkSample) -> str:
    line = report.line_bytes_per_s
    if line is None:
        return "the network is the limit, the transport keeps up with it"
    if raw.bytes_per_s < _FULL * line:
        return f"the network is slow, not the transport (the NIC here says {show_rate(line)})"
    return "the link is full, and neither is slow"


def _alone(report: LinkReport, way: Way, raw: LinkSample) -> str:
    one = best(report, lambda s: s.way == way and s.how == "raw" and not s.loaded and s.streams == 1)
    if one is None or one.bytes_per_s >= _ONE_IS_ENOUGH * raw.bytes_per_s:
        return ""
    return f" with {raw.streams} connections and {show_rate(one.bytes_per_s)} with one"


def best(report: LinkReport, fits: Fits) -> LinkSample | None:
    return max((sample for sample in report.samples if fits(sample)), key=lambda s: s.bytes_per_s, default=None)


def rtt_sentence(report: LinkReport) -> str:
    loaded = report.rtt_loaded_s
    return (
        f"Round trip {show_seconds(report.rtt_s)} idle; beside a flow {show_seconds(loaded['up'])} up and "
        f"{show_seconds(loaded['down'])} down."
    )


def _chosen(report: LinkReport, way: Way) -> LinkSample | None:
    """Return our transfer with the streams that workers use, or the most that were measured."""
    idle = [s for s in report.samples if s.way == way and s.how == "transfer" and not s.loaded]
    usual = [sample for sample in idle if sample.streams == HostMemory.num_streams]
    return (usual or sorted(idle, key=lambda sample: sample.streams))[-1] if idle else None
