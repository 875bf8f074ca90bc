"""A prefill and a decode worker together: do they fit, and does a split really happen?

The split is made by a router of our own, in this process, over just the two: so it goes the way that every split goes,
and is verified as every split is. A router that is running is asked for one too: its secret and addresses are its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from tollbridge.config.cluster import ClusterConfig, RouterConfig, WorkerConfig
from tollbridge.doctor.findings import Finding, failed, passed, skipped
from tollbridge.doctor.worker import MAX_SKEW_S, Patient
from tollbridge.router.main import listening
from tollbridge.transfer.handshake import differing_fields
from tollbridge.wire.decision import DecisionRecord
from tollbridge.wire.params import TransferReport

NUM_TOKENS = 1024  # of the prompt, where the model takes so many
MAX_TOKENS = 4
_MIN_MEASURED_BYTES = 256 * 1024  # less says nothing about a link
_SPLIT_TIMEOUT_S = 120.0
_MENDS = {
    "peer_lost": "decode's machine must reach prefill's KV address: check kv_host, firewalls, NetworkPolicy.",
    "handshake": "the sentence says what differs: make it equal on both workers.",
    "unknown_transfer": "prefill never saw its leg, or served it locally: see its log.",
    "declined": "decode did not accept the split: see its log, it says why once.",
    "no_report": "start vLLM with --enable-prompt-tokens-details, or nobody can tell whether splits happen.",
    "no_handover": "start prefill with the connector that the cluster file says.",
}
_SEE_LOGS = "see the logs of both workers around this request."


def compare(prefill: Patient, decode: Patient) -> list[Finding]:
    """Return what does not fit between the two, and what does."""
    subject = f"{prefill.name}>{decode.name}"
    findings = [_same_model(subject, prefill, decode)]
    if prefill.connector != decode.connector and prefill.connector and decode.connector:
        said = f"{prefill.name} has {prefill.connector}, {decode.name} has {decode.connector}"
        findings.append(failed("connector", subject, said, "only workers with the same connector share a split."))
    if prefill.kv is not None and prefill.kv == decode.kv:
        said = f"{prefill.kv} was asked for both, and two workers never share a KV port"
        findings.append(
            failed("kv port", subject, said, "name them with --prefill-kv, --decode-kv or `kv` in the file.")
        )
    elif prefill.fingerprint is not None and decode.fingerprint is not None:
        findings.append(_same_fingerprint(subject, prefill, decode))
    return findings


def clocks(patients: Sequence[Patient], router_skew_s: float | None) -> list[Finding]:
    """Return each worker's clock against the router's, or against ours where there is none."""
    return [_clock(patient, router_skew_s) for patient in patients if patient.reachable]


def _clock(patient: Patient, router_skew_s: float | None) -> Finding:
    skew_s = patient.skew_s - (router_skew_s or 0.0)
    whose = "this machine's" if router_skew_s is None else "the router's"
    said = f"its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} {whose}"
    if abs(skew_s) < MAX_SKEW_S:
        said = said if abs(skew_s) > 2 else f"its clock agrees with {whose} to about a second"
        return passed("clock", patient.name, said)
    return failed("clock", patient.name, said, "set the clocks by NTP: a split is signed for 60 s.")


def _same_model(subject: str, prefill: Patient, decode: Patient) -> Finding:
    if _common_models(prefill, decode):
        return passed("model", subject, "both serve the same")
    said = f"{prefill.name} serves {', '.join(prefill.models)}; {decode.name} serves {', '.join(decode.models)}"
    return failed("model", subject, said, "serve one model under one name (--served-model-name) on both.")


def _common_models(prefill: Patient, decode: Patient) -> list[str]:
    return [name for name in prefill.models if name in decode.models]


def _same_fingerprint(subject: str, prefill: Patient, decode: Patient) -> Finding:
    one, other = prefill.fingerprint, decode.fingerprint
    assert one is not None
    assert other is not None
    fields = differing_fields(one, other)
    if not fields:
        return passed("fingerprint", subject, f"KV is interchangeable: {one.num_layers} layers, {one.layout}")
    values = (f"{name} is {getattr(one, name)!r} on {prefill.name} and {getattr(other, name)!r}" for name in fields)
    said = "; ".join(f"{value} on {decode.name}" for value in values)
    return failed("fingerprint", subject, said, "give both the same model, dtype, block size and kind of machine.")


async def split(
    session: aiohttp.ClientSession, prefill: Patient, decode: Patient, secret: bytes | None
) -> list[Finding]:
    """Return how a split between the two went, made by a router of our own."""
    subject = f"{prefill.name}>{decode.name}"
    if prefill.connector is None or prefill.connector != decode.connector:
        return [skipped("split", subject, "not tried: the two have no connector in common")]
    if not _common_models(prefill, decode):
        return [skipped("split", subject, "not tried: the two have no model in common")]
    if secret is None and prefill.connector == "tollbridge":
        return [skipped("split", subject, "not tried by hand: TOLLBRIDGE_SECRET is not set here")]
    workers = [_config(prefill, "prefill"), _config(decode, "decode")]
    cluster = ClusterConfig(router=RouterConfig(port=0, policy="split"), workers=workers)
    async with listening(cluster, secret or b"unused: these connectors know none") as url:
        return await ask_split(session, url, subject, prefill, model=_common_models(prefill, decode)[0])


async def ask_split(
    session: aiohttp.ClientSession,
    url: str,
    subject: str,
    patient: Patient,
    *,
    model: str | None = None,
    headers: dict[str, str] | None = None,
) -> list[Finding]:
    """Send one request to the router at `url` and return what became of it."""
    body = {
        **({"model": model} if model is not None else {}),
        "prompt": _fresh_prompt(min(NUM_TOKENS, patient.max_model_len // 2)),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    timeout = aiohttp.ClientTimeout(total=_SPLIT_TIMEOUT_S)
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers, timeout=timeout) as answer:
            raw = await answer.read()
            request_id = answer.headers.get("x-request-id", "")
        if answer.status != 200:
            return [failed("split", subject, f"the request was answered {answer.status}: {_said(raw)}", _SEE_LOGS)]
        async with session.get(f"{url}/decisions/{request_id}") as answer:
            record = msgspec.json.decode(await answer.read(), type=DecisionRecord)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        said = f"the request was not answered: {str(error) or type(error).__name__}"
        return [failed("split", subject, said, _SEE_LOGS)]
    return judge(subject, record)


def judge(subject: str, record: DecisionRecord) -> list[Finding]:
    """Return what a decision record says of a split that was wanted."""
    decision, happened = record.decision, record.happened
    report = happened.decode_report
    transfer = report.transfer if report is not None else None
    if decision.choice != "split":
        mend = _MENDS.get(decision.reason, _SEE_LOGS)
        return [failed("split", subject, f"{decision.reason}: {happened.error or decision.why}", mend)]
    if not happened.split_verified:
        reason = transfer.reason if transfer is not None and transfer.reason else ""
        reason = reason or ("no_report" if "no report" in happened.error else "")
        return [failed("split", subject, happened.error, _MENDS.get(reason, _SEE_LOGS))]
    who = f"{decision.prefill}>{decision.decode}"
    loaded = report.loaded_tokens if report is not None else happened.prompt_tokens - 1
    said = f"{who} verified: decode loaded {loaded} of {happened.prompt_tokens} prompt tokens and computed the last"
    return [passed("split", subject, said), *_goodput(subject, transfer)]


def _goodput(subject: str, transfer: TransferReport | None) -> list[Finding]:
    if transfer is None:
        return []
    if transfer.wire_bytes < _MIN_MEASURED_BYTES or transfer.wire_s <= 0:
        return [skipped("goodput", subject, f"{transfer.wire_bytes} bytes are too few to measure the link")]
    rate = transfer.wire_bytes / transfer.wire_s
    said = f"{transfer.wire_bytes / 1e6:.1f} MB of KV in {transfer.wire_s * 1000:.0f} ms while prefill ran"
    return [passed("goodput", subject, f"{said}: {rate * 8 / 1e9:.2f} Gb/s")]


def _config(patient: Patient, prefer: Any) -> WorkerConfig:
    return WorkerConfig(
        name=patient.name,
        prefer=prefer,
        engine="embedded" if patient.engine == "embedded" else "vllm",
        connector=patient.connector or "tollbridge",
        url=patient.url,
        kv=str(patient.kv) if patient.kv else "127.0.0.1:0",
    )


def _fresh_prompt(num_tokens: int) -> list[int]:
    """Return token ids that every vocabulary has, and no prefix cache."""
    return [random.randrange(3, 250) for _ in range(max(num_tokens, 2))]


def _said(raw: bytes) -> str:
    try:
        return str(msgspec.json.decode(raw)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
