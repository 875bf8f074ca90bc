"""The servers that must answer alike, and how a test asks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.stack import Answer, Process, Stack, get, post, running, tollbridge
from tests.vllm.pair import SECRET, Pair
from tollbridge.wire import sse

NAMES = ("worker", "router", "router-split", "vllm", "router-vllm", "router-vllm-split")


@dataclass(frozen=True)
class Target:
    """One server. `headers` choose the path through a router."""

    name: str
    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_embedded(self) -> bool:
        return "vllm" not in self.name

    @property
    def is_router(self) -> bool:
        return "router" in self.name

    def ask(self, path: str, body: object, **headers: str) -> Answer:
        """POST `body`, bytes as they are; a `model` of "MODEL" becomes the server's own."""
        if isinstance(body, dict) and body.get("model") == "MODEL":
            body = {**body, "model": self.model}
        return post(self.url + path, body, headers={**self.headers, **headers})

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks, having checked the framing."""
        answer = self.ask(path, {**body, "stream": True})
        assert answer.status == 200, answer.raw
        assert answer.headers.get_content_type() == "text/event-stream"
        events = list(sse.Parser().feed(answer.raw))
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]


@contextmanager
def all_targets(pair: Pair, folder: Path) -> Iterator[dict[str, Target]]:
    """Start embedded workers with the model of `pair`, and a router over each fleet."""
    stack = Stack(folder, str(pair.d.model), max_model_len=2048)
    with running(stack), _router_over(pair, folder) as vllm_url:
        name = str(json.loads(get(stack.url + "/v1/models"))["data"][0]["id"])
        split = {"x-tollbridge-policy": "split"}
        made = [
            Target("worker", stack.worker_url("d0"), name),
            Target("router", stack.url, name),
            Target("router-split", stack.url, name, split),
            Target("vllm", pair.d.url, "tiny"),
            Target("router-vllm", vllm_url, "tiny"),
            Target("router-vllm-split", vllm_url, "tiny", split),
        ]
        yield {target.name: target for target in made}


@contextmanager
def _router_over(pair: Pair, folder: Path) -> Iterator[str]:
    workers = [
        {"name": name, "prefer": prefer, "engine": "vllm", "url": server.url, "kv": f"127.0.0.1:{server.kv_port}"}
        for name, prefer, server in (("p", "prefill", pair.p), ("d", "decode", pair.d))
    ]
    config = folder / "router-vllm.yaml"
    config.write_text(yaml.safe_dump({"router": {"port": 0, "policy": "local"}, "workers": workers}))
    process = Process(tollbridge("router", "--config", str(config)), folder / "router-vllm.log", secret=SECRET)
    try:
        yield str(process.wait_ready()["url"])
    finally:
        process.stop()
