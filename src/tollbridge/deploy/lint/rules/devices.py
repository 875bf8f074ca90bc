"""GPUs, memory, disks and rights of a vLLM server's pod."""

from __future__ import annotations

from collections.abc import Iterator

from tollbridge.config.quantity import show_bytes
from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.engines import Engine, literal
from tollbridge.deploy.lint.findings import Finding, Manifest, at, items
from tollbridge.deploy.lint.pods import PodView
from tollbridge.deploy.render.quantity import maybe_quantity
from tollbridge.plan.memory import DEFAULT_PROCESS_BYTES, memory_of

_GPU = ("nvidia.com/", "amd.com/gpu", "gpu.intel.com/", "habana.ai/")
_RING = 512 * 2**20
SHM = "/dev/shm"  # noqa: S108 (of the container)
TMP = "/tmp"  # noqa: S108 (the same)


def rules(case: Case) -> Iterator[Finding]:
    for engine in case.engines:
        yield from _mechanism(engine)
        yield from _count(case, engine)
        yield from _memory(engine)
        yield from _shared_memory(engine)
        yield from _rights(engine)
        yield from _image(engine)
        yield from _model(engine)
    yield from _mixed(case)
    yield from _volumes(case)


def gpus(container: Manifest) -> int:
    """Return how many devices of a device plugin a container has."""
    limits = at(container, ["resources", "limits"]) or {}
    counted = [maybe_quantity(value) for name, value in limits.items() if name.startswith(_GPU)]
    return int(sum(each or 0 for each in counted))


def _claims(container: Manifest) -> list[Manifest]:
    return items(container.get("resources"), "claims")


def _mechanism(engine: Engine) -> Iterator[Finding]:
    plugin, claims = gpus(engine.container), _claims(engine.container)
    where = f"{engine.path}.resources"
    if plugin and claims and _is_gpu_claim(engine.pod, claims):
        yield engine.pod.finding(
            "two-mechanisms",
            where,
            what="GPUs are asked for twice: nvidia.com/gpu and a resource claim",
            why="the pod takes two sets of GPUs, or none: device plugin and DRA driver do not know of each other",
            mend="keep one of them, the same on all pods of a node pool",
        )
    other = any("/" in name for name in at(engine.container, ["resources", "limits"]) or {})  # of another vendor
    if not plugin and not other and not claims and not engine.is_cpu and not _by_environment(engine):
        yield engine.pod.finding(
            "no-gpu",
            where,
            what="the container has no GPU",
            why="vLLM finds no device, and does not start",
            mend="add resources.limits nvidia.com/gpu, or a resource claim",
        )


def _is_gpu_claim(pod: PodView, claims: list[Manifest]) -> bool:
    """A claim may also be a NIC; its name and template usually say so."""
    used = {str(claim.get("name")) for claim in claims}
    found = [each for each in items(pod.spec, "resourceClaims") if str(each.get("name")) in used]
    words = [f"{each.get('name')} {each.get('resourceClaimTemplateName')}".lower() for each in found]
    return not words or any(not any(nic in word for nic in ("nic", "rdma", "net")) for word in words)


def _by_environment(engine: Engine) -> bool:
    return (
        engine.pod.spec.get("runtimeClassName") == "nvidia"
        or literal(engine.container, "NVIDIA_VISIBLE_DEVICES") is not None
    )


def _count(case: Case, engine: Engine) -> Iterator[Finding]:
    needed = engine.size("tensor-parallel-size") * engine.size("pipeline-parallel-size")
    nodes = at(engine.pod.document.spec, ["leaderWorkerTemplate", "size"])
    plugin = gpus(engine.container)
    claimed = _claimed(case, engine)
    if isinstance(nodes, int) and nodes > 1:
        return
    for given, how in ((plugin, "nvidia.com/gpu"), (claimed, "the resource claim")):
        if given and given < needed:
            yield engine.pod.finding(
                "too-few-gpus",
                f"{engine.path}.resources",
                what=f"vLLM wants {needed} GPUs, {how} gives {given}",
                why="vLLM does not start",
                mend=f"ask for {needed}, or lower --tensor-parallel-size",
            )


def _claimed(case: Case, engine: Engine) -> int | None:
    """Return how many devices the pod's claim templates make, None where none is at hand."""
    names = {str(each.get("resourceClaimTemplateName")) for each in items(engine.pod.spec, "resourceClaims")}
    total: int | None = None
    for template in case.of("ResourceClaimTemplate"):
        if template.name in names and template.namespace == engine.pod.document.namespace:
            for request in items(at(template.spec, ["spec", "devices"]), "requests"):
                if at(request, ["exactly", "allocationMode"]) == "All":
                    return None
                total = (total or 0) + int(at(request, ["exactly", "count"]) or 1)
    return total


def _mixed(case: Case) -> Iterator[Finding]:
    """Two pods that may land on one node, one by device plugin and one by claim."""
    for group in case.groups:
        yield from _mixed_in(group)


def _mixed_in(group: list[Engine]) -> Iterator[Finding]:
    plugin = [each for each in group if gpus(each.container)]
    claimed = [each for each in group if _claims(each.container) and not gpus(each.container)]
    for engine in claimed:
        other = next((each for each in plugin if _may_meet(engine, each)), None)
        if other is not None:
            yield engine.pod.finding(
                "two-mechanisms",
                f"{engine.path}.resources.claims",
                what=f"this pod has its GPU by claim, {other.pod.title} by nvidia.com/gpu, maybe on one node",
                why="device plugin and DRA driver hand out the same GPU twice",
                mend="use one mechanism, or keep them on different nodes by nodeSelector",
            )


def _may_meet(one: Engine, other: Engine) -> bool:
    left, right = (each.pod.spec.get("nodeSelector") or {} for each in (one, other))
    return not any(key in right and right[key] != value for key, value in left.items())


def _memory(engine: Engine) -> Iterator[Finding]:
    limit = maybe_quantity(at(engine.container, ["resources", "limits", "memory"]) or "")
    if limit is None:
        return
    shm = _shm_bytes(engine) or 0.0
    needed = memory_of(
        process=None,
        shm=shm,
        ring=_RING if engine.uses("Tollbridge") else 0.0,
        request_kv=0,
        concurrency=1,
        staging_copies=1.0,
        limit=limit,
    )
    if needed.fits is False and not engine.is_cpu:
        terms = f"process {show_bytes(DEFAULT_PROCESS_BYTES)} at the least + /dev/shm {show_bytes(shm)}"
        terms += f" + rings {show_bytes(needed.ring)}" if needed.ring else ""
        more = "" if engine.uses("Tollbridge") else "; staged KV comes on top (tollbridge plan)"
        yield engine.pod.finding(
            "memory",
            f"{engine.path}.resources.limits.memory",
            what=f"the limit is {show_bytes(limit)}; needed are {show_bytes(needed.needed)} = ({terms}) x 1.15{more}",
            why="the kernel kills the worker in the middle of a transfer (OOMKilled)",
            mend=f"limit and request at least {show_bytes(needed.needed)}, or lower the sizeLimit of /dev/shm",
        )


def _shm_volume(engine: Engine) -> Manifest | None:
    mount = next((each for each in items(engine.container, "volumeMounts") if each.get("mountPath") == SHM), None)
    if mount is None:
        return None
    return next((each for each in items(engine.pod.spec, "volumes") if each.get("name") == mount.get("name")), None)


def _shm_bytes(engine: Engine) -> float | None:
    volume = _shm_volume(engine)
    return maybe_quantity(at(volume, ["emptyDir", "sizeLimit"]) or "") if volume else None


def _shared_memory(engine: Engine) -> Iterator[Finding]:
    volume = _shm_volume(engine)
    where = f"{engine.pod.spec_path}.volumes"
    memory = at(volume, ["emptyDir", "medium"]) == "Memory"
    if memory and at(volume, ["emptyDir", "sizeLimit"]) is None:
        yield engine.pod.finding(
            "shm",
            where,
            what=f"{SHM} has no sizeLimit",
            why="what is written there counts as the container's memory",
            mend="set sizeLimit, and count it into the memory limit",
        )
    if volume is not None and "emptyDir" in volume and not memory:
        yield engine.pod.finding(
            "shm",
            where,
            what=f"{SHM} is on disk: the emptyDir has no medium Memory",
            why="NCCL and UCX become slow",
            mend="set medium: Memory and a sizeLimit",
        )
    dynamo = engine.pod.document.kind == "DynamoGraphDeployment"  # mounts one by itself
    if volume is None and not dynamo and engine.size("tensor-parallel-size") > 1:
        yield engine.pod.finding(
            "shm",
            f"{engine.path}.volumeMounts",
            what="tensor parallelism with a /dev/shm of 64 MiB, the default",
            why="NCCL ends with a bus error",
            mend="mount an emptyDir with medium: Memory and a sizeLimit on /dev/shm",
        )


def _rights(engine: Engine) -> Iterator[Finding]:
    container = at(engine.container, ["securityContext"]) or {}
    pod = at(engine.pod.spec, ["securityContext"]) or {}
    where = f"{engine.path}.securityContext"
    if container.get("privileged") is True:
        yield engine.pod.finding(
            "privileged",
            where,
            what="the container is privileged",
            why="it sees every GPU of the node, whatever it was given, and owns the host",
            mend="take privileged away",
        )
    user = container.get("runAsUser", pod.get("runAsUser"))
    if container.get("runAsNonRoot", pod.get("runAsNonRoot")) is True and user in (0, "0"):
        yield engine.pod.finding(
            "root",
            where,
            what="runAsNonRoot is true, and runAsUser 0",
            why="the kubelet refuses to start the container",
            mend="set runAsUser to a number above 0",
        )
    mounted = {str(each.get("mountPath")).rstrip("/") for each in items(engine.container, "volumeMounts")}
    if container.get("readOnlyRootFilesystem") is True and TMP not in mounted:
        yield engine.pod.finding(
            "read-only",
            where,
            what="the root file system is read-only, and /tmp is no volume",
            why="vLLM, Triton and nvidia-cdi-hook write there, and fail",
            mend="set readOnlyRootFilesystem: false on engines, or mount /tmp and the caches",
        )
    if engine.pod.spec.get("automountServiceAccountToken") is True:
        yield engine.pod.finding(
            "token",
            f"{engine.pod.spec_path}.automountServiceAccountToken",
            what="a worker gets a token of the API server",
            why="it needs none, and runs code of models",
            mend="set automountServiceAccountToken: false",
        )


def _image(engine: Engine) -> Iterator[Finding]:
    name = engine.image.rpartition("/")[2]
    if "@" not in engine.image and (":" not in name or name.endswith((":latest", ":nightly"))):
        yield engine.pod.finding(
            "image-tag",
            f"{engine.path}.image",
            what=f"the image {engine.image} has no version",
            why="two pods of one rollout may run different vLLMs, which refuse each other's KV",
            mend="name a version, or better a digest",
        )


def _model(engine: Engine) -> Iterator[Finding]:
    container = engine.container
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if literal(container, name):
            yield engine.pod.finding(
                "token-in-plain",
                f"{engine.path}.env",
                what=f"{name} stands in the manifest in plain text",
                why="everybody who may read pods knows it",
                mend="take it from a Secret by secretKeyRef",
            )
    offline = literal(container, "HF_HUB_OFFLINE") == "1"
    home = literal(container, "HF_HOME") or ""
    mounts = {str(each.get("mountPath")): str(each.get("name")) for each in items(container, "volumeMounts")}
    volume = next((each for each in items(engine.pod.spec, "volumes") if each.get("name") == mounts.get(home)), {})
    is_local = (engine.model or "").startswith("/")
    if offline and home and "emptyDir" in volume and not is_local and not items(engine.pod.spec, "initContainers"):
        yield engine.pod.finding(
            "offline",
            f"{engine.path}.env",
            what="HF_HUB_OFFLINE is 1, and HF_HOME is an emptyDir",
            why="the cache is empty in each new pod, and nothing may be fetched",
            mend="use a filled volume, or fetch",
        )


def _volumes(case: Case) -> Iterator[Finding]:
    """A ReadWriteOnce volume is on one node; pods on others wait for ever."""
    once = {
        (each.namespace, each.name)
        for each in case.of("PersistentVolumeClaim")
        if set(each.spec.get("accessModes") or []) <= {"ReadWriteOnce", "ReadWriteOncePod"}
    }
    users: dict[tuple[str, str], list[PodView]] = {}
    for pod in case.pods:
        for volume in items(pod.spec, "volumes"):
            key = (pod.document.namespace, str(at(volume, ["persistentVolumeClaim", "claimName"])))
            if key in once:
                users.setdefault(key, []).append(pod)
    for (_, name), pods in users.items():
        places = {str(at(pod.spec, ["nodeSelector", "kubernetes.io/hostname"])) for pod in pods}
        alone = len(pods) == 1 and pods[0].replicas <= 1
        if not alone and (len(places) > 1 or places == {"None"}):
            yield pods[-1].finding(
                "volume-once",
                f"{pods[-1].spec_path}.volumes",
                what=f"the ReadWriteOnce claim {name} is mounted by {sum(pod.replicas for pod in pods)} pods",
                why="it is on one node; pods elsewhere stay pending (Multi-Attach error)",
                mend="a claim per role and node, ReadWriteMany, or a hostPath that is filled on each node",
            )
