"""What the cluster file may say, with its defaults. One file serves local processes and Kubernetes alike."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tollbridge.config.address import WILDCARDS, is_loopback, parse_address
from tollbridge.config.deploy import DeployConfig
from tollbridge.config.quantity import LARGEST

DEFAULT_TENANT = "default"  # whose keys stand in `router.api_keys`, or everybody where there are no keys
Port = Annotated[int, Meta(ge=0, le=65535)]  # 0: choose one
Count = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the cluster file."""


class TenantConfig(_Section, frozen=True, kw_only=True):
    """Who shares the router. Logs and metrics know a tenant by name, never by key."""

    name: str
    keys: list[str]
    weight: Positive = 1.0  # of its share when not all can be served at once


class RouterConfig(_Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    policy: str = "adaptive"
    explore: Fraction = 0.02  # of the requests, at most: split only to learn what a link carries
    on_no_prefill: Literal["local", "fail"] = "local"
    allow_override: Literal["never", "loopback", "always"] = "loopback"  # who may force a path by header
    api_keys: list[str] | None = None
    tenants: list[TenantConfig] = []
    tls: dict[str, str] | None = None
    ui: bool = True  # the dashboard at /ui
    max_body_mib: Count = 4
    max_concurrent: Count = 1024  # requests in flight; beyond, they wait
    max_queue: Annotated[int, Meta(ge=0)] = 1024  # requests that wait; beyond: 429 with Retry-After
    queue_timeout_s: Positive = 30.0  # then 503 with Retry-After
    request_timeout_s: Positive | None = None  # of a whole request; `x-request-timeout` may shorten it
    first_byte_timeout_s: Positive = 600.0  # deadline for a worker's first response byte
    idle_timeout_s: Positive = 120.0  # deadline between two chunks of a stream


class SloConfig(_Section, frozen=True, kw_only=True):
    ttft_s: Positive = 2.0
    tpot_s: Positive = 0.1
    itl_p99_s: Positive = 0.2


class SecretConfig(_Section, frozen=True, kw_only=True):
    env: str | None = "TOLLBRIDGE_SECRET"
    file: str | None = None


class TlsConfig(_Section, frozen=True, kw_only=True):
    """PEM files on each worker's machine; a worker whose files have another name has a file of its own."""

    cert: str  # this worker's certificate (chain)
    key: str  # its private key, without a passphrase
    ca: str  # the CA that signed the certificates of all workers


class TransferConfig(_Section, frozen=True, kw_only=True):
    media: Literal["auto", "tcp", "shm", "nixl", "loopback"] = "auto"
    io: Literal["auto", "threads", "process"] = "auto"  # who moves KV: the engine's process, or one beside it
    streams: Literal["auto"] | Count = "auto"
    ring_mib: Literal["auto"] | Count = "auto"
    codec: Literal["none", "fp8"] = "none"  # fp8: about half the bytes of bfloat16, at some cost in quality
    bandwidth_cap: Count | None = None  # bytes per second
    tls: TlsConfig | None = None  # mutual TLS between workers, on top of the secret


class EngineConfig(_Section, frozen=True, kw_only=True):
    block_size: Count = 16  # tokens
    max_num_batched_tokens: Count = 512  # token budget of a step: decodes first, then prefill chunks
    max_num_seqs: Count = 64
    kv_cache_mib: Count = 512
    max_pinned_fraction: Fraction = 0.5  # of the blocks: finished KV that decode has not fetched; more is given up
    max_model_len: Count | None = None  # None: the model's own, capped by the cache
    device: str = "cpu"
    cuda_graphs: bool = True  # on a GPU: decode steps as CUDA graphs, captured when their size first comes up
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None  # torch threads; None: the number of pinned cores


class WorkerConfig(_Section, frozen=True, kw_only=True):
    name: str
    prefer: Literal["prefill", "decode", "any"] = "any"  # a hint; the role is per request
    engine: Literal["embedded", "vllm"] = "embedded"
    connector: Literal["tollbridge", "nixl", "nixl-push"] = "tollbridge"  # of vLLM: ours, or one of its own
    url: str = "http://127.0.0.1:0"
    kv: str = "127.0.0.1:0"  # host:port of the KV listener
    events: str | None = "tcp://127.0.0.1:0"  # KV events; null: none, and what is cached there is guessed
    replay: str | None = None  # repeats past KV events; None: the worker says where
    host: str = ""  # the machine, as `links` names it; "": that of `kv` or `url`, "localhost" for this one
    revision: str = ""  # of model, engine and settings: both workers of a split have the same
    cores: list[Annotated[int, Meta(ge=0)]] | None = None  # None: not pinned

    def __post_init__(self) -> None:
        if not self.host:
            msgspec.structs.force_setattr(self, "host", machine_of(self.kv, self.url))


class LinkConfig(_Section, frozen=True, kw_only=True, rename={"from_host": "from", "to_host": "to"}):
    from_host: str
    to_host: str
    goodput_bytes_per_s: Positive | None = None


class DiscoveryConfig(_Section, frozen=True, kw_only=True):
    """How the router learns who serves. A word in its place is its `kind`: `discovery: dns`."""

    kind: Literal["static", "dns", "kubernetes"] = "static"
    file: str | None = None  # static: the workers of this file instead, read again whenever it changes
    min_ttl_s: Positive = 2.0  # dns: answers live as long as they say, within these bounds
    max_ttl_s: Positive = 30.0
    namespace: str | None = None  # kubernetes: of the pods; None: the router's own
    selector: str = "tollbridge.io/role"  # kubernetes: the labels of the pods that serve
    engine: Literal["embedded", "vllm"] = "vllm"  # kubernetes: of pods that do not say
    connector: Literal["tollbridge", "nixl", "nixl-push"] = "tollbridge"  # the same
    http_port: Annotated[int, Meta(ge=1, le=65535)] = 8000  # kubernetes: of pods without a port of the name http
    kv_port: Annotated[int, Meta(ge=1, le=65535)] = 7801  # the same for kv
    api: str | None = None  # kubernetes: the API server; None: that of the cluster the router runs in
    account: str = "/var/run/secrets/kubernetes.io/serviceaccount"  # folder of token, ca.crt and namespace


def machine_of(kv: str, url: str) -> str:
    """Return the host of a worker that names none: links and network cards are told apart by it.

    KV goes to the address `kv`; where that is open, the worker is where requests go.
    """
    for text, scheme in ((kv, ""), (url, "http://")):
        try:
            address = parse_address(text, scheme=scheme)
        except ValueError:
            continue  # `check` says what is wrong with it
        if (address.port or scheme) and not is_loopback(address.host) and address.host not in WILDCARDS:
            return address.host
    return "localhost"


def _default_workers() -> list[WorkerConfig]:
    return [
        WorkerConfig(name="p0", prefer="prefill", host="node-a", cores=[0]),
        WorkerConfig(name="d0", prefer="decode", host="node-a", cores=[1]),
    ]


class ClusterConfig(_Section, frozen=True, kw_only=True):
    """The whole file."""

    model: str = "smollm2"  # or a folder, or a hub id
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    router: RouterConfig = RouterConfig()
    slo: SloConfig = SloConfig()
    secret: SecretConfig = SecretConfig()
    transfer: TransferConfig = TransferConfig()
    workers: list[WorkerConfig] = msgspec.field(default_factory=_default_workers)
    engine: EngineConfig = EngineConfig()
    links: list[LinkConfig] = []
    calibration: str | None = None
    discovery: DiscoveryConfig = DiscoveryConfig()
    deploy: DeployConfig = DeployConfig()

    @property
    def lists_workers(self) -> bool:
        """Whether `workers` says who serves, rather than another file or the cluster."""
        return self.discovery.kind == "static" and self.discovery.file is None
