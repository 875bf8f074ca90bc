"""① Who asks: API keys to tenants. A key is compared and forgotten; everything behind this knows the tenant's name."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from aiohttp import web

from tollbridge.config.cluster import DEFAULT_TENANT, RouterConfig
from tollbridge.errors import AuthenticationError


class Tenants:
    """Holds keys as keyed digests of one length: comparing them tells nothing, not even how long they are."""

    def __init__(self, config: RouterConfig) -> None:
        self._salt = secrets.token_bytes(32)
        self._names: list[tuple[bytes, str]] = [(self._digest(key), DEFAULT_TENANT) for key in config.api_keys or ()]
        self._names += [(self._digest(key), tenant.name) for tenant in config.tenants for key in tenant.keys]
        self._open = config.api_keys is None and not config.tenants
        self.weights = {DEFAULT_TENANT: 1.0} | {tenant.name: tenant.weight for tenant in config.tenants}

    def tenant_of(self, request: web.Request) -> str:
        """Return whose key the request carries; AuthenticationError without a valid one. Always takes the same time."""
        if self._open:
            return DEFAULT_TENANT
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = self._digest(given.strip())
        found = [name for known, name in self._names if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not found:
            raise AuthenticationError("The API key is missing or wrong: send Authorization: Bearer KEY.")
        return found[0]

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._salt, key.encode("utf-8", "surrogateescape"), hashlib.sha256)
