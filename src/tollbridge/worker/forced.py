"""A tool call that must come: the grammar of an answer to `tool_choice` "required", or to a named tool.

The model writes as it would of its own accord, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the grammar
leaves it the choice of the tool, where there is one, and the arguments that the tool's schema allows. Each schema is a
document of its own in the grammar, so that its references stay right. A tool without a schema takes no arguments, as
OpenAI has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tollbridge.engine.base import Structure
from tollbridge.errors import RequestError
from tollbridge.wire.openai import ChatCompletionRequest, Function, Tool
from tollbridge.worker.tools import CLOSE, OPEN, call_opening

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}
_ONE_LINE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def maybe_calls(asked: ChatCompletionRequest) -> Structure | None:
    """Return the structure of an answer that must be a call, None when it need not; RequestError for a wrong schema."""
    choice = asked.tool_choice
    if asked.tools is None or choice in (None, "none", "auto"):
        return None
    if isinstance(choice, Tool):
        return _calls([tool.function for tool in asked.tools if tool.function.name == choice.function.name][:1])
    return _calls([tool.function for tool in asked.tools], several=asked.parallel_tool_calls)


def _calls(functions: Sequence[Function], *, several: bool = False) -> Structure:
    """Return the structure of one call of one of `functions`, or of at least one; with line breaks or without."""
    rules = [
        'start: call ("\\n"? call)*' if several else "start: call",
        f'call: {_literal(OPEN)} ("\\n" object "\\n" | object) {_literal(CLOSE)}',
        "object: " + " | ".join(f"object_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        rules.append(f'object_{index}: {_literal(call_opening(function.name))} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {_schema(function)}")
    return Structure("calls", "\n".join(rules))


def _schema(function: Function) -> str:
    schema = {"type": "object"} | (function.parameters or _NO_ARGUMENTS) | _ONE_LINE
    if schema["type"] != "object":
        raise RequestError(f'The parameters of tool "{function.name[:64]}" must have the type "object".', param="tools")
    return msgspec.json.encode(schema).decode()


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
