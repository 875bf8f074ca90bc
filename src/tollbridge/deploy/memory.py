"""The memory limit of a worker's container, with the terms that it is the sum of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tollbridge.config.deploy import MemoryConfig, RoleConfig
from tollbridge.config.quantity import parse_bytes, show_bytes
from tollbridge.deploy.render.quantity import maybe_quantity
from tollbridge.deploy.render.site import ROLES, Role, Site
from tollbridge.errors import ConfigError
from tollbridge.kv.models import geometry
from tollbridge.plan.inputs import MIB, read_model
from tollbridge.plan.memory import MARGIN, Memory, memory_of

VLLM_PROCESS = 8 * 1024 * MIB  # CUDA's host side, weights on their way, torch's compiler: measure yours
EMBEDDED_PROCESS = 1280 * MIB
VLLM_SHM = 4 * 1024 * MIB
EMBEDDED_SHM = 64 * MIB  # rings of neighbours, docs/cluster-file.md


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Bytes. `limit` is what the container gets, `given` how the cluster file wrote it."""

    role: Role
    terms: tuple[tuple[str, float], ...]
    shm: float
    needed: float
    limit: float
    given: str | None

    def arithmetic(self) -> str:
        """Return "15.4 GB = (process assumed 8.59 GB + shared memory 4.29 GB + both rings 537 MB) x 1.15"."""
        terms = " + ".join(f"{name} {show_bytes(value)}" for name, value in self.terms)
        return f"{show_bytes(self.needed)} = ({terms}) x {1 + MARGIN:g}"

    def sentence(self) -> str:
        given = f"{self.given} as given; the planner's is " if self.given is not None else ""
        return f"{self.role}: memory limit {given}{self.arithmetic()}"


def memory_of_roles(site: Site, *, force: bool = False) -> dict[Role, WorkerMemory]:
    """Return the memory of each role. ConfigError, with the arithmetic, for a hand-set limit that is lower."""
    return {role: _checked(_memory(site, role), force=force) for role in ROLES}


def _checked(memory: WorkerMemory, *, force: bool) -> WorkerMemory:
    if memory.limit < memory.needed and not force:
        raise ConfigError(
            f"deploy.{memory.role}.memory_limit is {memory.given} ({show_bytes(memory.limit)}), but a worker needs "
            f"{memory.arithmetic()}: raise it, leave it out, give measured terms in deploy.memory, or use --force."
        )
    return memory


def _memory(site: Site, role: Role) -> WorkerMemory:
    settings, own = site.role(role), site.deploy.memory
    process, word = _process(site, own)
    cache = site.cluster.engine.kv_cache_mib * MIB if site.deploy.engine == "embedded" else 0
    shm = _shm(site, own)
    bounded = site.deploy.connector == "tollbridge"
    planned = _planned(site, process + cache, shm)
    terms = [(f"process {word}", process), ("shared memory", shm)]
    terms += [("KV cache", float(cache))] if cache else []
    if bounded:
        terms.append(("both rings", planned.ring))
    else:
        terms.append((f"{own.concurrency} requests staged of {show_bytes(planned.request_kv)}", planned.staged))
    needed = planned.needed if bounded else planned.needed_unbounded
    limit = _given(settings, role)
    return WorkerMemory(
        role=role, terms=tuple(terms), shm=shm, needed=needed, limit=limit or needed, given=settings.memory_limit
    )


def _planned(site: Site, process: float, shm: float) -> Memory:
    own = site.deploy.memory
    return memory_of(
        process=process,
        shm=shm,
        ring=parse_bytes(own.ring, "deploy.memory.ring"),
        request_kv=0 if site.deploy.connector == "tollbridge" else _request_kv(site),
        concurrency=own.concurrency,
        staging_copies=own.staging_copies,
        limit=None,
    )


def _request_kv(site: Site) -> int:
    """Return the KV bytes of the longest request: NIXL stages it in host memory on a network without RDMA."""
    config: dict[str, Any] = read_model(site.deploy.memory.model_config or site.cluster.model)
    longest = site.deploy.max_model_len or config.get("max_position_embeddings")
    if not isinstance(longest, int):
        raise ConfigError("deploy.max_model_len is needed: the memory of a worker depends on its longest request.")
    return geometry(config, None).bytes_at(longest)


def _process(site: Site, own: MemoryConfig) -> tuple[float, str]:
    if own.process is not None:
        return parse_bytes(own.process, "deploy.memory.process"), "as given"
    return float(VLLM_PROCESS if site.deploy.engine == "vllm" else EMBEDDED_PROCESS), "assumed"


def _shm(site: Site, own: MemoryConfig) -> float:
    if own.shm is not None:
        return parse_bytes(own.shm, "deploy.memory.shm")
    return float(VLLM_SHM if site.deploy.engine == "vllm" else EMBEDDED_SHM)


def _given(settings: RoleConfig, role: Role) -> float | None:
    if settings.memory_limit is None:
        return None
    found = maybe_quantity(settings.memory_limit)
    if found is None:
        raise ConfigError(f"deploy.{role}.memory_limit is {settings.memory_limit!r}: write a quantity such as 16Gi.")
    return found
