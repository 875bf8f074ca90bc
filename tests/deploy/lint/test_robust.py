"""Whatever stands in a manifest, the judge gives findings and never falls over."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tollbridge.deploy.lint.findings import Document
from tollbridge.deploy.lint.judge import judge, judge_objects

FOLDER = Path(__file__).parents[1]
TEXTS = [path.read_text() for folder in ("good", "broken") for path in sorted((FOLDER / folder).glob("*.yaml"))]
DOCUMENTS = [list(yaml.safe_load_all(text)) for text in TEXTS if "written twice" not in text]
ODD = [None, "", "x", 0, -1, 1.5, True, [], {}, [None], ["x"], [{}], {"x": None}, "$(POD_IP)", "{", "9" * 300, "é\n"]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container and key in `value`."""
    found: list[tuple[Any, Any]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += [(value, key), *places(value[key])]
    return found


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_manifest_with_anything_anywhere_is_judged(data: st.DataObject) -> None:
    documents = copy.deepcopy(data.draw(st.sampled_from(DOCUMENTS)))
    for _ in range(data.draw(st.integers(1, 4))):
        holder, key = data.draw(st.sampled_from(places(documents)))
        if isinstance(holder, dict) and data.draw(st.booleans()):
            holder.pop(key, None)
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))  # ODD itself must not change
    objects = [Document(file="a.yaml", manifest=each) for each in documents if isinstance(each, dict)]
    for finding in judge_objects(objects):
        assert finding.what and finding.mend


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("kind", ["DisaggregatedSet", "DynamoGraphDeployment", "Deployment", "Service", "ConfigMap"])
def test_an_object_with_an_odd_spec_is_judged(kind: str, odd: Any) -> None:
    api = {"DisaggregatedSet": "disaggregatedset.x-k8s.io/v1", "DynamoGraphDeployment": "nvidia.com/v1beta1"}
    manifest = {"apiVersion": api.get(kind, "apps/v1" if kind == "Deployment" else "v1"), "kind": kind}
    for spec in ({"spec": odd}, {"metadata": odd, "data": odd}):
        judge({"a.yaml": yaml.safe_dump({**manifest, "metadata": {"name": "a"}, **spec})})


def test_an_object_that_contains_itself_is_told() -> None:
    (finding,) = judge({"a.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: &a\n  x: *a\n"})
    assert (finding.rule, finding.what) == ("yaml", "line 5: the anchor 'a' contains itself")


def test_an_anchor_used_twice_is_fine() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, labels: &a {x: y}, annotations: *a}\ndata: {x: y}\n"
    assert judge({"a.yaml": text}) == []
