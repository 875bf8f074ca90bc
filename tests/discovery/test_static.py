"""A file that changes, breaks, goes and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.discovery.following import PATIENCE_S, Following, following
from tollbridge.clock import ManualClock, SystemClock
from tollbridge.config.cluster import WorkerConfig
from tollbridge.discovery.static import FileDiscovery, StaticDiscovery
from tollbridge.errors import ConfigError


class Look:
    """One `sleep` of the discovery is one look of the test."""

    def __init__(self) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def sleep(self, _: float) -> None:
        self.asked.set()
        await self.go.wait()
        self.go.clear()

    async def __call__(self, times: int = 2) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(times):
                await self.asked.wait()
                self.asked.clear()
                self.go.set()
            await self.asked.wait()


def write(path: Path, *names: str, port: int = 8000) -> None:
    workers = [{"name": name, "url": f"http://10.0.0.1:{port + at}"} for at, name in enumerate(names)]
    path.write_text(yaml.safe_dump({"workers": workers}))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path / "workers.yaml", "a", "b")
    return tmp_path / "workers.yaml"


async def test_the_list_of_the_cluster_file() -> None:
    discovery = StaticDiscovery([WorkerConfig(name="a"), WorkerConfig(name="b")], ManualClock())
    async with following(discovery) as seen:
        await seen.until({"a": "serving", "b": "serving"})
        assert discovery.statistics().complete


async def test_a_changed_file_is_read_once_it_stands_still(path: Path) -> None:
    look = Look()
    async with following(FileDiscovery(path, SystemClock(), sleep=look.sleep)) as seen:
        await seen.until({"a": "serving", "b": "serving"})
        write(path, "a", "c", "d")
        await look(1)
        assert len(seen.told) == 1
        write(path, "a", "c")
        await look(1)  # it changed again
        assert len(seen.told) == 1
        await look(1)
        assert seen.now == {"a": "serving", "c": "serving"}
        await look(3)
        assert len(seen.told) == 2


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("workers: [", "not valid YAML"),
        ("workers: []", "is empty"),
        ("workers: [{name: a, url: 'http://10.0.0.1:0'}]", "real port"),
        ("workers: [{name: a, urls: x}]", "workers\\[0\\].url"),
        ("model: smollm2", "real port"),  # the default workers have no address
    ],
)
async def test_a_broken_file_changes_nothing_and_says_so(path: Path, content: str, what: str) -> None:
    look = Look()
    async with following(FileDiscovery(path, SystemClock(), sleep=look.sleep)) as seen:
        await seen.until({"a": "serving", "b": "serving"})
        path.write_text(content)
        await look()
        statistics = seen.discovery.statistics()
        assert statistics.error is not None and what.replace("\\", "") in statistics.error
        assert (len(seen.told), statistics.num_endpoints) == (1, 2)
        await look(3)
        assert seen.discovery.statistics().failures_total == 1  # it is read once
        write(path, "c")
        await look()
        assert (seen.now, seen.discovery.statistics().error) == ({"c": "serving"}, None)


async def test_a_file_that_goes_and_comes_back(path: Path) -> None:
    look = Look()
    async with following(FileDiscovery(path, SystemClock(), sleep=look.sleep)) as seen:
        await seen.until({"a": "serving", "b": "serving"})
        content = path.read_text()
        path.unlink()
        await look()
        assert "No such file" in str(seen.discovery.statistics().error)
        path.write_text(content)
        await look()
        assert (seen.now, seen.discovery.statistics().error) == ({"a": "serving", "b": "serving"}, None)


async def test_a_turned_link_is_a_change(path: Path, tmp_path: Path) -> None:
    """As a ConfigMap is mounted."""
    write(tmp_path / "next.yaml", "c", "d")
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    look = Look()
    async with following(FileDiscovery(link, SystemClock(), sleep=look.sleep)) as seen:
        await seen.until({"a": "serving", "b": "serving"})
        (tmp_path / "other").symlink_to(tmp_path / "next.yaml")
        (tmp_path / "other").rename(link)
        await look()
        assert seen.now == {"c": "serving", "d": "serving"}


async def test_a_file_that_is_wrong_at_the_start_is_a_mistake(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path / "none.yaml", ManualClock())
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        await discovery.run(Following(discovery).tell)
