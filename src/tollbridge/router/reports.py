"""A worker's own words -> Report: our /tollbridge/status, or the few lines of vLLM's /metrics about its load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tollbridge.router.load import Report

# A vLLM server shows some thousand lines, of which these count: the rest is never parsed.
_WANTED = (
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting{",
    b"vllm:kv_cache_usage_perc",
    b"vllm:cache_config_info",
    b"vllm:request_prompt_tokens_sum",
    b"vllm:request_prompt_tokens_count",
    b"vllm:tollbridge_pinned_blocks",  # these are our connector's
    b"vllm:tollbridge_max_pinned_blocks",
    b"vllm:tollbridge_waiting_prefill_tokens",
    b"vllm:tollbridge_kv_bytes_per_token",
    b"vllm:tollbridge_max_num_batched_tokens",
)


class _Engine(msgspec.Struct, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_pinned_blocks: int = 0
    max_pinned_blocks: int = 0
    waiting_prefill_tokens: int | None = None
    max_num_batched_tokens: int = 0


class _Transfers(msgspec.Struct, frozen=True):
    active: int = 0
    pending_bytes: float = 0.0


class _Status(msgspec.Struct, frozen=True):
    block_size: int = 0
    kv_bytes_per_token: float = 0.0
    engine: _Engine = _Engine()
    transfer: Mapping[str, _Transfers] = {}


def from_status(status: Mapping[str, Any]) -> Report | None:
    """Return what /tollbridge/status says, None when it is not what a worker of ours says."""
    try:
        told = msgspec.convert(status, type=_Status)
    except msgspec.ValidationError:
        return None
    engine, block = told.engine, told.block_size
    send, receive = told.transfer.get("send"), told.transfer.get("receive")
    return Report(
        block_size=block,
        kv_bytes_per_token=told.kv_bytes_per_token,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        num_running=engine.num_running,
        num_waiting=engine.num_waiting + engine.num_parked,
        waiting_prefill_tokens=engine.waiting_prefill_tokens,
        free_kv_tokens=engine.num_free_blocks * block if engine.num_blocks else None,
        total_kv_tokens=engine.num_blocks * block if engine.num_blocks else None,
        pinned_tokens=engine.num_pinned_blocks * block,
        pinned_full=0 < engine.max_pinned_blocks <= engine.num_pinned_blocks,
        num_sending=send.active if send else None,
        sending_bytes=send.pending_bytes if send else 0.0,
        num_receiving=receive.active if receive else None,
        receiving_bytes=receive.pending_bytes if receive else 0.0,
    )


def from_metrics(text: bytes, *, known: Report) -> Report | None:
    """Return what a vLLM server's /metrics say, summed over its data-parallel engines; None when they are not vLLM's.

    What they do not say stays as `known`. How many prompt tokens wait, only our connector says: with others the mean
    prompt, times the requests that wait, has to do.
    """
    wanted = b"\n".join(line for line in text.splitlines() if line.startswith(_WANTED))
    try:
        families = text_string_to_metric_families(wanted.decode())
        samples = [sample for family in families for sample in family.samples]
    except ValueError:
        return None
    if not samples:
        return None
    total, free, block = _room(samples)
    prompts = _sum(samples, "vllm:request_prompt_tokens_count")
    pinned, bound = (_sum(samples, f"vllm:tollbridge_{name}") for name in ("pinned_blocks", "max_pinned_blocks"))
    waiting = "vllm:tollbridge_waiting_prefill_tokens"
    return Report(
        block_size=block,
        kv_bytes_per_token=_most(samples, "vllm:tollbridge_kv_bytes_per_token") or known.kv_bytes_per_token,
        max_num_batched_tokens=int(_most(samples, "vllm:tollbridge_max_num_batched_tokens"))
        or known.max_num_batched_tokens,
        num_running=int(_sum(samples, "vllm:num_requests_running")),
        num_waiting=int(_sum(samples, "vllm:num_requests_waiting")),
        waiting_prefill_tokens=int(_sum(samples, waiting)) if any(each.name == waiting for each in samples) else None,
        pinned_tokens=int(pinned) * block,
        pinned_full=0 < bound <= pinned,
        free_kv_tokens=free,
        total_kv_tokens=total,
        mean_prompt_tokens=_sum(samples, "vllm:request_prompt_tokens_sum") / prompts if prompts else 0.0,
        caches_prefixes=not any(
            each.name == "vllm:cache_config_info" and each.labels.get("enable_prefix_caching") == "False"
            for each in samples
        ),
    )


def _room(samples: Iterable[Sample]) -> tuple[int | None, int | None, int]:
    """Return (all tokens, free tokens, block size) of the KV cache."""
    usage = {each.labels.get("engine"): each.value for each in samples if each.name == "vllm:kv_cache_usage_perc"}
    total, free, block = 0, 0.0, 0
    for each in samples:
        if each.name != "vllm:cache_config_info":
            continue
        num_blocks, size = each.labels.get("num_gpu_blocks", ""), each.labels.get("block_size", "")
        if num_blocks.isdigit() and size.isdigit():
            block = int(size)
            total += int(num_blocks) * block
            free += int(num_blocks) * block * (1 - usage.get(each.labels.get("engine"), 0.0))
    return (total, int(free), block) if total else (None, None, block)


def _most(samples: Iterable[Sample], name: str) -> float:
    """Return what each of the engines says of itself, 0 when none does."""
    return max((each.value for each in samples if each.name == name), default=0.0)


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)
