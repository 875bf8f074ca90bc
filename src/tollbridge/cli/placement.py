"""Which core each process of a local cluster runs on. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import msgspec

from tollbridge.config.cluster import ClusterConfig


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The cluster with cores that exist, and what a person should know about it."""

    cluster: ClusterConfig
    note: str = ""


def place(cluster: ClusterConfig, available: Set[int]) -> Placement:
    """Keep the workers' cores when this machine has them all; otherwise pin nobody, and say so.

    Pinning half of the workers would be worse than none: the unpinned ones would crowd the pinned ones' cores.
    The router is never pinned: it is nearly idle next to a busy engine, and the kernel finds it room.
    """
    wanted = {core for worker in cluster.workers for core in worker.cores or ()}
    if wanted <= available:
        return Placement(cluster=cluster)
    workers = [msgspec.structs.replace(worker, cores=None) for worker in cluster.workers]
    note = (
        f"This machine offers {_cores(available)}, the workers ask for {_cores(wanted)}: "
        "they are not pinned, and prefill and decode will disturb each other."
    )
    return Placement(cluster=msgspec.structs.replace(cluster, workers=workers), note=note)


def _cores(cores: Set[int]) -> str:
    return f"core{'s' if len(cores) != 1 else ''} {', '.join(map(str, sorted(cores)))}"
