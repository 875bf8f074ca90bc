"""Pin when every core is there; pin nobody, and say so, when one is missing."""

from __future__ import annotations

from tollbridge.cli.placement import place
from tollbridge.config.cluster import ClusterConfig, WorkerConfig


def test_cores_that_exist_are_kept() -> None:
    placement = place(ClusterConfig(), {0, 1, 2})
    assert placement.cluster == ClusterConfig()
    assert placement.note == ""


def test_a_missing_core_unpins_everybody_and_is_told() -> None:
    placement = place(ClusterConfig(), {1})
    assert [worker.cores for worker in placement.cluster.workers] == [None, None]
    assert placement.note.startswith("This machine offers core 1, the workers ask for cores 0, 1: they are not pinned")


def test_workers_without_cores_need_none() -> None:
    cluster = ClusterConfig(workers=[WorkerConfig(name="a")])
    assert place(cluster, {5}).cluster == cluster
