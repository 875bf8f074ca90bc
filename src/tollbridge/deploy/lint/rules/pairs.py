"""What prefill and decode must have in common: KV of one is read by the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.engines import Engine, literal
from tollbridge.deploy.lint.findings import Finding
from tollbridge.deploy.lint.rules.transfer import OURS, dynamo_moves_kv

_SAME: list[tuple[str, Callable[[Engine], str | None], str]] = [
    ("model", lambda engine: engine.model, "KV of another model is garbage"),
    ("model revision", lambda engine: engine.options.get("revision"), "KV of other weights is garbage"),
    ("--block-size", lambda engine: engine.options.get("block-size"), "blocks do not fit each other"),
    ("--dtype", lambda engine: engine.options.get("dtype"), "KV has another size per token"),
    ("--kv-cache-dtype", lambda engine: engine.options.get("kv-cache-dtype"), "KV has another size per token"),
    ("--quantization", lambda engine: engine.options.get("quantization"), "KV of other weights is not the same"),
    ("--served-model-name", lambda engine: engine.options.get("served-model-name"), "one of them refuses the request"),
    ("connector", lambda engine: engine.connector, "they do not speak to each other"),
    ("image", lambda engine: engine.image, "another vLLM has another KV layout and handshake"),
    ("PYTHONHASHSEED", lambda engine: literal(engine.container, "PYTHONHASHSEED"), "block hashes differ"),
    (
        "VLLM_ATTENTION_BACKEND",
        lambda engine: engine.options.get("attention-backend") or literal(engine.container, "VLLM_ATTENTION_BACKEND"),
        "the order of bytes inside a block differs",
    ),
]


def rules(case: Case) -> Iterator[Finding]:
    for prefill, decode in case.sides():
        first = prefill[0]
        for other in decode:
            yield from _same(first, other)
            yield from _parallel(first, other)
            yield from _length(first, other)
            yield from _connector_roles(first, other)


def _same(prefill: Engine, decode: Engine) -> Iterator[Finding]:
    for name, value, why in _SAME:
        left, right = value(prefill), value(decode)
        if name == "connector" and (_says_itself(prefill) or _says_itself(decode)):
            continue
        if left != right and not (name == "image" and _tag(left) == _tag(right)):
            shown = f"{left or 'not set'} on prefill, {right or 'not set'} on decode"
            yield decode.pod.finding(
                "roles-differ",
                f"{decode.path}.{'image' if name == 'image' else 'args'}",
                what=f"{name} is {shown}",
                why=f"{why}: each split fails, or computes everything again",
                mend=f"give both roles the same {name}",
            )


def _says_itself(engine: Engine) -> bool:
    """Whether the launcher chooses a connector; or none is set, which has a finding of its own."""
    return engine.transfer is None or dynamo_moves_kv(engine)


def _tag(image: str | None) -> str:
    return (image or "").rpartition("/")[2]


def _parallel(prefill: Engine, decode: Engine) -> Iterator[Finding]:
    name = "tensor-parallel-size"
    left, right = prefill.size(name), decode.size(name)
    where = f"{prefill.path}.args"
    if prefill.uses(OURS) and left != right:
        yield prefill.pod.finding(
            "tensor-parallel",
            where,
            what=f"prefill has {left} ranks, decode {right}",
            why="with the connector tollbridge every rank sends to its like",
            mend="give both the same --tensor-parallel-size",
        )
    elif left > right and prefill.transfer is not None:
        yield prefill.pod.finding(
            "tensor-parallel",
            where,
            what=f"prefill has {left} tensor-parallel ranks, decode only {right}",
            why="NIXL splits KV heads among more ranks and never joins them: an assertion ends the decode worker",
            mend="give prefill at most as many ranks as decode",
        )


def _length(prefill: Engine, decode: Engine) -> Iterator[Finding]:
    left, right = (_tokens(each.options.get("max-model-len")) for each in (prefill, decode))
    if left is not None and right is not None and left != right:
        shorter, side = (prefill, "prefill") if left < right else (decode, "decode")
        yield shorter.pod.finding(
            "roles-differ",
            f"{shorter.path}.args",
            what=f"--max-model-len is {left} on prefill, {right} on decode",
            why=f"a prompt that one of them takes is refused by {side}",
            mend="give both roles the same --max-model-len",
        )


def _tokens(text: str | None) -> float | None:
    if text is None or text == "auto":
        return None
    factor = {"k": 1000, "K": 1024, "m": 1e6, "M": 2**20}.get(text[-1:], 1)
    try:
        return float(text.rstrip("kKmM")) * factor
    except ValueError:
        return None


def _connector_roles(prefill: Engine, decode: Engine) -> Iterator[Finding]:
    left, right = ((each.transfer or {}).get("kv_role") for each in (prefill, decode))
    if left == right and left in ("kv_producer", "kv_consumer"):
        yield decode.pod.finding(
            "kv-role",
            f"{decode.path}.args",
            what=f"both roles are {left}",
            why="nobody takes the other side of a transfer",
            mend="write kv_both on both, or kv_producer on prefill and kv_consumer on decode",
        )
