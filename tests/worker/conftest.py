from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.worker.support import Client, fake_serving


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with fake_serving() as made:
        yield made
