"""What a worker tells the router about one leg: `kv_transfer_params` of vLLM's (non-streaming) answer."""

from __future__ import annotations

from typing import Any

import msgspec

from tollbridge.transfer.base import TransferEnd
from tollbridge.vllm.admission import Leg, Refused
from tollbridge.wire.params import WorkerReport

DECLINED = "declined"  # reason: this worker did not split the request at all


def send_report(leg: Leg, *, cached_tokens: int, computed_tokens: int) -> dict[str, Any]:
    """Report a prefill leg. Its send goes on, so there is no TransferEnd yet; decode's leg has one."""
    return _wrap(
        WorkerReport(
            role="prefill",
            prompt_tokens=leg.num_tokens,
            computed_tokens=max(0, computed_tokens - cached_tokens),
            cached_tokens=cached_tokens,
        )
    )


def load_report(leg: Leg, *, cached_tokens: int, num_tokens: int, end: TransferEnd | None) -> dict[str, Any]:
    """Report a decode leg: how many tokens were accepted over the wire, and how many it computed itself."""
    loaded = num_tokens if end is not None and end.outcome == "done" else 0
    return _wrap(
        WorkerReport(
            role="decode",
            prompt_tokens=leg.num_tokens,
            computed_tokens=leg.num_tokens - cached_tokens - loaded,
            cached_tokens=cached_tokens,
            loaded_tokens=loaded,
            transfer=end,
        )
    )


def refused_report(refused: Refused) -> dict[str, Any]:
    """Report a request that was served locally although it came with a role."""
    end = TransferEnd(
        transfer_id=refused.transfer_id,
        side="send" if refused.role == "prefill" else "receive",
        outcome="failed",
        reason=DECLINED,
        detail=refused.detail,
    )
    return _wrap(WorkerReport(role="local", transfer=end))


def _wrap(report: WorkerReport) -> dict[str, Any]:
    return {"tollbridge": msgspec.to_builtins(report)}
