"""Structured output: JSON, regular expressions, choices and grammars, by llguidance (an extra: tollbridge[structured]).

llguidance computes, per token, which tokens of the vocabulary the grammar allows next. A `Matcher` is a request's place
in its grammar; it moves with the request's tokens only, so it knows nothing of preemption or splits.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from tollbridge.engine.base import Structure
from tollbridge.engine.draws import Mask
from tollbridge.errors import RequestError, UnsupportedError

MAX_CACHED = 64  # compiled structures
MAX_TEXT_BYTES = 64 << 10
MAX_MULTIPLE = 20_000  # least common multiple of all "multipleOf", powers of ten aside: a twentieth of a second
MAX_ALTERNATIVES = 16_000  # at one place; so many choices or properties fit the longest text
_ANY_OBJECT = '{"type": "object"}'
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([0-9.eE+-]+)')
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_JSON_DEFAULTS = {"whitespace_flexible": True}  # as vLLM's guidance backend


@dataclass(frozen=True, kw_only=True)
class StructureStatistics:
    """A gauge of now, and counters since start."""

    num_compiled: int  # kept
    compiled_total: int
    started_total: int


class Structures:
    """Compiles structures for one vocabulary, and keeps the last ones. Any thread may call it."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`tokenizer` is transformers' fast one; it is taken apart at the first use, which takes a second."""
        self._fast = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # llguidance's LLTokenizer
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()
        self._compiled_total = 0
        self._started_total = 0

    def check(self, structure: Structure) -> None:
        """Compile and keep `structure`; RequestError when it makes no sense, UnsupportedError without the library."""
        self._template(structure)

    def start(self, structure: Structure) -> StructureMatcher:
        """Return the beginning of `structure`; errors as `check`."""
        self._started_total += 1
        return StructureMatcher(self._template(structure).deep_copy(), self._vocab_size, self._eos_token_ids)

    def statistics(self) -> StructureStatistics:
        return StructureStatistics(
            num_compiled=len(self._compiled),
            compiled_total=self._compiled_total,
            started_total=self._started_total,
        )

    def _template(self, structure: Structure) -> Any:
        with self._lock:
            found = self._compiled.get(structure)
            if found is None:
                found = self._compiled[structure] = self._compile(structure)
                self._compiled_total += 1
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structure)
            return found

    def _compile(self, structure: Structure) -> Any:
        library = _library()
        if len(structure.text) > MAX_TEXT_BYTES:
            raise RequestError(f"The {structure.kind} structure is longer than {MAX_TEXT_BYTES >> 10} KiB: shorten it.")
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        _check_multiples(structure)
        limits = library.LLParserLimits(max_items_in_row=MAX_ALTERNATIVES)
        try:
            matcher = library.LLMatcher(self._vocabulary, _grammar(library, structure), log_level=0, limits=limits)
        except (ValueError, TypeError, KeyError) as error:
            raise _refusal(structure, str(error)) from None
        matcher.compute_bitmask()  # the lexer is built only then, and may find it too large
        if matcher.is_error():
            raise _refusal(structure, matcher.get_error())
        return matcher

    def _read_vocabulary(self) -> Any:
        import llguidance.hf

        size = max(self._vocab_size, len(self._fast))
        return llguidance.hf.from_tokenizer(self._fast, size, eos_token=list(self._eos_token_ids) or None)


class StructureMatcher:
    """Implements `draws.Matcher`."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._ended = False  # by an end-of-text token; whoever ignores that may go on as he likes

    def maybe_allowed(self) -> Mask | None:
        if self._ended:
            return None
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def take(self, token_id: int) -> str:
        if self._ended:
            return ""
        if token_id in self._eos_token_ids:
            self._ended = True
        if self._matcher.consume_token(token_id) or self._ended:
            return ""
        return f"The structure of the output does not go on with token {token_id}: {_first_line(self._matcher)}."


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            "Structured output needs the package llguidance on this worker: install tollbridge[structured].",
            param="response_format",
        ) from None
    return llguidance


def _grammar(library: Any, structure: Structure) -> str:
    """Return llguidance's own description of a structure; ValueError when there is none."""
    make = library.LLMatcher
    if structure.kind == "json":
        return str(make.grammar_from_json_schema(structure.text, defaults=_JSON_DEFAULTS))
    if structure.kind == "json_object":
        return str(make.grammar_from_json_schema(_ANY_OBJECT, defaults=_JSON_DEFAULTS))
    if structure.kind == "regex":
        return str(make.grammar_from_regex(structure.text))
    if structure.kind == "choice":
        choices = json.loads(structure.text)
        if not choices:
            raise ValueError("there is nothing to choose from")
        return str(make.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))))
    if structure.kind == "calls":
        return str(make.grammar_from_lark(structure.text))
    return str(library.grammar_from("grammar", structure.text))


def _check_multiples(structure: Structure) -> None:
    """Refuse numbers that must be multiples of much.

    All else that a structure may ask is bounded by the library; but it visits every remainder, be they a billion. The
    text is searched, not read: a grammar may have schemas in it.
    """
    plain = _ESCAPE.sub(lambda code: chr(int(code[1], 16)), structure.text)
    found = list(filter(None, map(_digits, set(_MULTIPLE.findall(plain)))))
    few = all(len(digits) < 10 for digits in found)
    if not few or math.lcm(*map(int, found)) > MAX_MULTIPLE:
        raise _refusal(structure, f'its "multipleOf" have a least common multiple of more than {MAX_MULTIPLE}')


def _digits(number: str) -> str:
    """Return the digits of a number less the zeros around them; none of what is no number: the library says so.

    Each by itself: a text may have such a one where nobody reads it, beside others that count.
    """
    try:
        digits = Decimal(number).as_tuple().digits
    except InvalidOperation:
        return ""
    return "".join(map(str, digits)).strip("0")


def _refusal(structure: Structure, reason: str) -> RequestError:
    lines = " ".join(reason.split())
    return RequestError(f"The {structure.kind} structure cannot be used: {lines[:300].rstrip('.')}.")


def _first_line(matcher: Any) -> str:
    return str(matcher.get_error() or "it is complete").partition("\n")[0][:200].rstrip(".")
