"""The traced halves do what the plain ones do, and write down when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm.fakes import BLOCK, SECRET, Medium, end, kv_params, request, scheduled, transfer_id
from tollbridge.clock import ManualClock
from tollbridge.obs.trace import Trace
from tollbridge.vllm.admission import Admission
from tollbridge.vllm.blocks import Pieces
from tollbridge.vllm.orders import Chunk, LoadOrder, SendOrder, StepOrders
from tollbridge.vllm.ready import AtOnce
from tollbridge.vllm.traced import TracedScheduler, TracedWorker


def events(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_decode_request_at_the_scheduler(tmp_path: Path) -> None:
    admission = Admission(secret=SECRET, clock=ManualClock(1_000.0), tp_size=1, sends=True, loads=True)
    side = TracedScheduler(admission, trace=Trace(str(tmp_path), "scheduler"))
    decode = request("d", kv_params("decode"), num_tokens=9)
    side.queued(decode)
    side.allocated("d", [1, 2, 3], side.lacking("d", 0) or 0)
    side.step(scheduled())
    side.reported([], ["d"], {"d": end(1, "receive")})
    side.step(scheduled(new=[("d", 8, 1, [1, 2, 3])]))
    side.finished(decode)
    found = events(tmp_path)
    assert [event["event"] for event in found] == ["queued", "scheduled", "reported", "scheduled", "finished"]
    assert found[0]["transfer"] == transfer_id(1)
    assert found[1]["loads"] == [transfer_id(1)]
    assert found[2]["received"] == ["d"]
    assert found[3]["tokens"] == {"d": 1}


def test_a_send_and_a_load_at_the_worker(tmp_path: Path) -> None:
    sender, receiver = Medium(), Medium()
    side = TracedWorker(
        sender=sender,
        receiver=receiver,
        layers={"a": 0},
        pieces=Pieces(BLOCK),
        ready=AtOnce(),
        tp_rank=0,
        trace=Trace(str(tmp_path), "worker0"),
    )
    send = SendOrder(request_id="p", transfer_id=transfer_id(1), digest=b"d", num_tokens=8)
    load = LoadOrder(
        request_id="d", transfer_id=transfer_id(2), host="h", port=1, digest=b"d", first_token=0, num_tokens=8,
        block_table=(1, 2),
    )  # fmt: skip
    orders = StepOrders(sends=[send], loads=[load], chunks=[Chunk(request_id="p", block_table=(1, 2), end_token=8)])
    side.begin(orders)
    side.begin(orders)
    side.start_loads()
    side.layer_saved("a")
    side.sweep()
    sender.end_now(end(1, "send", num_frames=3))
    receiver.end_now(end(2, "receive", num_frames=3))
    assert side.finish().received == {"d"}
    found = events(tmp_path)
    assert [event["event"] for event in found] == ["begin", "load", "layer", "sweep", "ended", "ended", "finish"]
    assert [(event["side"], event["num_frames"]) for event in found[4:6]] == [("send", 3), ("receive", 3)]
    assert found[3]["t"] <= found[4]["ended_s"] <= found[4]["t"]
