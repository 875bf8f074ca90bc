"""Bytes as Kubernetes writes them, and back."""

from __future__ import annotations

import math
import re

_QUANTITY = re.compile(r"([+-]?[0-9]*\.?[0-9]+)(m|[KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?")
_BINARY = {unit: 2 ** (10 * power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)}
_DECIMAL = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def quantity(num_bytes: float) -> str:
    """Return `num_bytes`, rounded up to whole MiB: "14720Mi"."""
    return f"{math.ceil(num_bytes / 2**20)}Mi"


def maybe_quantity(text: object) -> float | None:
    """Return the number that a Kubernetes quantity stands for; None when it is none, such as "16GB"."""
    match = _QUANTITY.fullmatch(str(text)) if not isinstance(text, bool) else None
    if match is None:
        return None
    number, unit = float(match[1]), match[2] or ""
    if unit[:1] in ("e", "E") and len(unit) > 1 and unit != "Ei":
        return float(f"{match[1]}{unit}")
    return number * (_BINARY.get(unit) or _DECIMAL[unit])
