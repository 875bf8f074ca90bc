"""`tollbridge doctor`: what is wrong with a running cluster, and how to mend it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tollbridge.cli.options import ConfigFile, configure
from tollbridge.config.cluster import ClusterConfig, TlsConfig
from tollbridge.config.secret import maybe_secret
from tollbridge.doctor.examine import examine_cluster
from tollbridge.doctor.findings import Finding
from tollbridge.doctor.targets import Target, from_cluster, from_flags, server_url
from tollbridge.errors import ConfigError
from tollbridge.transfer.channel import Tls, TlsFiles

_MARKS = {True: "ok", False: "FAILED", None: "-"}


def doctor(
    *,
    config: ConfigFile = None,
    router: Annotated[str | None, Parameter(help="The router's URL: examine it and the workers it knows.")] = None,
    prefill: Annotated[str | None, Parameter(help="The prefill worker's URL; together with --decode.")] = None,
    decode: Annotated[str | None, Parameter(help="The decode worker's URL.")] = None,
    prefill_kv: Annotated[str | None, Parameter(help="Its KV address, host:port: a vLLM's is port 7801.")] = None,
    decode_kv: Annotated[str | None, Parameter(help="The same of the decode worker.")] = None,
    json: Annotated[bool, Parameter(negative=(), show_default=False, help="Print one JSON document.")] = False,
) -> int:
    """Examine a running cluster; exit code 0 when nothing is wrong, 1 otherwise."""
    cluster = configure(config).cluster
    if (prefill is None) != (decode is None):
        raise ConfigError("--prefill and --decode belong together: a split needs both.")
    targets: list[Target] = []
    if prefill is not None and decode is not None:
        targets = from_flags(prefill, decode, prefill_kv, decode_kv)
    elif router is None:
        targets = from_cluster(cluster.workers) if cluster.lists_workers else []  # else the router knows them
        router = _url(cluster)
    if router is not None:
        router = server_url(router, "a router")
    examination = examine_cluster(
        targets,
        router=router,
        secret=maybe_secret(cluster.secret),
        tls=_tls(cluster.transfer.tls),
        api_key=os.environ.get("TOLLBRIDGE_API_KEY"),
    )
    with _quiet():
        findings = asyncio.run(examination)
    ok = all(finding.ok is not False for finding in findings)
    print(_document(findings, ok) if json else _lines(findings))
    return 0 if ok else 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the doctor's own router log nothing: what it would say, the findings say."""
    logger = logging.getLogger("tollbridge")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _url(cluster: ClusterConfig) -> str:
    host = cluster.router.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{'https' if cluster.router.tls else 'http'}://{host}:{cluster.router.port}"


def _tls(files: TlsConfig | None) -> Tls | None:
    return None if files is None else Tls(TlsFiles(cert=files.cert, key=files.key, ca=files.ca))


def _document(findings: list[Finding], ok: bool) -> str:
    return msgspec.json.encode({"ok": ok, "findings": findings}).decode()


def _lines(findings: list[Finding]) -> str:
    """Return one line for each finding."""
    width = max((len(finding.subject) for finding in findings), default=0)
    return "\n".join(
        f"{_MARKS[finding.ok]:<6}  {finding.check:<11}  {finding.subject:<{width}}  {finding.said}"
        + (f". Mend: {finding.mend}" if finding.mend else "")
        for finding in findings
    )
