"""The router runs on uvloop, so its discovery does."""

from __future__ import annotations

from tests.router.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
