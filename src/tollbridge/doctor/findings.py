"""What an examination finds: one line each, with the mend where something is wrong."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`ok` is None for what could not be examined; `said` then says why."""

    check: str  # "http", "kv port", ...
    subject: str  # a worker's name, "p0>d0", "router"
    ok: bool | None
    said: str  # what was found, without a full stop
    mend: str = ""  # what to do; empty unless failed


def passed(check: str, subject: str, said: str) -> Finding:
    return Finding(check=check, subject=subject, ok=True, said=said)


def failed(check: str, subject: str, said: str, mend: str) -> Finding:
    return Finding(check=check, subject=subject, ok=False, said=said.rstrip("."), mend=mend)


def skipped(check: str, subject: str, said: str) -> Finding:
    return Finding(check=check, subject=subject, ok=None, said=said)
