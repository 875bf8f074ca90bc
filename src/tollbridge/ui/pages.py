"""The static page: read once at start, served with headers that let it run nothing but its own files."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from aiohttp import web

PREFIX = "/ui/"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}
# No inline script or style, nothing from elsewhere, no frame around it.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Page(NamedTuple):
    """One file."""

    body: bytes
    kind: str
    tag: str


def pages() -> dict[str, Page]:
    """Return the files by path below `/ui/`; the index is at "" too."""
    found = dict(_walk(files("tollbridge.ui").joinpath("static"), ""))
    return {"": found["index.html"], **found}


def serve(page: Page) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of one file."""
    headers = {**HEADERS, "Content-Type": page.kind, "ETag": f'"{page.tag}"'}

    async def handle(request: web.Request) -> web.StreamResponse:
        if page.tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=page.body, headers=headers)

    return handle


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Page]]:
    found: list[tuple[str, Page]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        kind = _TYPES.get(name.rpartition(".")[2])
        if entry.is_dir():
            found += _walk(entry, f"{name}/")
        elif kind is not None:
            body = entry.read_bytes()
            found.append((name, Page(body, kind, hashlib.sha256(body).hexdigest()[:16])))
    return found
