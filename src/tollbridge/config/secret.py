"""The cluster secret: what router and workers sign transfers with. It travels in the environment, never in argv."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from tollbridge.config.address import is_loopback, parse_address
from tollbridge.config.cluster import ClusterConfig, SecretConfig
from tollbridge.errors import ConfigError

MIN_BYTES = 16


def maybe_secret(config: SecretConfig, environ: Mapping[str, str] | None = None) -> bytes | None:
    """Return the secret that `config` points to, None where it is not set; ConfigError when it is unusable."""
    environ = os.environ if environ is None else environ
    if config.env is not None and environ.get(config.env):
        return _strong(environ[config.env], f"the environment variable {config.env}")
    if config.file is not None:
        return _strong(_read(Path(config.file)), config.file)
    return None


def require_secret(config: SecretConfig, environ: Mapping[str, str] | None = None) -> bytes:
    """Return the secret that `config` points to; ConfigError when there is none."""
    secret = maybe_secret(config, environ)
    if secret is None:
        raise ConfigError(
            f"there is no cluster secret: set {config.env or 'secret.env'} to at least {MIN_BYTES} random bytes, "
            "the same for router and workers (`openssl rand -hex 32` makes one)."
        )
    return secret


def secret_for_local(cluster: ClusterConfig, environ: Mapping[str, str] | None = None) -> bytes:
    """Return the configured secret, or a fresh one when nothing but this machine can reach the cluster."""
    if is_local(cluster):
        return maybe_secret(cluster.secret, environ) or secrets.token_hex(32).encode()
    return require_secret(cluster.secret, environ)


def is_local(cluster: ClusterConfig) -> bool:
    """Say whether every listener of the cluster is on loopback."""
    hosts = [cluster.router.host]
    for worker in cluster.workers:
        hosts.append(parse_address(worker.url, scheme="http://").host)
        hosts.append(parse_address(worker.kv).host)
        if worker.events is not None:
            hosts.append(parse_address(worker.events, scheme="tcp://").host)
    return all(is_loopback(host) for host in hosts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the secret file {path} cannot be read: {reason}.") from None


def _strong(text: str, source: str) -> bytes:
    secret = text.encode()
    if len(secret) < MIN_BYTES:
        raise ConfigError(f"the secret in {source} has {len(secret)} bytes: it must have at least {MIN_BYTES}.")
    return secret
