"""Tool calls in a model's text, as Hermes and Qwen models write them:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>

The chat template describes the tools to the model; this reads what it answers. Text passes as it comes, but for what
may be the beginning of a tag. A call is told when it is complete; what turns out to be none comes as text. A call that
the request demands (`forced.py`) is told as far as it got, if the answer ends within its arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field

import msgspec

from tollbridge.errors import RequestError
from tollbridge.wire.openai import ChatCompletionRequest, FunctionCall, Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_OPENING = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*+"), "arguments": ')


class _Written(msgspec.Struct, frozen=True):
    """A call as the model writes it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass
class Said:
    """What a piece of text amounts to."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolReader:
    """Reads one answer, piece by piece. With `only_one` calls beyond the first are dropped; `is_forced`: it is a call.

    `finish_reason` is what tells the client that the answer ended with calls.
    """

    def __init__(self, *, only_one: bool = False, is_forced: bool = False, finish_reason: str = "tool_calls") -> None:
        self.finish_reason = finish_reason
        self._only_one = only_one
        self._is_forced = is_forced
        self._rest = ""  # text that may be a tag or the start of one, or the inside of a call
        self._is_inside = False
        self._skips_space = False  # models write line breaks between calls
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool = False) -> Said:
        """Return what is known after `text`; with the last piece all of it is."""
        said = Said()
        self._rest += text
        while self._inside(said) if self._is_inside else self._outside(said):
            pass
        if is_last:
            self._end(said)
        return said

    def _outside(self, said: Said) -> bool:
        """Pass text up to the next tag; return whether there was one."""
        before, tag, after = self._rest.partition(OPEN)
        if tag:
            self._is_inside, self._rest = True, after
        else:
            kept = _overlap(before, OPEN)
            before, self._rest = before[: len(before) - kept], before[len(before) - kept :]
        self._pass(said, before)
        return bool(tag)

    def _inside(self, said: Said) -> bool:
        """Take a call that is complete; return whether there was one."""
        inner, tag, after = self._rest.partition(CLOSE)
        if tag:
            self._is_inside, self._rest = False, after
            self._take(said, inner, OPEN + inner + CLOSE)
        return bool(tag)

    def _end(self, said: Said) -> None:
        rest, self._rest = self._rest, ""
        if self._is_inside:
            self._take(said, rest, OPEN + rest)  # models forget the closing tag
        else:
            self._pass(said, rest)

    def _pass(self, said: Said, text: str) -> None:
        text = text.lstrip() if self._skips_space else text
        self._skips_space = self._skips_space and not text
        said.content += text

    def _take(self, said: Said, inner: str, raw: str) -> None:
        call = _maybe_call(inner) or (_maybe_cut(inner) if self._is_forced else None)
        if call is None:
            said.content += raw
            return
        self._skips_space = True
        if self._only_one and self.num_calls:
            return
        said.calls.append(ToolCall(id=f"call_{secrets.token_hex(12)}", function=call, index=self.num_calls))
        self.num_calls += 1


def check_tools(asked: ChatCompletionRequest) -> None:
    """Refuse a choice of tools that contradicts itself."""
    choice, tools = asked.tool_choice, asked.tools
    if tools is not None and not tools:
        raise RequestError('Parameter "tools" must not be empty: leave it out.', param="tools")
    if choice is None or choice == "none":
        return
    if tools is None:
        raise RequestError('Parameter "tool_choice" needs "tools".', param="tool_choice")
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            known = "none, auto, required or one of the tools"
            raise RequestError(f'Parameter "tool_choice" must be {known}.', param="tool_choice")
        return
    names = [tool.function.name for tool in tools]
    if choice.function.name not in names:
        raise RequestError(f'Parameter "tool_choice" names none of {", ".join(names)[:200]}.', param="tool_choice")


def maybe_reader(asked: ChatCompletionRequest) -> ToolReader | None:
    """Return what reads the answer to `asked`, None when no tool may be called."""
    choice = asked.tool_choice
    if asked.tools is None or choice == "none":
        return None
    return ToolReader(
        only_one=not asked.parallel_tool_calls,
        is_forced=choice not in (None, "auto"),
        finish_reason="stop" if isinstance(choice, Tool) else "tool_calls",  # as OpenAI and vLLM
    )


def call_opening(name: str) -> str:
    """Return what a call of a tool begins with, up to its arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def _maybe_call(inner: str) -> FunctionCall | None:
    """Return the call between the tags, None when there is none."""
    try:
        written = msgspec.json.decode(inner, type=_Written)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return FunctionCall(name=written.name, arguments=_arguments(bytes(written.arguments)))


def _maybe_cut(inner: str) -> FunctionCall | None:
    """Return a call that ends within its arguments, None when it does not get so far."""
    opening = _OPENING.match(inner)
    return FunctionCall(name=json.loads(opening[1]), arguments=inner[opening.end() :]) if opening else None


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may be the start of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def _arguments(raw: bytes) -> str:
    """Return the JSON of the arguments; a model that has encoded them itself is taken at its word."""
    return msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
