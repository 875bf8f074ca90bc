"""The rules of other systems, as exactly as their sources have them: each compares a token count with a constant.

They choose their workers as `split` does (least work before the prompt, prefix caches counted), so that a comparison
is one of rules. A request that their rule serves locally runs on the decode worker that was chosen for it, as it does
there.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tollbridge.policy.rules import Rule, not_split, pair
from tollbridge.policy.views import FleetView, RequestView, WorkerView, prompt_tokens
from tollbridge.wire.decision import Decision

ISL_TOKENS, ISL_RATIO = 2048, 0.7  # Dynamo 1.6, `isl_bounding`
LOAD_THRESHOLD = 1.0  # of max_num_batched_tokens; Dynamo leaves it to the deployment
LLM_D_PROMPT_TOKENS, LLM_D_UNCACHED_TOKENS = 512, 8  # llm-d-router's examples: 512 with 8, and 512 with 1,024
VLLM_ROUTER_TOKENS = 256  # vllm-router, pull request 130

_IsLocal = Callable[[int, int, WorkerView], bool]  # (prompt tokens, uncached on D, P) -> serve locally


def _rule(name: str, is_local: _IsLocal, why: str) -> Rule:
    def rule(request: RequestView, fleet: FleetView) -> Decision:
        chosen = pair(request, fleet)
        if isinstance(chosen, str):
            return msgspec.structs.replace(not_split(request, fleet, chosen), policy=name)
        prefill, decode = chosen
        total = prompt_tokens(request)
        uncached = max(0, total - request.cached.get(decode.name, 0))
        local = is_local(total, uncached, prefill)
        return Decision(
            id=request.id,
            policy=name,
            choice="local" if local else "split",
            decode=decode.name,
            prefill=None if local else prefill.name,
            reason="policy",
            why=f"{total} prompt tokens, {uncached} of them uncached on {decode.name}: {why}.",
            terms={"prompt_tokens": total, "uncached_tokens": uncached},
        )

    return rule


def _isl(total: int, uncached: int, prefill: WorkerView) -> bool:
    return uncached < ISL_TOKENS and total > 0 and uncached / total < ISL_RATIO


def _isl_or_load(total: int, uncached: int, prefill: WorkerView) -> bool:
    bound = LOAD_THRESHOLD * prefill.max_num_batched_tokens
    return _isl(total, uncached, prefill) or 0 < bound < prefill.waiting_prefill_tokens


def _llm_d(total: int, uncached: int, prefill: WorkerView) -> bool:
    return not (total >= LLM_D_PROMPT_TOKENS and uncached >= LLM_D_UNCACHED_TOKENS)


def _vllm_router(total: int, uncached: int, prefill: WorkerView) -> bool:
    return uncached <= VLLM_ROUTER_TOKENS


dynamo_isl = _rule("dynamo-isl", _isl, f"local if under {ISL_TOKENS} and under {ISL_RATIO} of the prompt")
dynamo_isl_or_load = _rule("dynamo-isl-or-load", _isl_or_load, "as dynamo-isl, or the prefill worker is loaded")
llm_d = _rule(
    "llm-d", _llm_d, f"split from {LLM_D_PROMPT_TOKENS} prompt and {LLM_D_UNCACHED_TOKENS} uncached tokens on"
)
vllm_router_256 = _rule("vllm-router-256", _vllm_router, f"local up to {VLLM_ROUTER_TOKENS} uncached tokens")
