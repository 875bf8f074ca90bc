"""A stand-in for a vLLM server with a stock NIXL connector: its `kv_transfer_params`, who waits, who holds what.

What it imitates was read in vLLM 0.31 (nixl/{pull,push}_scheduler.py, nixl/push_worker.py,
entrypoints/generate/base/serving.py) and seen on real servers, which tests/vllm/test_nixl.py runs.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from aiohttp import web

from tests.support.stub_worker import StubWorker


class Link:
    """What the two connectors tell each other beside HTTP."""

    def __init__(self) -> None:
        self.held: set[str] = set()  # requests whose KV prefill keeps
        self.complete: dict[str, asyncio.Event] = {}  # push: request id -> prefill is complete
        self.freed: asyncio.Queue[str] = asyncio.Queue()

    def completion(self, request_id: str) -> asyncio.Event:
        return self.complete.setdefault(request_id, asyncio.Event())

    def free(self, request_id: str) -> None:
        if request_id in self.held:
            self.held.discard(request_id)
            self.freed.put_nowait(request_id)


class NixlWorker(StubWorker):
    """One stub; `link` is shared by both of a pair."""

    def __init__(
        self,
        name: str,
        prefer: Literal["prefill", "decode"],
        link: Link,
        connector: Literal["nixl", "nixl-push"] = "nixl",
    ) -> None:
        super().__init__(name, prefer)
        self.engine_kind, self.stock, self.connector, self.kv = "vllm", True, connector, None
        self.link = link
        self.engine_id = f"engine-of-{name}"
        self.configured = True  # False: no --kv-transfer-config, so params are ignored
        self.known: set[str] | None = None  # engine ids whose handshake works; None: all
        self.in_turn: list[bool] = []  # decode legs: had prefill answered already?

    def _role(self, body: dict[str, Any]) -> tuple[str, str]:
        params = body.get("kv_transfer_params") or {}
        if not self.configured or not params:
            return "local", ""
        return ("prefill", "") if params["do_remote_decode"] else ("decode", params["remote_request_id"])

    async def _behave(self, request: web.Request, body: dict[str, Any], role: str, transfer_id: str) -> Any:
        if body.get("model") == "tollbridge-release":
            self.link.free(transfer_id)
            return web.json_response({"error": {"message": "The model does not exist.", "param": "model"}}, status=404)
        request_id = request.headers["x-request-id"]
        if role == "decode":
            self.usage_details = {"cached_tokens": await self._load(body["kv_transfer_params"], request_id)}
        else:
            self.usage_details = {"cached_tokens": 0}
        answer = await super()._behave(request, body, role, transfer_id)
        if role == "prefill" and answer.status == 200:
            self.link.held.add(f"cmpl-{request_id}-0-deadbeef")
            self.link.completion(request_id).set()
        return answer

    async def _load(self, params: dict[str, Any], request_id: str) -> int:
        """Return how many tokens came; a decode whose prefill never completes waits for ever, as the real one does."""
        self.in_turn.append(params["remote_block_ids"] is not None)
        if self.known is not None and params["remote_engine_id"] not in self.known:
            return 0  # the handshake failed: recomputed
        if self.connector == "nixl-push":
            await self.link.completion(request_id).wait()
        self.link.free(params["remote_request_id"])
        return self.prompt_tokens - 1

    def _whole(self, body: dict[str, Any], report: Any) -> dict[str, Any]:
        whole = super()._whole(body, report)
        params = body.get("kv_transfer_params") or {}
        if self.configured and params.get("do_remote_decode"):
            request_id = self.seen[-1].headers["x-request-id"]
            whole["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
                "remote_engine_id": self.engine_id, "remote_request_id": f"cmpl-{request_id}-0-deadbeef",
                "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
                "remote_num_tokens": self.prompt_tokens, "remote_blocks_expiry_time": None,
                "transfer_mode": "push" if self.connector == "nixl-push" else "pull", "remote_prefill_cached_tokens": 0,
            }  # fmt: skip
        return whole
