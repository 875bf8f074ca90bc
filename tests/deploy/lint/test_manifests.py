"""Whole manifests: broken ones give the finding that helps, good ones give none.

The first lines of a broken one say which complaint it comes from, and `# finds: RULE PATH`, a part of the path.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tollbridge.deploy.lint.judge import judge

FOLDER = Path(__file__).parents[1]
BROKEN = sorted((FOLDER / "broken").glob("*.yaml"))
GOOD = sorted((FOLDER / "good").glob("*.yaml"))
# a cause with consequences: what else the one mistake leads to
ALSO = {
    "connector-roles-swapped": {"kv-role"},
    "name-too-long": {"selects-nothing"},
    "roles-twice": {"selects-nothing"},
    "field-misspelt": {"side-channel"},
    "flag-misspelt": {"no-connector"},
    "port-not-http": {"probe-port"},
}


def test_there_are_enough() -> None:
    assert len(BROKEN) >= 30
    assert len(GOOD) >= 10


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_manifest_gives_the_finding_that_helps_and_no_other(path: Path) -> None:
    text = path.read_text()
    rule, _, where = text.splitlines()[1].removeprefix("# finds: ").partition(" ")
    findings = judge({path.name: text})
    assert any(each.rule == rule and where in each.path for each in findings), findings
    others = {each.rule for each in findings} - {rule} - ALSO.get(path.stem, set())
    assert not others, findings
    for each in findings:
        assert each.what and each.why and each.mend


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_manifest_gives_none(path: Path) -> None:
    assert judge({path.name: path.read_text()}) == []
