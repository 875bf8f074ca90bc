"""What the doctor makes of what it is told, where no real worker breaks that way: clocks, vLLM's metrics, records."""

from __future__ import annotations

import re
import time
from email.utils import formatdate
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tollbridge.config.address import Address
from tollbridge.config.cluster import WorkerConfig
from tollbridge.doctor import pair
from tollbridge.doctor.findings import Finding
from tollbridge.doctor.targets import Target, from_cluster, pairs_of
from tollbridge.doctor.worker import Patient, examine
from tollbridge.wire.decision import Decision, DecisionRecord, Happened
from tollbridge.wire.params import TransferReport, WorkerReport


async def examined(metrics: str = "", *, ahead_s: float = 0.0, health: int = 200, **target: Any) -> Patient:
    """Examine a server that answers as a vLLM does, with the given metrics and clock."""

    async def answer(request: web.Request) -> web.Response:
        date = {"Date": formatdate(time.time() + ahead_s, usegmt=True)}
        if request.path == "/health":
            return web.Response(status=health, headers=date)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 512}]})
        return web.Response(text=metrics) if request.path == "/metrics" else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await examine(session, Target(name="w", url=str(server.make_url("")).rstrip("/"), **target), None, None)


def failures(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.said for finding in findings if finding.ok is False}


NIXL = "# HELP vllm:nixl_bytes_transferred Histogram\n"
OURS = "# HELP vllm:tollbridge_transfers_total Transfers\n"


@pytest.mark.parametrize(
    ("metrics", "said", "connector", "words"),
    [
        ("vllm:num_requests_running 0", None, None, "runs without a KV connector"),
        (OURS, "nixl", None, "the cluster file says connector: nixl"),
        (NIXL, "tollbridge", None, "vLLM runs with nixl's connector"),
        (OURS, None, "tollbridge", ""),
        (OURS, "tollbridge", "tollbridge", ""),
        (NIXL, None, "nixl", ""),
        (NIXL, "nixl-push", "nixl-push", ""),
    ],
)
async def test_connector_of_a_vllm(metrics: str, said: str | None, connector: str | None, words: str) -> None:
    patient = await examined(metrics, connector=said)
    assert patient.connector == connector
    assert words in failures(patient.findings).get("connector", "")
    assert ("connector" in failures(patient.findings)) is (connector is None)


async def test_a_server_that_is_not_what_the_file_says_or_tells_nothing() -> None:
    taken_for_ours = await examined(OURS, engine="embedded")
    assert "no embedded worker, as the cluster file says" in failures(taken_for_ours.findings)["connector"]
    assert taken_for_ours.connector is None
    mute = await examined("")
    assert "has nothing of vLLM" in failures(mute.findings)["connector"]


async def test_kv_port_of_a_vllm_is_the_default_one() -> None:
    assert str((await examined(OURS)).kv) == "127.0.0.1:7801"
    assert str((await examined(OURS, kv="0.0.0.0:7900")).kv) == "127.0.0.1:7900"


async def test_unhealthy() -> None:
    patient = await examined(health=503)
    assert failures(patient.findings)["http"].endswith("/health says 503")
    assert not patient.reachable


@pytest.mark.parametrize(
    ("ahead_s", "router_s", "ok", "words"),
    [
        (0.0, None, True, "agrees with this machine's"),
        (50.0, None, False, "s ahead of this machine's"),
        (-50.0, None, False, "s behind this machine's"),
        (50.0, 50.0, True, "agrees with the router's"),  # it is ours that is wrong
        (10.0, None, True, r"\b(9|1\d) s ahead"),  # it says when it answered in whole seconds
    ],
)
async def test_clock(ahead_s: float, router_s: float | None, ok: bool, words: str) -> None:
    (finding,) = pair.clocks([await examined(OURS, ahead_s=ahead_s)], router_s)
    assert finding.ok is ok
    assert re.search(words, finding.said)


def record(**happened: Any) -> DecisionRecord:
    fields: dict[str, Any] = {"id": "r", "policy": "split", "choice": "split", "decode": "d", "prefill": "p"}
    decision = Decision(**fields, reason="policy", why="It splits.")
    return DecisionRecord(at=0.0, decision=decision, happened=Happened(status="ok", **happened))


def report(loaded: int, reason: str = "", wire_bytes: int = 0, wire_s: float = 0.0) -> WorkerReport:
    outcome: Any = "failed" if reason else "done"
    end = TransferReport(
        transfer_id="t", side="receive", outcome=outcome, reason=reason, wire_bytes=wire_bytes, wire_s=wire_s
    )
    return WorkerReport(role="decode", prompt_tokens=100, loaded_tokens=loaded, transfer=end)


def test_a_verified_split_and_its_goodput() -> None:
    good = record(split_verified=True, prompt_tokens=100, decode_report=report(99, wire_bytes=10**9, wire_s=2.0))
    split, goodput = pair.judge("p>d", good)
    assert (split.ok, goodput.ok) == (True, True)
    assert "4.00 Gb/s" in goodput.said
    small = record(split_verified=True, prompt_tokens=100, decode_report=report(99, wire_bytes=1000, wire_s=2.0))
    assert pair.judge("p>d", small)[1].ok is None
    assert (
        len(pair.judge("p>d", record(split_verified=True, prompt_tokens=100))) == 1
    )  # a connector that reports nothing


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("peer_lost", "must reach prefill's KV address"),
        ("handshake", "make it equal"),
        ("checksum", "see the logs"),
    ],
)
def test_a_split_that_did_not_happen(reason: str, mend: str) -> None:
    (finding,) = pair.judge("p>d", record(split_verified=False, error="It did not.", decode_report=report(0, reason)))
    assert finding.ok is False
    assert mend in finding.mend


def test_no_report_leads_to_the_flag() -> None:
    (finding,) = pair.judge("p>d", record(split_verified=False, error="The decode worker sent no report."))
    assert "--enable-prompt-tokens-details" in finding.mend


def test_one_kv_port_is_never_two_workers() -> None:
    kv = Address(host="127.0.0.1", port=7801)
    prefill, decode = (Patient(target=Target(name=name, url=f"http://{name}"), kv=kv) for name in ("p", "d"))
    assert "127.0.0.1:7801 was asked for both" in failures(pair.compare(prefill, decode))["kv port"]
    decode.kv = Address(host="127.0.0.1", port=7802)
    assert "kv port" not in failures(pair.compare(prefill, decode))


def test_pairs() -> None:
    def target(name: str, prefer: Any) -> Target:
        return Target(name=name, url="http://x:1", prefer=prefer)

    p, q, d, e, a = (
        target(*it) for it in (("p", "prefill"), ("q", "prefill"), ("d", "decode"), ("e", "decode"), ("a", "any"))
    )
    assert pairs_of([p, d]) == [(p, d)]
    assert pairs_of([p, q, d, e]) == [(p, d), (q, e)]
    assert pairs_of([a, d]) == [(a, d)]
    assert pairs_of([a]) == pairs_of([]) == []


def test_workers_without_an_address_in_the_file_are_left_to_the_router() -> None:
    workers = [WorkerConfig(name="a"), WorkerConfig(name="b", url="http://10.0.0.1:8100", kv="10.0.0.1:7801")]
    (target,) = from_cluster(workers)
    assert (target.name, target.kv) == ("b", "10.0.0.1:7801")
