"""The messages of a chat, checked, as the chat template takes them. Pure.

A template gets what OpenAI's clients send, but for two things that every template expects otherwise: the content is one
text, and the arguments of an earlier tool call are an object, where the wire has the JSON of one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tollbridge.engine.base import ChatOptions
from tollbridge.errors import RequestError, UnsupportedError
from tollbridge.wire.openai import ChatCompletionRequest, TokenizeRequest

KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct, frozen=True):
    function: _Function
    id: str | None = None
    type: str = "function"


def chat_options(asked: ChatCompletionRequest | TokenizeRequest, *, add_special_tokens: bool = False) -> ChatOptions:
    """Return what shapes the prompt of `asked` besides its messages; RequestError when it contradicts itself."""
    if asked.continue_final_message and asked.add_generation_prompt:
        raise RequestError(
            'Parameter "continue_final_message" needs "add_generation_prompt": false.', param="continue_final_message"
        )
    return ChatOptions(
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=add_special_tokens,
        tools=[msgspec.to_builtins(tool) for tool in asked.tools] if asked.tools is not None else None,
        template_kwargs=asked.chat_template_kwargs or {},
    )


def plain_message(index: int, message: dict[str, Any]) -> dict[str, object]:
    """Check a message and join its text parts; what is neither text nor empty is refused."""
    where = f"messages[{index}]"
    for key, value in message.items():
        if key not in KEYS and value not in (None, [], ""):
            raise UnsupportedError(f'{where} has "{key[:64]}", which is not supported: leave it out.', param="messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f'{where} needs a "role" that is a string.', param="messages")
    plain: dict[str, object] = {key: message[key] for key in KEYS if message.get(key) not in (None, [])}
    if "tool_calls" in plain:
        plain["tool_calls"] = _calls(where, plain["tool_calls"])
    return plain | {"content": _content(where, message)}


def _content(where: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(_text_part(where, part) for part in content)  # as vLLM joins them
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, str):
        raise RequestError(f'{where} needs a "content" that is a string or a list of text parts.', param="messages")
    return content


def _text_part(where: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise UnsupportedError(
            f"{where} has a content part of type {str(kind)[:64]!r}: only text is supported.", param="messages"
        )
    return str(part["text"])


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Return earlier tool calls, their arguments read."""
    try:
        read = msgspec.convert(calls, list[_Call])
        return [
            {  # in the order of OpenAI's types, which a template that writes a whole call shows
                "id": call.id,
                "function": {"arguments": _arguments(call.function.arguments), "name": call.function.name},
                "type": call.type,
            }
            for call in read
        ]
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f'{where} has malformed "tool_calls": {error}.', param="messages") from None


def _arguments(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
