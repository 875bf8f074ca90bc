"""How KV looks on the wire: as it is in memory (`none`), or in eight bits per number (`fp8`). Pure: bytes to bytes.

fp8 is OCP E4M3 (sign, 4 bits of exponent, 3 of mantissa, no infinity). Every head of every token has scales of its own,
one for K and one for V: the power of two that brings its largest magnitude into (224, 448], as one byte of exponent
(E8M0). With power-of-two scales nothing but the rounding to 4 significant bits is lost, and what a token becomes does
not depend on the tokens that share its frame: chunking, resending and block sizes cannot change what decode computes.

One token of one layer on the wire: `2 * heads` scales, then `2 * heads * head_size` codes, K before V. That is
(head_size + 1) / (2 head_size) of bfloat16 or float16, half of that of float32: 0.508 and 0.254 for heads of 64.

A row that holds an infinity, a NaN or more than 3.2e38 becomes all NaN: it was useless before, and stays visibly so.
Numbers below 2**-120 become zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tollbridge.errors import ConfigError
from tollbridge.transfer.base import Fingerprint

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PASS_NUMBERS = 64 * 1024  # numbers per pass over the data, so that all of its arrays stay in the CPU's cache
_NAN_SCALE = 255  # E8M0's NaN
_SMALLEST_SCALE = 17  # 2**-110: so that numbers far below a scale are still positive in the integers below

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """One way to write the KV of a run of tokens of one layer. Stateless."""

    token_bytes: int  # on the wire, of one token in one layer
    memory_bytes: int  # of the same in memory

    def encode(self, views: Sequence[memoryview]) -> memoryview:
        """Return the tokens in `views` (runs of whole tokens) as they travel."""
        ...

    def decode(self, data: memoryview, views: Sequence[memoryview]) -> None:
        """Write what travelled as `data` into `views`."""
        ...


class Fp8Codec:
    """See the top of the file. For token-major memory of `num_kv_heads` heads of `head_size` numbers of `dtype`."""

    def __init__(self, *, dtype: str, num_kv_heads: int, head_size: int) -> None:
        self.rows = 2 * num_kv_heads  # of one token
        self.head_size = head_size
        self.token_bytes = self.rows * (1 + head_size)
        self._dtype = dtype
        self.memory_bytes = self.rows * head_size * _DTYPE_BYTES[dtype]
        self._pass_tokens = max(1, _PASS_NUMBERS // (self.rows * head_size))

    def encode(self, views: Sequence[memoryview]) -> memoryview:
        num_tokens = sum(map(len, views)) // self.memory_bytes
        out = np.empty((num_tokens, self.token_bytes), dtype=np.uint8)
        done = 0
        for views_of_pass in self._passes(views):
            data = views_of_pass[0] if len(views_of_pass) == 1 else b"".join(views_of_pass)
            numbers = self._truncated(data).reshape(-1, self.rows, self.head_size)
            target = out[done : done + len(numbers)]
            scales, codes = _quantise(numbers)
            target[:, : self.rows] = scales
            target[:, self.rows :] = codes.reshape(len(numbers), -1)
            done += len(numbers)
        wire: memoryview = out.reshape(-1).data
        return wire

    def decode(self, data: memoryview, views: Sequence[memoryview]) -> None:
        source = np.frombuffer(data, dtype=np.uint8).reshape(-1, self.token_bytes)
        done = 0
        for views_of_pass in self._passes(views):
            num_tokens = sum(map(len, views_of_pass)) // self.memory_bytes
            tokens = source[done : done + num_tokens]
            codes = tokens[:, self.rows :].reshape(num_tokens, self.rows, self.head_size)
            numbers = self._rounded(_dequantise(tokens[:, : self.rows], codes)).reshape(-1).view(np.uint8)
            start = 0
            for view in views_of_pass:
                view[:] = numbers.data[start : start + len(view)]
                start += len(view)
            done += num_tokens

    # ── inside ──

    def _passes(self, views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
        """Yield runs of `views`, cut where they are long, that make one pass each."""
        limit, run, size = self._pass_tokens * self.memory_bytes, list[memoryview](), 0
        for view in views:
            for start in range(0, len(view), limit):
                piece = view[start : start + limit]
                if run and size + len(piece) > limit:
                    yield run
                    run, size = [], 0
                run.append(piece)
                size += len(piece)
        if run:
            yield run

    def _truncated(self, data: bytes | memoryview) -> Halves:
        """Return the numbers as bfloat16 bits; of more precise ones the last bit says whether anything was cut off.

        That is rounding to odd, and makes the later rounding to 4 bits the same as if it were done in one step.
        """
        if self._dtype == "bfloat16":
            return np.frombuffer(data, dtype=np.uint16)
        if self._dtype == "float32":
            bits = np.frombuffer(data, dtype=np.uint32)
        else:
            bits = np.frombuffer(data, dtype=np.float16).astype(np.float32).view(np.uint32)
        lost = bits & np.uint32(0xFFFF)
        lost += np.uint32(0xFFFF)  # bit 16 is set where any bit below it was
        lost |= bits
        lost >>= np.uint32(16)
        return lost.astype(np.uint16)

    def _rounded(self, numbers: Floats) -> NDArray[Any]:
        """Return `numbers`, of at most 4 significant bits, in the dtype of the memory."""
        if self._dtype == "float32":
            return numbers
        if self._dtype == "float16":  # rounding to 4 bits may have gone beyond its largest number
            return np.clip(numbers, np.float32(-65504), np.float32(65504), out=numbers).astype(np.float16)
        numbers.view(np.uint32)[...] >>= np.uint32(16)
        return numbers.view(np.uint32).astype(np.uint16)


def maybe_codec(name: str, fingerprint: Fingerprint) -> Codec | None:
    """Return the codec `name` for memory like `fingerprint`, None for "none"; ConfigError when it does not fit."""
    if name == "none":
        return None
    if name != "fp8":
        raise ConfigError(f"transfer.codec {name} is not known: use none or fp8.")
    if fingerprint.dtype not in _DTYPE_BYTES or not fingerprint.layout.startswith("token-major"):
        raise ConfigError(
            f"transfer.codec fp8 needs a token-major cache of {', '.join(_DTYPE_BYTES)}; this one is "
            f"{fingerprint.layout} of {fingerprint.dtype}: use none."
        )
    return Fp8Codec(dtype=fingerprint.dtype, num_kv_heads=fingerprint.num_kv_heads, head_size=fingerprint.head_size)


def _quantise(numbers: Halves) -> tuple[Bytes, Bytes]:
    """Return scales [tokens, rows] and codes [tokens, rows, head_size] of bfloat16 bits [tokens, rows, head_size].

    All in integers: a positive float's bits sort like the float, and a power of two is a number in its exponent field.
    """
    magnitude = numbers & np.uint16(0x7FFF)
    largest = magnitude.max(axis=2)
    # The exponent of a scale is that of the row's largest magnitude, less that of 2**8 (E4M3 ends at 1.75 * 2**8);
    # one more where the mantissa is larger than 1.75.
    scales = ((largest + np.uint16(0x1F)) >> np.uint16(7)).astype(np.int16) - np.int16(8)
    scales = np.clip(scales, _SMALLEST_SCALE, _NAN_SCALE - 1).astype(np.uint8)
    floor = (scales.astype(np.uint16) << np.uint16(7))[:, :, None]
    # What remains of a number is its distance from the scale, in bfloat16 bits: less than 9 octaves above it, or a few
    # below, which the table's offset covers; smaller ones become zero.
    index = np.maximum(magnitude + np.uint16(_BELOW), floor)
    index -= floor
    codes = _CODES.take(index, mode="clip")
    codes |= (numbers >> np.uint16(8)).astype(np.uint8) & np.uint8(0x80)
    is_broken = largest >= np.uint16(0x7F78)  # infinite, NaN, or so large that rounding would make it infinite
    if is_broken.any():
        scales[is_broken] = _NAN_SCALE
        codes[is_broken] = 0x7F
    return scales, codes


_BELOW = 16 << 7  # how far below its scale a number may be and still not be zero, in bfloat16 bits: 2**-16


def _code_table() -> Bytes:
    """Return the code of 2**-16 .. 2**9 times a scale, by bfloat16 bits from there on; half goes to even."""
    bits = np.arange(_BELOW + (10 << 7), dtype=np.uint32) + np.uint32((127 - 16) << 7)
    numbers = (bits << np.uint32(16)).view(np.float32).astype(np.float64)
    numbers[:1] = 0.0
    positive = NUMBERS[:0x7F].astype(np.float64)
    above = np.clip(np.searchsorted(positive, numbers), 1, 0x7E)
    down, up = numbers - positive[above - 1], positive[above] - numbers
    goes_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.where(goes_up, above, above - 1).astype(np.uint8)


def _table() -> Floats:
    """Return the 256 numbers of E4M3."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 0xF, codes & 0x7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[[0x7F, 0xFF]] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


NUMBERS = _table()
_CODES = _code_table()
_SCALES = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)


def _dequantise(scales: Any, codes: Any) -> Floats:
    numbers: Floats = NUMBERS.take(codes)
    numbers *= _SCALES.take(scales)[:, :, None]
    return numbers
