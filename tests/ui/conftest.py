"""The dashboard is served by the router, so its tests run on uvloop as the router's do."""

from tests.router.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
