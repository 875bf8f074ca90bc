from __future__ import annotations

import pytest

from tollbridge.errors import ConfigError
from tollbridge.policy.registry import POLICIES, find


def test_known() -> None:
    assert find("split") is POLICIES["split"]


@pytest.mark.parametrize(("name", "hint"), [("splitt", "'split'"), ("lokal", "'local'"), ("adaptiv", "'adaptive'")])
def test_unknown_names_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is unknown: choose one of local, split") as caught:
        find(name)
    assert (f"Did you mean {hint}?" in caught.value.message) is bool(hint)
    assert caught.value.exit_code == 2
