"""CEL, in which CRDs state rules that a schema cannot. `pip install 'tollbridge[deploy]'` brings an evaluator."""

from __future__ import annotations

import importlib
from collections.abc import Callable

Evaluate = Callable[[str, object], bool | None]  # rule and `self` -> whether it holds, None: not known


def unknown(rule: str, value: object) -> bool | None:
    """Evaluate nothing."""
    return None


def evaluator() -> Evaluate:
    """Return the evaluator that is installed, else one that knows nothing."""
    try:
        library = importlib.import_module("cel")
    except ImportError:
        return unknown

    def evaluate(rule: str, value: object) -> bool | None:
        try:
            return bool(library.evaluate(rule, {"self": value}))
        except (ValueError, TypeError, RuntimeError, KeyError):
            return None  # a function that this evaluator lacks

    return evaluate
