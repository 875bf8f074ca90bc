"""Stand-ins for vLLM's objects and for a transfer medium, as far as the connector looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from tollbridge.transfer.base import LoadRequest, Published, TransferEnd, TransferStatistics
from tollbridge.wire.params import Role, TransferParams, sign

SECRET = b"unit-test-secret-0123456789"
BLOCK = 4


def transfer_id(number: int) -> str:
    return f"{number:032x}"


def kv_params(role: Role, number: int = 1, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "v": 1,
        "transfer_id": transfer_id(number),
        "role": role,
        "host": "127.0.0.1",
        "port": 7801,
        "expires": 2_000.0,
        **changes,
    }
    return {"tollbridge": msgspec.to_builtins(sign(TransferParams(**fields), SECRET))}


def request(request_id: str, params: object, num_tokens: int = 10, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "kv_transfer_params": params,
        "prompt_token_ids": list(range(num_tokens)),
        "num_tokens": num_tokens,
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "pooling_params": None,
        "resumable": False,
        "status": SimpleNamespace(name="WAITING"),
        **changes,
    }
    return SimpleNamespace(**fields)


def ended(vllm_request: Any, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    vllm_request.status = SimpleNamespace(name=status)
    return vllm_request


def scheduled(
    *,
    new: Sequence[tuple[str, int, int, Sequence[int]]] = (),
    cached: Sequence[tuple[str, int, int, Sequence[int] | None]] = (),
    resumed: Sequence[str] = (),
    preempted: Sequence[str] = (),
) -> Any:
    """Return a SchedulerOutput; `new` and `cached` hold (id, computed before, scheduled now, new blocks)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start, block_ids=(list(blocks),))
            for name, start, _, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            num_computed_tokens=[start for _, start, *_ in cached],
            new_block_ids=[None if blocks is None else (list(blocks),) for *_, blocks in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens={name: count for name, _, count, _ in [*new, *cached]},
        preempted_req_ids=set(preempted),
    )


def end(number: int, side: str = "send", outcome: str = "done", reason: str = "", **changes: Any) -> TransferEnd:
    fields = {"transfer_id": transfer_id(number), "side": side, "outcome": outcome, "reason": reason, **changes}
    return msgspec.convert(fields, TransferEnd)


@dataclass
class Medium:
    """Records what a KVSender or KVReceiver is asked; the test says when a transfer ends."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    ends: list[TransferEnd] = field(default_factory=list)
    loads: list[LoadRequest] = field(default_factory=list)
    error: Exception | None = None
    closed: bool = False
    address: tuple[str, int] = ("127.0.0.1", 7801)

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        self._maybe_fail()
        self.calls.append(("register", transfer_id, num_tokens))

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        assert len(block_table) >= num_tokens
        self.calls.append(("publish", transfer_id, num_tokens, layer))

    def publish_all(self, chunks: Sequence[Published], *, layer: int | None = None) -> None:
        for chunk in chunks:
            self.publish(*chunk, layer=layer)

    def rewind(self, transfer_id: str) -> None:
        self.calls.append(("rewind", transfer_id))

    def open(self, load: LoadRequest) -> None:
        self._maybe_fail()
        self.loads.append(load)

    def cancel(self, transfer_id: str, detail: str) -> None:
        self.calls.append(("cancel", transfer_id))

    def shed(self, transfer_ids: Sequence[str], max_blocks: int, *, unsent_too: bool) -> None:
        self.calls.append(("shed", tuple(transfer_ids), max_blocks, unsent_too))

    def poll(self) -> list[TransferEnd]:
        ends, self.ends = self.ends, []
        return ends

    def set_listener(self, notify: Callable[[], None]) -> None:
        self.notify = notify

    def end_now(self, end: TransferEnd) -> None:
        """End a transfer as a medium's thread does."""
        self.ends.append(end)
        self.notify()

    def statistics(self) -> TransferStatistics:
        raise NotImplementedError

    def check(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def _maybe_fail(self) -> None:
        if self.error is not None:
            raise self.error
