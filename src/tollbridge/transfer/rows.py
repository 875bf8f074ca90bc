"""Payloads between a paged cache in host memory and one run of bytes: whole blocks in one call that releases the GIL.

A loop over blocks in Python takes and gives back the interpreter lock once per block, and waits for it behind an engine
that computes; `numpy.take` and an indexed assignment take it once per frame (docs/LOG.md has what that is worth).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tollbridge.transfer.stage import Span

Bytes: TypeAlias = npt.NDArray[np.uint8]


def gather(blocks: Bytes, span: Span, target: memoryview, *, block_size: int) -> None:
    """Copy the whole blocks of `span` from `blocks` [num_blocks, block_bytes] to `target`, one behind the other."""
    rows = as_bytes(target).reshape(-1, blocks.shape[1])
    np.take(blocks, _numbers(span, block_size), axis=0, out=rows, mode="clip")  # other modes buffer; they are in range


def scatter(source: memoryview, blocks: Bytes, span: Span, *, block_size: int) -> None:
    """Copy `source` to the whole blocks of `span`."""
    blocks[_numbers(span, block_size)] = as_bytes(source).reshape(-1, blocks.shape[1])


def join(views: Sequence[memoryview], target: memoryview) -> None:
    """Copy `views`, one behind the other, to `target`, which they fill."""
    offset = 0
    for view in views:
        np.copyto(as_bytes(target[offset : offset + len(view)]), as_bytes(view))
        offset += len(view)


def part(source: memoryview, views: Sequence[memoryview]) -> None:
    """Copy `source` to `views`, which it fills."""
    offset = 0
    for view in views:
        np.copyto(as_bytes(view), as_bytes(source[offset : offset + len(view)]))
        offset += len(view)


def is_whole(span: Span, block_size: int) -> bool:
    """Return whether `span` begins and ends with a block."""
    return span.first_token % block_size == 0 and span.num_tokens % block_size == 0


def as_bytes(view: memoryview) -> Bytes:
    """Return an array over the bytes of `view`."""
    return np.frombuffer(view, dtype=np.uint8)


def _numbers(span: Span, block_size: int) -> npt.NDArray[np.int64]:
    first, end = span.first_token // block_size, (span.first_token + span.num_tokens) // block_size
    return _array(tuple(span.table[first:end]))


@lru_cache(maxsize=256)  # the same blocks come once per layer
def _array(blocks: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(blocks, dtype=np.int64)
