"""The policies by name. A new rule is one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from tollbridge.errors import ConfigError
from tollbridge.policy import rivals, routing, rules
from tollbridge.policy.adaptive import adaptive
from tollbridge.policy.rules import Rule

POLICIES: Mapping[str, Rule] = MappingProxyType(
    {
        "local": rules.local,
        "split": rules.split,
        "adaptive": adaptive,
        "dynamo-isl": rivals.dynamo_isl,
        "dynamo-isl-or-load": rivals.dynamo_isl_or_load,
        "llm-d": rivals.llm_d,
        "vllm-router-256": rivals.vllm_router_256,
        **routing.ROUTING,
    }
)


def find(name: str) -> Rule:
    """Return the rule called `name`; ConfigError naming the known ones and the closest when there is none."""
    rule = POLICIES.get(name)
    if rule is None:
        close = get_close_matches(name, POLICIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"Policy {name!r} is unknown: choose one of {', '.join(POLICIES)}.{hint}", param="policy")
    return rule
