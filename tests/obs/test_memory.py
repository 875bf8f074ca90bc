"""What the kernel says of this process's memory."""

from __future__ import annotations

import psutil
import pytest

from tollbridge.obs import memory


def test_it_is_what_the_kernel_says() -> None:
    assert memory.rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert memory.rss_bytes() < memory.limit_bytes() <= psutil.virtual_memory().total
