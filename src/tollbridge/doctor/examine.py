"""The whole examination, in the order in which things depend on each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime

import aiohttp

from tollbridge.doctor import pair
from tollbridge.doctor.findings import Finding, failed, passed, skipped
from tollbridge.doctor.targets import Target, from_router, pairs_of
from tollbridge.doctor.worker import Patient, examine, why
from tollbridge.transfer.channel import Tls

_TIMEOUT = aiohttp.ClientTimeout(total=10, sock_connect=5)
_FORCE = {"x-tollbridge-policy": "split"}


async def examine_cluster(
    targets: Sequence[Target], *, router: str | None, secret: bytes | None, tls: Tls | None = None, api_key: str | None
) -> list[Finding]:
    """Return everything that was found of the workers in `targets`, or of the router's own fleet, and of the router."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers) as session:
        findings: list[Finding] = []
        fleet = await _reach_router(session, router, findings) if router else None
        patients = await asyncio.gather(*(examine(session, t, secret, tls) for t in targets or fleet or ()))
        for patient in patients:
            findings += patient.findings
        skew_s = await _skew(session, router) if router and fleet is not None else None
        findings += pair.clocks(patients, skew_s)
        by_name = {patient.name: patient for patient in patients if patient.reachable}
        couples = pairs_of([patient.target for patient in by_name.values()])
        for prefill, decode in couples:
            findings += pair.compare(by_name[prefill.name], by_name[decode.name])
        for prefill, decode in couples:
            findings += await pair.split(session, by_name[prefill.name], by_name[decode.name], secret)
        if not couples:
            findings.append(failed("split", "all", "fewer than two workers answer", "a split needs two."))
        elif router and fleet is not None:
            findings += await _split_by_router(session, router, by_name[couples[0][0].name])
        return findings


async def _reach_router(session: aiohttp.ClientSession, url: str, findings: list[Finding]) -> list[Target] | None:
    try:
        fleet = await from_router(session, url)
    except (aiohttp.ClientError, TimeoutError) as error:
        said = f"{url} does not answer as a router: {why(error)}"
        findings.append(failed("http", "router", said, "start it with `tollbridge router`, or name it with --router."))
        return None
    findings.append(passed("http", "router", f"{url} answers and knows {len(fleet)} workers"))
    return fleet


async def _skew(session: aiohttp.ClientSession, url: str) -> float | None:
    started_s = time.time()
    async with session.get(f"{url}/health") as answer:
        date = answer.headers.get("Date")
    return parsedate_to_datetime(date).timestamp() + 0.5 - started_s if date else None


async def _split_by_router(session: aiohttp.ClientSession, url: str, patient: Patient) -> list[Finding]:
    model = patient.models[0] if patient.models else None
    findings = await pair.ask_split(session, url, "router", patient, model=model, headers=_FORCE)
    if any("x-tollbridge-policy" in finding.said for finding in findings):  # it takes no override from us
        return [skipped("split", "router", "it takes x-tollbridge-policy from others only: run the doctor there")]
    return findings
