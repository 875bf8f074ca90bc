"""SmolLM2 continued behind every chunk, against the answer of one uncut run. What the first worker told is read off a
real stream, cut after k chunks; the rest comes from a real worker.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.stack import Process, post, tollbridge
from tollbridge.router.ingress import Call, parse_body
from tollbridge.router.resume import continuation_body, maybe_resumable, with_token_ids
from tollbridge.router.seam import find_seam
from tollbridge.router.splice import Listener, Splice, ending
from tollbridge.router.transcript import Transcript

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 14
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The bridge keeper counts", "temperature": 0},
    "seeded": {"prompt": "The bridge keeper counts", "temperature": 1.0, "seed": 3},
    "stop strings": {"prompt": "1, 2, 3, 4,", "temperature": 0, "stop": [" 7, 8", "9, 1"]},
    "whole characters": {"prompt": "🌉🎉 é ü 漢字 🌉🎉 é ü 漢字 🌉🎉 é ü 漢字 🌉🎉", "temperature": 0},
    "chat": {"messages": [{"role": "user", "content": "Say three emoji and a word."}], "temperature": 0},
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("continuing")
    config = folder / "c.yaml"
    engine = "{kv_cache_mib: 64, threads: 1}"
    config.write_text(f"model: {smollm2_dir}\ndtype: float32\nworkers: [{{name: w}}]\nengine: {engine}\n")
    process = Process(tollbridge("worker", "--name", "w", "--config", str(config)), folder / "w.log")
    try:
        yield str(process.wait_ready()["url"])
    finally:
        process.stop()


def events_of(url: str, body: bytes) -> list[bytes]:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        data = bytes(response.read())
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


def said(events: list[bytes]) -> tuple[str, str | None, dict[str, int]]:
    """Return text, finish reason and usage of what a client reads; it must end with [DONE]."""
    assert events[-1] == b"data: [DONE]\n\n"
    text, finish, usage = "", None, {}
    for event in events[:-1]:
        chunk = json.loads(event.removeprefix(b"data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice["finish_reason"] or finish
    return text, finish, {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.parametrize("case", CASES)
async def test_continued_behind_every_chunk_it_is_the_uncut_answer(worker: str, case: str) -> None:
    asked = CASES[case] | {"max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    raw = json.dumps(asked).encode()
    call = Call(id="c", path=path, body=parse_body(raw), body_bytes=len(raw), model=None, stream=True, override=None,
                trace={})  # fmt: skip
    resumable = maybe_resumable(call)
    assert resumable is not None
    with_ids = with_token_ids(call, 1)
    first = events_of(worker + path, msgspec.json.encode(with_ids.body))
    truth = said(first)
    cuts = 0
    for num_chunks in range(1, len(first) - 2):
        told = Transcript()
        listener = Listener(told, wants_ids=False)
        read = [listener(event) for event in first[:num_chunks]]
        assert not any(b"token_ids" in event for event in read)
        if told.finish_reason is not None:
            assert said([*read, *_events(ending(told, resumable))]) == truth
            continue

        async def detokenize(ids: list[int]) -> str:
            return str(post(worker + "/detokenize", {"tokens": ids}).json["prompt"])

        seam = await find_seam(detokenize, told, resumable.stop)
        assert seam is not None, num_chunks
        assert told.prompt_ids is not None
        prompt = [*told.prompt_ids, *told.ids[: seam.cut]]
        body = continuation_body(with_ids, resumable, prompt, num_kept=seam.cut, room=None)
        splice = Splice(told, resumable, seam)
        rest = [splice(event) for event in events_of(worker + "/v1/completions", body)]
        assert said([*read, *(event for event in rest if event)]) == truth, num_chunks
        cuts += 1
    assert cuts >= 6


def _events(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]
