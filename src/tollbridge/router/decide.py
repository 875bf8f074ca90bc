"""② From the fleet as it is now to the decision about one request: builds the views, asks the policy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

import msgspec

from tollbridge.config.cluster import WorkerConfig
from tollbridge.kv.content import TOKEN_BYTES, Prompted
from tollbridge.policy.decide import decide
from tollbridge.policy.views import FleetView, RequestView
from tollbridge.router.context import Context
from tollbridge.router.fleet import Worker
from tollbridge.router.ingress import Body, Call
from tollbridge.router.prompt import Prompt
from tollbridge.wire.decision import Decision

BYTES_PER_TOKEN = 4  # of text that nobody has tokenised

_FRESH_S = 1e-3  # for so long a view of the fleet is as good as a new one
_SLOW_ORIGINS = frozenset({"tokenizer", "worker", "text"})  # of tokens that may have taken time
_LIST_OF_PROMPTS = re.compile(rb'\s*\[\s*["\[]')  # ["text", ...] or [[ids], ...]; [1, 2] is one prompt
_INTEGER = re.compile(rb"-?[0-9]{1,18}")
_SEVERAL = ("n", "best_of")
_MEDIA = ("features", "content_parts")  # of a request made of token ids
# A part of a chat message that is no text. Inside text the quotes are escaped, so text cannot imitate it.
_NO_TEXT = re.compile(rb'"type"\s*:\s*"(?:image|audio|video|input_audio|input_image|file)[a-z_]*"')


async def decide_call(context: Context, call: Call) -> Decision:
    """Return where `call` runs, and note that its prompt will be cached there.

    Raises ModelNotFoundError for a model nobody serves, UnavailableError when no worker can take it.
    """
    router = context.config.router
    fleet = context.fleet.view(call.model)  # an unknown model is refused before anybody tokenises for it
    seen_s = context.clock.monotonic()
    adapter = context.fleet.adapter(call.model)
    prompt = await context.tokens.of(call, adapter)
    if prompt.origin in _SLOW_ORIGINS and context.clock.monotonic() > seen_s + _FRESH_S:
        fleet = context.fleet.view(call.model)  # meanwhile it has changed
    fleet = msgspec.structs.replace(fleet, pricing=context.learner.pricing())
    found = context.feeder.match(prompt.content) if prompt.content is not None else {}
    workers = context.fleet.serving_model(call.model)
    cached, home = _with_session(context, call, prompt, cached_tokens(prompt, found, fleet), workers)
    request = request_view(call, prompt, cached, workers, home=home, adapter=adapter)
    decision = decide(request, fleet, router.policy, call.override, on_no_prefill=router.on_no_prefill)
    if prompt.content is not None:
        # hashing all of a long prompt takes longer than deciding: once the decision is under way
        asyncio.get_running_loop().call_soon(_note_sent, context, decision, prompt.content)
    return msgspec.structs.replace(
        decision, tokens_from=prompt.origin, terms=_facts(request, decision) | decision.terms
    )


def _with_session(
    context: Context, call: Call, prompt: Prompt, cached: Mapping[str, int], workers: Sequence[Worker]
) -> tuple[Mapping[str, int], str | None]:
    """Return what is cached where, with what the call's session adds, and the worker that served that last."""
    seat = context.sessions.find(call.session, context.clock.monotonic())
    worker = next((worker for worker in workers if worker.name == seat.worker), None) if seat is not None else None
    if seat is None or worker is None:
        return cached, None
    found = cached.get(worker.name, 0)
    tells = context.feeder.listens(worker) or not worker.load.report.caches_prefixes
    if prompt.num_tokens is not None and not tells:
        found = seat.cached(found, prompt.num_tokens, worker.block_size)
    return {**cached, worker.name: found}, worker.name


def _note_sent(context: Context, decision: Decision, content: Prompted) -> None:
    context.feeder.sent(context.fleet[decision.decode], content, loads=decision.prefill is not None)
    if decision.prefill is not None:
        context.feeder.sent(context.fleet[decision.prefill], content)


def request_view(
    call: Call,
    prompt: Prompt,
    cached: Mapping[str, int],
    workers: Sequence[Worker] = (),
    *,
    home: str | None = None,
    adapter: str | None = None,
) -> RequestView:
    """Return what a policy may know of the request; `workers` are those that may serve it, under `adapter`."""
    return RequestView(
        id=call.id,
        body_bytes=call.body_bytes,
        prompt_tokens=prompt.num_tokens,
        max_tokens=_maybe_int(call.body, "max_completion_tokens") or _maybe_int(call.sampling, "max_tokens"),
        cached=cached,
        session=call.session,
        home=home,
        priority=call.priority or _maybe_int(call.body, "priority") or 0,
        unsplittable=_unsplittable(call) or _unsplittable_by(workers, call, adapter),
    )


def cached_tokens(prompt: Prompt, found: Mapping[str, int], fleet: FleetView) -> dict[str, int]:
    """Return the cached tokens by worker, `found` being the leading units of the prompt that each has.

    The last token of a prompt is always computed, and with it its block.
    """
    if prompt.content is None or prompt.content.unit_bytes != TOKEN_BYTES:
        return {name: num_bytes // BYTES_PER_TOKEN for name, num_bytes in found.items()}
    last = max(prompt.content.num_units - 1, 0)
    sizes = {worker.name: worker.block_size for worker in fleet.workers}
    return {name: min(number, last // sizes[name] * sizes[name]) for name, number in found.items() if name in sizes}


def _facts(request: RequestView, decision: Decision) -> dict[str, float]:
    """Return what was known of the request: `cached_tokens` are those of the worker that computes the prompt,
    `decode_cached_tokens` in a split those of the other; neither where the prompt's tokens are not known."""
    bound: dict[str, float] = {"max_tokens": request.max_tokens} if request.max_tokens else {}
    if request.prompt_tokens is None:
        return bound
    cached = bound | {"cached_tokens": request.cached.get(decision.prefill or decision.decode, 0)}
    if decision.prefill is not None:
        cached["decode_cached_tokens"] = request.cached.get(decision.decode, 0)
    return {"prompt_tokens": request.prompt_tokens, **cached}


def num_choices(call: Call) -> int:
    """Return how many choices each prompt gets."""
    return max(_maybe_int(call.sampling, "n") or 1, 1)


def num_choices_in_all(call: Call) -> int:
    """Return how many choices all prompts together get."""
    return num_choices(call) * _num_prompts(call.body.get("prompt"))


def _unsplittable(call: Call) -> str | None:
    """One transfer carries the KV of one prompt of text: the reason code when the request is of another kind."""
    body, sampling = call.body, call.sampling
    if _num_prompts(body.get("prompt")) > 1:
        return "prompt_list"
    if _given(body, "prompt_embeds"):
        return "prompt_embeds"
    if _given(sampling, "prompt_logprobs") or (_given(body, "echo") and _given(body, "logprobs")):
        return "prompt_logprobs"
    has_media = any(_given(body, name) for name in _MEDIA) or _NO_TEXT.search(body.get("messages", b""))
    return "multimodal" if has_media else None


def _unsplittable_by(workers: Sequence[Worker], call: Call, adapter: str | None) -> str | None:
    """Return what these workers cannot split, as a reason code: adapters; several choices, which ours can."""
    if adapter is not None:
        return "lora_adapter"
    if not any((_maybe_int(call.sampling, name) or 1) > 1 for name in _SEVERAL):
        return None
    shares = workers and all(_shares_loads(worker.config) for worker in workers)
    return None if shares else "several_choices"


def _shares_loads(config: WorkerConfig) -> bool:
    """Our workers let the choices of one prompt share a load; vLLM's own connectors let each take the same blocks."""
    return config.engine == "embedded" or config.connector == "tollbridge"


def _num_prompts(prompt: msgspec.Raw | None) -> int:
    if prompt is None or not _LIST_OF_PROMPTS.match(prompt):
        return 1
    return len(msgspec.json.decode(prompt, type=list[msgspec.Raw]))


def _given(body: Body, name: str) -> bool:
    return bytes(body.get(name, b"null")) not in (b"null", b"false")


def _maybe_int(body: Body, name: str) -> int | None:
    """Return a field that is a whole number of a sane size; None for anything else, which the worker refuses."""
    value = bytes(body.get(name, b""))
    return int(value) if _INTEGER.fullmatch(value) else None
