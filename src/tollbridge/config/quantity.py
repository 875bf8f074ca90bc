"""Quantities as people write them: "589.6 MiB/s", "1 GbE", "10 Gb/s", "3584 MiB", "73.2 us"; and back again."""

from __future__ import annotations

import re

from tollbridge.errors import ConfigError

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")
_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# A small b is a bit, a capital B a byte: in rates only, where both are usual.
_RATES = {"bit/s": 1 / 8, "kb/s": 1e3 / 8, "mb/s": 1e6 / 8, "gb/s": 1e9 / 8, "kbit/s": 1e3 / 8, "mbit/s": 1e6 / 8} | {
    "gbit/s": 1e9 / 8,
    "gbps": 1e9 / 8,
    "mbps": 1e6 / 8,
    "gbe": 1e9 / 8,
    "gib/s": 2**30 / 8,
    "mib/s": 2**20 / 8,
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
LARGEST = 1e18  # bytes, seconds, bytes per second: what is beyond is a slip of the keyboard, and sums of it overflow
ETHERNET_SHARE = 0.94  # of the line rate that TCP carries as payload: headers, gaps between frames, acknowledgements


def parse_bytes(text: str | float, param: str) -> float:
    """Return bytes; ConfigError naming `param` when `text` is not a size."""
    number, unit = _split(text, param, "a size such as 3584 MiB")
    factor = _BYTES.get(unit.lower())
    if factor is None:
        raise ConfigError(f"{param} is {text!r}: give a size such as 3584 MiB or 10 GB.", param=param)
    return number * factor


def parse_rate(text: str | float, param: str) -> float:
    """Return bytes per second of "4.6 Gb/s" (bits), "590 MiB/s" (bytes) or a bare number; "1 GbE" is a line rate."""
    number, unit = _split(text, param, "a rate such as 590 MiB/s or 4.6 Gb/s")
    if unit in ("", "B/s"):
        return number
    if re.fullmatch(r"[kMGT]i?B/s", unit):
        return number * _BYTES[unit.removesuffix("/s").lower()]
    factor = _RATES.get(unit.lower()) if unit.lower() != unit or unit.endswith(("s", "e")) else None
    if factor is None:
        raise ConfigError(f"{param} is {text!r}: give a rate such as 590 MiB/s or 4.6 Gb/s.", param=param)
    return number * factor * (ETHERNET_SHARE if unit.lower() == "gbe" else 1.0)


def parse_seconds(text: str | float, param: str) -> float:
    """Return seconds of "73.2 us", "0.138 s" or a bare number."""
    number, unit = _split(text, param, "a time such as 138 ms")
    factor = _SECONDS.get(unit)
    if factor is None:
        raise ConfigError(f"{param} is {text!r}: give a time such as 138 ms.", param=param)
    return number * factor


def show_bytes(number: float) -> str:
    """Return "272 MB", "1.88 GB": decimal, three significant digits."""
    return _show(number, ("B", "kB", "MB", "GB", "TB"), 1000.0)


def show_rate(bytes_per_s: float) -> str:
    """Return bytes and bits per second: "590 MB/s (4.7 Gb/s)"."""
    bits = _show(8 * bytes_per_s, ("b/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"), 1000.0)
    return f"{_show(bytes_per_s, ('B/s', 'kB/s', 'MB/s', 'GB/s', 'TB/s'), 1000.0)} ({bits})"


def show_seconds(seconds: float) -> str:
    """Return "2.41 s", "138 ms", "73.2 us"."""
    if seconds >= 1.0 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _split(text: str | float, param: str, wanted: str) -> tuple[float, str]:
    if isinstance(text, bool):
        raise ConfigError(f"{param} is {text!r}: give {wanted}.", param=param)
    match = _QUANTITY.fullmatch(str(text))
    if match is None or float(match[1]) > LARGEST:
        raise ConfigError(f"{param} is {text!r}: give {wanted}.", param=param)
    return float(match[1]), match[2]


def _show(number: float, units: tuple[str, ...], step: float) -> str:
    at = 0
    while abs(number) >= 0.9995 * step and at < len(units) - 1:
        number, at = number / step, at + 1
    return f"{number:.3g} {units[at]}"
