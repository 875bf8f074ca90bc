"""JSON body -> request struct. Nothing is ignored: what the engine cannot do is refused by name, with the nearest name.

A parameter that the engine lacks is let through only at the value at which it asks for nothing (`"best_of": 1`),
because common clients always send some of these.
"""

from __future__ import annotations

import difflib
import re
from typing import TypeVar

import msgspec
from msgspec import Raw

from tollbridge.errors import RequestError, UnsupportedError

T = TypeVar("T", bound=msgspec.Struct)

_ONE = (b"1", b"1.0")

# Known to OpenAI or vLLM, absent here: name -> the JSON texts that mean "not wanted" (null always does).
NEUTRAL: dict[str, tuple[bytes, ...]] = {
    "background": (b"false",),  # this and some others: of a response
    "best_of": (b"1",),
    "chat_template": (),
    "conversation": (),
    "echo": (b"false",),  # of a chat
    "function_call": (b'"none"',),
    "functions": (b"[]",),
    "include": (b"[]",),
    "length_penalty": _ONE,
    "max_tool_calls": (),
    "metadata": (b"{}",),
    "modalities": (b'["text"]',),
    "parallel_tool_calls": (b"true", b"false"),  # where there are no tools
    "previous_response_id": (),
    "reasoning": (),
    "reasoning_effort": (),
    "service_tier": (b'"auto"', b'"default"'),
    "spaces_between_special_tokens": (b"true",),
    "store": (b"false",),
    "suffix": (b'""',),
    "tool_choice": (b'"auto"', b'"none"'),  # where there are no tools
    "tools": (b"[]",),
    "top_logprobs": (b"0",),  # of a completion, whose `logprobs` is the number
    "truncate_prompt_tokens": (),
    "truncation": (b'"disabled"',),
    "use_beam_search": (b"false",),
}

_fields = msgspec.json.Decoder(dict[str, Raw])


def parse(body: bytes, kind: type[T]) -> T:
    """Return the request in `body`; RequestError or UnsupportedError with one sentence otherwise."""
    raw = parse_fields(body)
    supported = set(kind.__struct_fields__)
    wanted = {name: value for name, value in raw.items() if bytes(value) != b"null"}
    for name in raw.keys() - supported:
        refuse_unless_neutral(name, raw[name], supported)
    try:
        return msgspec.json.decode(
            msgspec.json.encode({name: value for name, value in wanted.items() if name in supported}), type=kind
        )
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"The request body is not valid JSON: {_reason(error, len(body))}.") from None


def parse_fields(body: bytes | Raw) -> dict[str, Raw]:
    """Return the fields of a JSON object as they were written; RequestError when it is none."""
    try:
        return _fields.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(f"The request body must be a JSON object: {_lower(str(error))}.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"The request body is not valid JSON: {_reason(error, len(bytes(body)))}.") from None


def _reason(error: Exception, num_bytes: int) -> str:
    """Say what is wrong and where; msgspec gives the position of all faults but the end of the data."""
    text = _lower(str(error)).removeprefix("JSON is malformed: ").removeprefix("jSON is malformed: ")
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return text if "(byte " in text else f"{text} (byte {num_bytes})"


def refuse_unless_neutral(name: str, value: Raw, supported: set[str]) -> None:
    """Raise UnsupportedError for a field that is not among `supported`, unless its value asks for nothing."""
    if name in NEUTRAL:
        if bytes(value) == b"null" or bytes(value) in NEUTRAL[name]:
            return
        raise UnsupportedError(f'Parameter "{name}" is not supported by the embedded engine: leave it out.', param=name)
    shown = name if len(name) <= 64 else name[:64] + "…"
    near = difflib.get_close_matches(name[:64], sorted(supported), n=1)
    hint = f'did you mean "{near[0]}"?' if near else "leave it out."
    raise UnsupportedError(f'Parameter "{shown}" is not known: {hint}', param=shown)


def _wrong_field(error: msgspec.ValidationError) -> RequestError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.max_tokens`" into a sentence that begins with the field."""
    text = str(error)
    what, _, path = text.partition(" - at `$.")
    field = path.rstrip("`")
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        name = f"{field}.{missing[1]}" if field else missing[1]
        return RequestError(f'Parameter "{name}" is required.', param=re.split(r"[.\[]", name)[0])
    param = re.split(r"[.\[]", field)[0] or None
    return RequestError(f'Parameter "{field}": {_lower(what)}.' if field else f"{what}.", param=param)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
