"""What turns a view of the fleet into prices: the cost model, the objective, and how much may be spent on learning."""

from __future__ import annotations

import msgspec

from tollbridge.config.cluster import SloConfig
from tollbridge.cost.model import CostModel


class Pricing(msgspec.Struct, frozen=True, kw_only=True):
    """Handed to every rule with the fleet; only `adaptive` looks at it."""

    cost: CostModel = msgspec.field(default_factory=CostModel)
    slo: SloConfig = SloConfig()
    explore: float = 0.02  # share of the requests that may be split to learn a link, when no SLO is at risk
    now_s: float = 0.0  # monotonic: rates fade
