"""Which workers belong together."""

from __future__ import annotations

from pathlib import Path

from tollbridge.deploy.lint.judge import judge

GOOD = Path(__file__).parents[1] / "good"


def rules(*texts: str) -> set[str]:
    return {each.rule for each in judge({f"{index}.yaml": text for index, text in enumerate(texts)})}


def test_deployments_of_one_namespace_are_not_paired_with_each_other() -> None:
    one, other = ((GOOD / name).read_text() for name in ("set-nixl-claims.yaml", "deployments-tollbridge.yaml"))
    other = (
        other.replace("pd-prefill", "qwen-prefill").replace("pd-decode", "qwen-decode").replace(": pd\n", ": qwen\n")
    )
    other = other.replace("namespace: qwen", "namespace: pd")
    assert rules(one, other) <= {"duplicate-object"}  # both have Services called prefill and decode


def test_roles_in_files_and_objects_of_their_own_are_paired() -> None:
    text = (GOOD / "deployments-tollbridge.yaml").read_text().replace("pd-prefill", "p-prefill")
    first, *rest = text.split("---\n")
    assert rules(first, "---\n".join(rest)) == set()
    assert rules(first.replace("Qwen2.5-7B", "Qwen2.5-14B"), "---\n".join(rest)) == {"roles-differ"}
