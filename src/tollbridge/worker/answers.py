"""⑥ Engine outputs -> OpenAI bodies and chunks, as bytes. Pure; shapes are vLLM's.

A chunk carries what one engine step added to one choice; the finish rides on the choice's last chunk, the worker's
report on that of the first choice when the router asked for it; usage follows in a chunk of its own with no choices.
What is streamed is returned as events, framed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tollbridge.engine.base import PromptLogprobs as EnginePromptLogprobs
from tollbridge.engine.base import StepOutput, Tokenizer, TokenLogprobs
from tollbridge.errors import TollbridgeError
from tollbridge.wire import openai as wire
from tollbridge.wire import sse
from tollbridge.wire.params import WorkerReport
from tollbridge.worker.job import Branch, Job
from tollbridge.worker.logprobs import Spell, chat_logprobs, completion_logprobs, prompt_logprobs
from tollbridge.worker.tools import Said


@dataclass(kw_only=True)
class Choice:
    """What one branch has said, so far or in all."""

    branch: Branch
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: EnginePromptLogprobs | None = None
    num_characters: int = 0  # told
    last: StepOutput | None = None

    def take(self, output: StepOutput) -> None:
        """Add what a step brought."""
        self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.last = output


class Answer(Protocol):
    """How the answer to one request is written."""

    def chunk(self, choice: Choice, output: StepOutput) -> bytes:
        """Return the events that tell of `output`, which `choice` has taken."""
        ...

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the events that end the stream of a whole answer."""
        ...

    def failure(self, error: TollbridgeError) -> bytes:
        """Return the events that end the stream of an answer that is cut off."""
        ...

    def whole(self, choices: Sequence[Choice]) -> bytes: ...


def answer_for(job: Job, tokenizer: Tokenizer) -> Answer:
    spell = _as_ids if job.tokens_as_ids else _speller(tokenizer)
    if job.kind == "generate":
        return TokensAnswer(job)
    return ChatAnswer(job, spell) if job.kind == "chat" else CompletionAnswer(job, spell)


class _Chunked(ABC):
    """How the streams end whose events are chunks."""

    _job: Job

    def end(self, choices: Sequence[Choice]) -> bytes:
        usage_chunk = sse.event(self._usage_chunk(choices)) if self._job.include_usage else b""
        return usage_chunk + sse.DONE

    def failure(self, error: TollbridgeError) -> bytes:
        return sse.event(_encode(wire.error_body(error))) + sse.DONE

    @abstractmethod
    def _usage_chunk(self, choices: Sequence[Choice]) -> bytes: ...


class CompletionAnswer(_Chunked):
    """`POST /v1/completions`."""

    def __init__(self, job: Job, spell: Spell) -> None:
        self._job = job
        self._spell = spell
        self._common = _common(job)

    def chunk(self, choice: Choice, output: StepOutput) -> bytes:
        first = len(choice.texts) == 1
        text, logprobs = self._said(choice, output, echoes=first, offset=choice.num_characters)
        choice.num_characters += len(text)
        told = wire.CompletionChoice(
            text=text,
            logprobs=logprobs,
            prompt_token_ids=_prompt_ids(self._job, choice) if first else UNSET,
            **_ending(self._job, choice, output),
        )
        extras = _chunk_extras(self._job, choice, output)
        return sse.event(_encode(wire.Completion(choices=[told], **self._common, **extras)))

    def _usage_chunk(self, choices: Sequence[Choice]) -> bytes:
        return _encode(wire.Completion(choices=[], usage=usage(choices), **self._common))

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return _encode(
            wire.Completion(
                choices=[self._whole(choice) for choice in choices],
                usage=usage(choices),
                kv_transfer_params=_report(self._job, choices[0], choices[0].last),
                **self._common,
            )
        )

    def _whole(self, choice: Choice) -> wire.CompletionChoice:
        all_of_it = _in_one(choice)
        text, logprobs = self._said(choice, all_of_it, echoes=True, offset=0)
        return wire.CompletionChoice(
            text=text,
            logprobs=logprobs,
            prompt_logprobs=_prompt_logprobs(self._spell, choice),
            prompt_token_ids=_prompt_ids(self._job, choice),
            **_ending(self._job, choice, all_of_it),
        )

    def _said(
        self, choice: Choice, output: StepOutput, *, echoes: bool, offset: int
    ) -> tuple[str, wire.CompletionLogprobs | None]:
        """Return text and log probabilities of a chunk, with those of the prompt in front where they are echoed."""
        text, ids, found = output.text, list(output.token_ids), list[TokenLogprobs | None](output.logprobs)
        branch = choice.branch
        if branch.echo is not None and echoes:
            if self._job.only_echoes:
                text, ids, found = "", [], []
            text, ids = branch.echo + text, branch.prompt_token_ids + ids
            found = [*(choice.prompt_logprobs or ()), *found]
        num_top = branch.sampling.logprobs
        if num_top is None:
            return text, None
        return text, completion_logprobs(self._spell, ids, found, num_top, offset=offset)


class ChatAnswer(_Chunked):
    """`POST /v1/chat/completions`."""

    def __init__(self, job: Job, spell: Spell) -> None:
        self._job = job
        self._spell = spell
        self._common = _common(job)

    def chunk(self, choice: Choice, output: StepOutput) -> bytes:
        first = len(choice.texts) == 1
        said = _said(choice, output)
        delta = wire.ChatDelta(
            content=said.content, role="assistant" if first else UNSET, tool_calls=said.calls or UNSET
        )
        told = wire.ChatChunkChoice(
            delta=delta, logprobs=self._logprobs(choice, output), **self._ending(choice, output)
        )
        chunk = wire.ChatCompletionChunk(
            choices=[told],
            prompt_token_ids=_prompt_ids(self._job, choice) if first else UNSET,
            **self._common,
            **_chunk_extras(self._job, choice, output),
        )
        return sse.event(_encode(chunk))

    def _usage_chunk(self, choices: Sequence[Choice]) -> bytes:
        return _encode(wire.ChatCompletionChunk(choices=[], usage=usage(choices), **self._common))

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return _encode(
            wire.ChatCompletion(
                choices=[self._whole(choice) for choice in choices],
                usage=usage(choices),
                kv_transfer_params=_report(self._job, choices[0], choices[0].last),
                prompt_logprobs=_prompt_logprobs(self._spell, choices[0]),
                prompt_token_ids=_prompt_ids(self._job, choices[0]),
                **self._common,
            )
        )

    def _whole(self, choice: Choice) -> wire.ChatChoice:
        all_of_it = _in_one(choice)
        said = _said(choice, all_of_it)
        calls = [msgspec.structs.replace(call, index=UNSET) for call in said.calls]
        message = wire.ChatMessage(content=said.content or (None if calls else ""), tool_calls=calls or UNSET)
        logprobs = self._logprobs(choice, all_of_it)
        return wire.ChatChoice(message=message, logprobs=logprobs, **self._ending(choice, all_of_it))

    def _ending(self, choice: Choice, output: StepOutput) -> dict[str, Any]:
        ending, tools = _ending(self._job, choice, output), choice.branch.tools
        if tools is None or not tools.num_calls or output.finish_reason != "stop":
            return ending
        return ending | {"finish_reason": tools.finish_reason}

    def _logprobs(self, choice: Choice, output: StepOutput) -> wire.ChatLogprobs | None:
        num_top = choice.branch.sampling.logprobs
        if num_top is None:
            return None
        return chat_logprobs(self._spell, output.token_ids, output.logprobs, num_top)


class TokensAnswer(_Chunked):
    """`POST /inference/v1/generate`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def chunk(self, choice: Choice, output: StepOutput) -> bytes:
        chunk = wire.Tokens(
            request_id=self._job.id,
            choices=[self._choice(choice, output)],
            prompt_token_ids=_prompt_ids(self._job, choice) if len(choice.texts) == 1 else UNSET,
            usage=usage([choice]) if self._job.continuous_usage else None,
            kv_transfer_params=_report(self._job, choice, output),
        )
        return sse.event(_encode(chunk))

    def _usage_chunk(self, choices: Sequence[Choice]) -> bytes:
        return _encode(wire.Tokens(request_id=self._job.id, choices=[], usage=usage(choices)))

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return _encode(
            wire.Tokens(
                request_id=self._job.id,
                model=self._job.model,
                created=self._job.created,
                choices=[self._choice(choice, _in_one(choice)) for choice in choices],
                usage=usage(choices),
                prompt_logprobs=_prompt_logprobs(_as_ids, choices[0]),
                prompt_token_ids=_prompt_ids(self._job, choices[0]),
                kv_transfer_params=_report(self._job, choices[0], choices[0].last),
            )
        )

    @staticmethod
    def _choice(choice: Choice, output: StepOutput) -> wire.TokensChoice:
        num_top = choice.branch.sampling.logprobs
        found = None if num_top is None else chat_logprobs(_as_ids, output.token_ids, output.logprobs, num_top)
        return wire.TokensChoice(
            index=choice.branch.index,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason,
            logprobs=found,
        )


def _said(choice: Choice, output: StepOutput) -> Said:
    """Return the text of an output with the tool calls taken out of it."""
    tools = choice.branch.tools
    return tools.feed(output.text, is_last=output.finish_reason is not None) if tools else Said(content=output.text)


def usage(choices: Sequence[Choice]) -> wire.Usage:
    """Return the tokens used, each prompt counted once; cached ones are known with the report, which ends a branch."""
    leaders = [choice for choice in choices if choice.branch.leader is None]
    prompts = sum(len(choice.branch.prompt_token_ids) for choice in leaders)
    reports = [choice.last.report for choice in leaders if choice.last is not None and choice.last.report is not None]
    generated = sum(len(choice.token_ids) for choice in choices)
    return wire.Usage(
        prompt_tokens=prompts,
        completion_tokens=generated,
        total_tokens=prompts + generated,
        prompt_tokens_details=wire.PromptTokensDetails(cached_tokens=sum(map(_cached, reports))) if reports else None,
    )


def _cached(report: WorkerReport) -> int:
    return report.cached_tokens + report.loaded_tokens


def _in_one(choice: Choice) -> StepOutput:
    """Return all outputs of a finished branch as one."""
    assert choice.last is not None
    return StepOutput(
        request_id=choice.last.request_id,
        token_ids=tuple(choice.token_ids),
        text="".join(choice.texts),
        logprobs=tuple(choice.logprobs),
        finish_reason=choice.last.finish_reason,
        stop_reason=choice.last.stop_reason,
        report=choice.last.report,
    )


def _common(job: Job) -> dict[str, Any]:
    return {"id": job.id, "created": job.created, "model": job.model}


def _ending(job: Job, choice: Choice, output: StepOutput) -> dict[str, Any]:
    return {
        "index": choice.branch.index,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": list(output.token_ids) if job.return_token_ids else UNSET,
    }


def _chunk_extras(job: Job, choice: Choice, output: StepOutput) -> dict[str, Any]:
    return {
        "usage": usage([choice]) if job.continuous_usage else UNSET,
        "kv_transfer_params": _report(job, choice, output),
    }


def _report(job: Job, choice: Choice, output: StepOutput | None) -> dict[str, Any] | UnsetType:
    if not job.wants_report or choice.branch.index != 0 or output is None or output.report is None:
        return UNSET
    return {"tollbridge": output.report}


def _prompt_ids(job: Job, choice: Choice) -> list[int] | UnsetType:
    return choice.branch.prompt_token_ids if job.return_token_ids else UNSET


def _prompt_logprobs(spell: Spell, choice: Choice) -> wire.PromptLogprobs | UnsetType:
    wanted = choice.branch.sampling.prompt_logprobs is not None and choice.prompt_logprobs is not None
    return prompt_logprobs(spell, choice.prompt_logprobs or ()) if wanted else UNSET


def _speller(tokenizer: Tokenizer) -> Spell:
    spelled: dict[int, str] = {}  # of one answer: the same tokens are likely again and again

    def spell(token_id: int) -> str:
        if token_id not in spelled:
            spelled[token_id] = tokenizer.decode([token_id], skip_special_tokens=False)
        return spelled[token_id]

    return spell


def _as_ids(token_id: int) -> str:
    return f"token_id:{token_id}"


_encode = msgspec.json.encode
