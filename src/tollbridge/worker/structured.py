"""What shape a request wants its output to have: `response_format` and `structured_outputs`, as the engine's
`Structure`."""

from __future__ import annotations

import msgspec

from tollbridge.engine.base import Structure
from tollbridge.errors import RequestError
from tollbridge.wire.openai import ResponseFormat, StructuredOutputs


def maybe_structure(wanted: ResponseFormat | None, outputs: StructuredOutputs | None) -> Structure | None:
    """Return the one structure that is asked for; RequestError when there are two, or half a one."""
    first = _from_format(wanted) if wanted is not None else None
    second = _from_outputs(outputs) if outputs is not None else None
    if first and second:
        raise RequestError('Send either "response_format" or "structured_outputs".', param="structured_outputs")
    return first or second


def param_of(structure: Structure, wanted: ResponseFormat | None) -> str:
    """Return the parameter that a structure came from."""
    if structure.kind == "calls":
        return "tools"
    return "response_format" if wanted is not None and wanted.type != "text" else "structured_outputs"


def _from_format(wanted: ResponseFormat) -> Structure | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Structure("json_object")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise RequestError(
            'A "response_format" of type json_schema needs "json_schema" with a "schema".', param="response_format"
        )
    return Structure("json", msgspec.json.encode(wanted.json_schema.schema).decode())


def _from_outputs(outputs: StructuredOutputs) -> Structure:
    found = []
    if outputs.json is not None:
        schema = outputs.json if isinstance(outputs.json, str) else msgspec.json.encode(outputs.json).decode()
        found.append(Structure("json", schema))
    if outputs.json_object:
        found.append(Structure("json_object"))
    if outputs.regex is not None:
        found.append(Structure("regex", outputs.regex))
    if outputs.choice is not None:
        found.append(Structure("choice", msgspec.json.encode(outputs.choice).decode()))
    if outputs.grammar is not None:
        found.append(Structure("grammar", outputs.grammar))
    if len(found) != 1 or outputs.choice == []:
        raise RequestError(
            'Parameter "structured_outputs" must have one of json, json_object, regex, choice and grammar.',
            param="structured_outputs",
        )
    return found[0]
