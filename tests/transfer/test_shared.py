"""KV memory that two processes address."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tollbridge.transfer.memory import BufferMemory
from tollbridge.transfer.shared import Layout, SharedBuffer, attach

LAYOUT = Layout(num_layers=2, num_blocks=3, block_size=4, token_bytes=8, granule=2)


def test_who_attaches_sees_the_same_bytes_in_the_same_shape() -> None:
    shared = SharedBuffer(LAYOUT.num_bytes)
    array = np.frombuffer(shared.data, dtype=np.uint8)
    array[:] = np.arange(len(array)) % 251
    mine = BufferMemory(array, num_layers=2, num_blocks=3, block_size=4, token_bytes=8, granule=2)
    theirs = attach(shared.fd, LAYOUT)
    assert Layout.of(mine) == Layout.of(theirs) == LAYOUT
    view = theirs.views(1, [2, 0], 0, 8)[0]
    assert bytes(view) == bytes(mine.views(1, [2, 0], 0, 8)[0])
    view[0] ^= 255
    assert array[(3 + 2) * 4 * 8] == view[0]


def test_the_mapping_outlives_the_file() -> None:
    shared = SharedBuffer(4096)
    fd, data = shared.fd, shared.data
    del shared
    data[0] = 1
    assert data[0] == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
