"""Did a split really happen? Compares what the decode worker loaded with what it lacked."""

from __future__ import annotations

from typing import NamedTuple

from tollbridge.router.stream import Usage
from tollbridge.wire.params import WorkerReport


class Verdict(NamedTuple):
    verified: bool
    reason: str = ""  # a short code, empty when verified
    why: str = ""  # one sentence for a person


def verify_split(report: WorkerReport | None, usage: Usage | None = None) -> Verdict:
    """Return whether the decode worker loaded all the KV that it lacked.

    A prompt of n tokens with h in the worker's own prefix cache lacks n - 1 - h: the last token is computed there, for
    its logits. vLLM sends its report with answers that are not streamed only; on a stream its usage must do.
    """
    if report is None:
        return _verify_by_usage(usage)
    lacked = max(report.prompt_tokens - 1 - report.cached_tokens, 0)
    if report.loaded_tokens >= lacked:
        return Verdict(True)
    why = f"The decode worker lacked {lacked} tokens of KV and loaded {report.loaded_tokens}, so it computed the rest"
    transfer = report.transfer
    if transfer is None:
        return Verdict(False, "no_transfer", f"{why}; it opened no transfer.")
    if transfer.outcome == "done" and not transfer.reason:
        return Verdict(False, "partial", f"{why}.")
    detail = (transfer.detail or transfer.reason).rstrip(".")
    return Verdict(False, transfer.reason or transfer.outcome, f"{why}: {detail}.")


def _verify_by_usage(usage: Usage | None) -> Verdict:
    if usage is None or usage.cached_tokens is None:
        why = (
            "The decode worker sent no report: nobody knows whether it loaded any KV "
            "(vLLM says so with --enable-prompt-tokens-details)."
        )
        return Verdict(False, "no_report", why)
    lacked = usage.prompt_tokens - 1
    if usage.cached_tokens >= lacked:
        return Verdict(True)
    why = f"The decode worker had {usage.cached_tokens} of {lacked} prompt tokens from its cache or over the wire"
    return Verdict(False, "not_loaded", f"{why}, and computed the rest.")
