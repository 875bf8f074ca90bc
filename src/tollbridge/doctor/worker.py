"""One worker by itself: does it answer, what does it serve, has it a connector, does its KV port take us."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tollbridge.config.address import WILDCARDS, Address, parse_address
from tollbridge.doctor.findings import Finding, failed, passed, skipped
from tollbridge.doctor.targets import DEFAULT_KV_PORT, Connector, Target
from tollbridge.errors import TollbridgeError
from tollbridge.transfer.base import Fingerprint
from tollbridge.transfer.channel import Tls
from tollbridge.transfer.interview import interview

MAX_SKEW_S = 30.0  # half of what the router's signatures are valid for
_MARKS: tuple[tuple[Connector, bytes], ...] = (("tollbridge", b"vllm:tollbridge_"), ("nixl", b"vllm:nixl_"))


@dataclass(kw_only=True)
class Patient:
    """A worker and what has been learnt of it."""

    target: Target
    findings: list[Finding] = field(default_factory=list)
    reachable: bool = False
    models: tuple[str, ...] = ()
    max_model_len: int = 2048
    skew_s: float = 0.0  # its clock minus ours
    connector: Connector | None = None
    engine: str = "vllm"
    kv: Address | None = None
    fingerprint: Fingerprint | None = None

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def url(self) -> str:
        return self.target.url


async def examine(session: aiohttp.ClientSession, target: Target, secret: bytes | None, tls: Tls | None) -> Patient:
    """Return what `target` is found to be. Each check that fails makes those that need it moot, not the others."""
    patient = Patient(target=target)
    await _reach(session, patient)
    if patient.reachable:
        await _ask_models(session, patient)
        await _ask_connector(session, patient)
        if patient.connector == "tollbridge":
            await _ask_kv_port(patient, secret, tls)
    return patient


async def _reach(session: aiohttp.ClientSession, patient: Patient) -> None:
    started_s, wall_s = time.perf_counter(), time.time()
    try:
        async with session.get(f"{patient.url}/health") as answer:
            took_s = time.perf_counter() - started_s
            status, date = answer.status, answer.headers.get("Date")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        said = f"{patient.url} does not answer: {why(error)}"
        mend = "start the worker, wait until its model is loaded, or correct its url."
        patient.findings.append(failed("http", patient.name, said, mend))
        return
    if status != 200:
        said = f"{patient.url}/health says {status}"
        patient.findings.append(failed("http", patient.name, said, "see the worker's log: it is up, but not healthy."))
        return
    patient.reachable = True
    patient.findings.append(passed("http", patient.name, f"{patient.url} answers in {took_s * 1000:.1f} ms"))
    if date is not None:
        patient.skew_s = parsedate_to_datetime(date).timestamp() + 0.5 - (wall_s + took_s / 2)  # whole seconds


async def _ask_models(session: aiohttp.ClientSession, patient: Patient) -> None:
    answer = await _json(session, f"{patient.url}/v1/models")
    cards = answer.get("data") if isinstance(answer, dict) else None
    cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    patient.models = tuple(str(card.get("id")) for card in cards)
    if not cards:
        mend = "is this URL a worker's? It should answer like an OpenAI server."
        patient.findings.append(failed("model", patient.name, f"{patient.url}/v1/models names no model", mend))
        return
    length = cards[0].get("max_model_len")
    patient.max_model_len = length if isinstance(length, int) else patient.max_model_len
    patient.findings.append(passed("model", patient.name, f"serves {', '.join(patient.models)}"))


async def _ask_connector(session: aiohttp.ClientSession, patient: Patient) -> None:
    status = await _json(session, f"{patient.url}/tollbridge/status")
    if isinstance(status, dict) and "kv" in status:
        _take_status(patient, status["kv"])
    else:
        await _take_metrics(session, patient)


def _take_status(patient: Patient, kv: object) -> None:
    """An embedded worker says where it listens for KV, and None when it takes no part in splits."""
    patient.engine = "embedded"
    if not isinstance(kv, str):
        mend = "start it with TOLLBRIDGE_SECRET in its environment."
        said = "it takes no part in splits: it was started without the cluster secret"
        patient.findings.append(failed("connector", patient.name, said, mend))
        return
    patient.connector = "tollbridge"
    patient.kv = _dialled(patient.target.kv or kv, patient.url)
    patient.findings.append(passed("connector", patient.name, f"embedded engine, KV at {patient.kv}"))


async def _take_metrics(session: aiohttp.ClientSession, patient: Patient) -> None:
    """A vLLM does not say which connector it has, but each connector registers metrics of its own at start."""
    text = await _read(session, f"{patient.url}/metrics")
    found = next((name for name, mark in _MARKS if mark in text), None)
    wanted = patient.target.connector
    if patient.target.engine == "embedded":
        said = "it has no /tollbridge/status, so it is no embedded worker, as the cluster file says"
        patient.findings.append(failed("connector", patient.name, said, "write `engine: vllm` if it is a vLLM."))
        return
    if b"vllm:" not in text:
        said = "its /metrics has nothing of vLLM: neither its connector nor its load can be known"
        patient.findings.append(failed("connector", patient.name, said, "start it without --disable-log-stats."))
        return
    if found is None:
        said = "vLLM runs without a KV connector: every split would be computed twice"
        mend = "start it with `tollbridge worker vllm`, or with --kv-transfer-config as docs/vllm.md has it."
        patient.findings.append(failed("connector", patient.name, said, mend))
        return
    if wanted is not None and (wanted == "tollbridge") != (found == "tollbridge"):
        said = f"vLLM runs with {found}'s connector, and the cluster file says connector: {wanted}"
        mend = "make the two agree."
        patient.findings.append(failed("connector", patient.name, said, mend))
        return
    patient.connector = wanted or found
    if patient.connector == "tollbridge":
        default = str(Address(host=urlsplit(patient.url).hostname or "", port=DEFAULT_KV_PORT))
        patient.kv = _dialled(patient.target.kv or default, patient.url)
    patient.findings.append(passed("connector", patient.name, f"vLLM with connector {patient.connector}"))


async def _ask_kv_port(patient: Patient, secret: bytes | None, tls: Tls | None) -> None:
    """Dial the KV port as a decode worker does."""
    kv = patient.kv
    assert kv is not None, "a worker with our connector has one"
    if secret is None:
        patient.findings.append(skipped("secret", patient.name, "TOLLBRIDGE_SECRET is not set here"))
        return
    try:
        answer = await asyncio.to_thread(interview, kv.host, kv.port, secret, tls=tls)
    except TollbridgeError as error:
        patient.findings.append(_refused(patient.name, kv, error))
        return
    except OSError as error:
        mend = "check kv_host and kv_port of the worker, `kv` of the cluster file, and firewalls on the way."
        patient.findings.append(failed("kv port", patient.name, f"{kv} cannot be reached: {why(error)}", mend))
        return
    patient.fingerprint = answer.fingerprint
    said = f"{kv} answers in {answer.connect_s * 1000:.1f} ms"
    patient.findings.append(passed("kv port", patient.name, said))
    patient.findings.append(passed("secret", patient.name, "the KV port accepted ours, and proved that it knows it"))


def _refused(name: str, kv: Address, error: TollbridgeError) -> Finding:
    if "secret" in error.message:
        mend = "set the same TOLLBRIDGE_SECRET for router, workers and doctor, and restart who had another."
        return failed("secret", name, f"{kv} does not accept ours", mend)
    return failed("kv port", name, f"{kv}: {error.message}", "name the port that the worker listens on for KV.")


def _dialled(text: str, url: str) -> Address:
    """Return where `text` is dialled: a worker that listens everywhere is found at its URL's host."""
    address = parse_address(text)
    if address.host not in WILDCARDS:
        return address
    return Address(host=urlsplit(url).hostname or address.host, port=address.port)


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        return msgspec.json.decode(await _read(session, url))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _read(session: aiohttp.ClientSession, url: str) -> bytes:
    """Return the body of a good answer, nothing otherwise."""
    try:
        async with session.get(url) as answer:
            return await answer.read() if answer.status == 200 else b""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return b""


def why(error: BaseException) -> str:
    """Return what a network error means, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    inner = getattr(error, "os_error", error)
    number = getattr(inner, "errno", None)
    if isinstance(number, int) and number > 0:  # of name resolution they are negative, with a text of their own
        return os.strerror(number)
    return str(getattr(inner, "strerror", None) or inner or type(error).__name__)
