"""The page has words for each term that a decision can have, and for no other."""

from __future__ import annotations

import re

from tests.policy.test_adaptive import BUSY, ask, cost, fleet, pair
from tollbridge.policy.views import RequestView
from tollbridge.router.decide import _facts
from tollbridge.ui.pages import pages


def test_every_term_has_words() -> None:
    named = set(re.findall(r'\["([a-z_]+_?[a-z0-9_]*)", "', pages()["terms.js"].body.decode()))
    decision = ask(768, fleet(cost(1e7), *pair(d=BUSY)))
    facts = _facts(RequestView(id="r", prompt_tokens=9), decision)
    assert set(decision.terms) | set(facts) | {"veto_tokens"} == named
