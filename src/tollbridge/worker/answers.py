"""⑥ Engine outputs -> OpenAI bodies and chunks, as bytes. Pure; shapes are vLLM's.

A chunk carries what one engine step added; the finish rides on the last chunk, with the worker's report when the
router asked for it; usage follows in a chunk of its own with no choices.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tollbridge.engine.base import StepOutput
from tollbridge.wire import openai as wire
from tollbridge.wire.params import WorkerReport
from tollbridge.worker.job import Job


class Answer(Protocol):
    """How the answer to one request is written."""

    def chunk(self, output: StepOutput, *, first: bool, num_tokens: int) -> bytes:
        """Return one chunk; `num_tokens` counts those generated so far."""
        ...

    def usage_chunk(self, num_tokens: int, report: WorkerReport | None) -> bytes: ...

    def whole(self, text: str, token_ids: list[int], finish: StepOutput) -> bytes: ...


def answer_for(job: Job) -> Answer:
    return ChatAnswer(job) if job.kind == "chat" else CompletionAnswer(job)


class CompletionAnswer:
    """`POST /v1/completions`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._common = _common(job)

    def chunk(self, output: StepOutput, *, first: bool, num_tokens: int) -> bytes:
        choice = wire.CompletionChoice(
            text=output.text,
            prompt_token_ids=_prompt_ids(self._job) if first else UNSET,
            **_ending(self._job, output, output.token_ids),
        )
        return _encode(
            wire.Completion(choices=[choice], **self._common, **_chunk_extras(self._job, output, num_tokens))
        )

    def usage_chunk(self, num_tokens: int, report: WorkerReport | None) -> bytes:
        return _encode(wire.Completion(choices=[], usage=usage(self._job, num_tokens, report), **self._common))

    def whole(self, text: str, token_ids: list[int], finish: StepOutput) -> bytes:
        choice = wire.CompletionChoice(
            text=text, prompt_token_ids=_prompt_ids(self._job), **_ending(self._job, finish, token_ids)
        )
        return _encode(
            wire.Completion(
                choices=[choice],
                usage=usage(self._job, len(token_ids), finish.report),
                kv_transfer_params=_report(self._job, finish),
                **self._common,
            )
        )


class ChatAnswer:
    """`POST /v1/chat/completions`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._common = _common(job)

    def chunk(self, output: StepOutput, *, first: bool, num_tokens: int) -> bytes:
        delta = wire.ChatDelta(content=output.text, role="assistant" if first else UNSET)
        choice = wire.ChatChunkChoice(delta=delta, **_ending(self._job, output, output.token_ids))
        return _encode(
            wire.ChatCompletionChunk(
                choices=[choice],
                prompt_token_ids=_prompt_ids(self._job) if first else UNSET,
                **self._common,
                **_chunk_extras(self._job, output, num_tokens),
            )
        )

    def usage_chunk(self, num_tokens: int, report: WorkerReport | None) -> bytes:
        return _encode(wire.ChatCompletionChunk(choices=[], usage=usage(self._job, num_tokens, report), **self._common))

    def whole(self, text: str, token_ids: list[int], finish: StepOutput) -> bytes:
        message = wire.ChatMessage(content=text)
        choice = wire.ChatChoice(message=message, **_ending(self._job, finish, token_ids))
        return _encode(
            wire.ChatCompletion(
                choices=[choice],
                usage=usage(self._job, len(token_ids), finish.report),
                kv_transfer_params=_report(self._job, finish),
                prompt_token_ids=_prompt_ids(self._job),
                **self._common,
            )
        )


def usage(job: Job, num_tokens: int, report: WorkerReport | None) -> wire.Usage:
    """Return the tokens used; cached ones are known with the report, which comes with the finish."""
    num_prompt_tokens = len(job.prompt_token_ids)
    details = None
    if report is not None:
        details = wire.PromptTokensDetails(cached_tokens=report.cached_tokens + report.loaded_tokens)
    return wire.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        prompt_tokens_details=details,
    )


def _common(job: Job) -> dict[str, Any]:
    return {"id": job.id, "created": job.created, "model": job.model}


def _ending(job: Job, output: StepOutput, token_ids: list[int] | tuple[int, ...]) -> dict[str, Any]:
    return {
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": list(token_ids) if job.return_token_ids else UNSET,
    }


def _chunk_extras(job: Job, output: StepOutput, num_tokens: int) -> dict[str, Any]:
    return {
        "usage": usage(job, num_tokens, output.report) if job.continuous_usage else UNSET,
        "kv_transfer_params": _report(job, output),
    }


def _report(job: Job, output: StepOutput) -> dict[str, Any] | UnsetType:
    return {"tollbridge": output.report} if job.wants_report and output.report is not None else UNSET


def _prompt_ids(job: Job) -> list[int] | UnsetType:
    return job.prompt_token_ids if job.return_token_ids else UNSET


_encode = msgspec.json.encode
