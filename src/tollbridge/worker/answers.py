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
from tollbridge.worker.tools import Said


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
        said = self._said(output.text, is_last=output.finish_reason is not None)
        delta = wire.ChatDelta(
            content=said.content, role="assistant" if first else UNSET, tool_calls=said.calls or UNSET
        )
        choice = wire.ChatChunkChoice(delta=delta, **self._ending(output, output.token_ids))
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
        said = self._said(text, is_last=True)
        calls = [msgspec.structs.replace(call, index=UNSET) for call in said.calls]
        message = wire.ChatMessage(content=said.content or (None if calls else ""), tool_calls=calls or UNSET)
        choice = wire.ChatChoice(message=message, **self._ending(finish, token_ids))
        return _encode(
            wire.ChatCompletion(
                choices=[choice],
                usage=usage(self._job, len(token_ids), finish.report),
                kv_transfer_params=_report(self._job, finish),
                prompt_token_ids=_prompt_ids(self._job),
                **self._common,
            )
        )

    def _said(self, text: str, *, is_last: bool) -> Said:
        return self._job.tools.feed(text, is_last=is_last) if self._job.tools is not None else Said(content=text)

    def _ending(self, output: StepOutput, token_ids: list[int] | tuple[int, ...]) -> dict[str, Any]:
        ending = _ending(self._job, output, token_ids)
        has_called = self._job.tools is not None and self._job.tools.num_calls > 0
        return ending | {"finish_reason": "tool_calls"} if has_called and output.finish_reason == "stop" else ending


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
