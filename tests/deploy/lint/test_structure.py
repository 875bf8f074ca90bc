"""Schemas as the API server applies them."""

from __future__ import annotations

from typing import Any

import pytest

from tollbridge.deploy.lint import cel
from tollbridge.deploy.lint.judge import judge, unchecked
from tollbridge.deploy.lint.schemas import load
from tollbridge.deploy.lint.structure import Fault, check

KEYED = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}}},
    "x-kubernetes-list-map-keys": ["name"],
}


def faults(value: Any, schema: dict[str, Any]) -> list[Fault]:
    return check(value, schema, load(), cel.evaluator())[1]


def test_defaults_are_there_before_required_is_checked() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": "x"}}, "required": ["a"]}
    value, wrong = check({}, schema, load(), cel.unknown)
    assert (value, wrong) == ({"a": "x"}, [])


def test_null_is_not_given() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert [fault.rule for fault in faults({"a": None}, schema)] == ["missing"]


@pytest.mark.parametrize(
    ("value", "schema", "rule"),
    [
        ("1", {"type": "integer"}, "type"),
        (True, {"type": "integer"}, "type"),
        (8000, {"type": "string"}, "type"),
        ("16GB", {"x-quantity": True}, "quantity"),
        ([], {"x-kubernetes-int-or-string": True}, "type"),
        (0, {"type": "integer", "minimum": 1}, "value"),
        ("Prefill_Role", {"type": "string", "pattern": "^[a-z]+$"}, "value"),
        ("Never", {"type": "string", "enum": ["None", "RecreateGroupOnPodRestart"]}, "value"),
        ([{"name": "a"}, {"name": "a"}], KEYED, "duplicate"),
        ({"b": 1}, {"type": "object", "properties": {"a": {"type": "integer"}}}, "unknown-field"),
        ({"a": 1}, {"x-kubernetes-validations": [{"rule": "self.a > 1"}]}, "rule"),
    ],
)
def test_what_does_not_fit_is_a_fault(value: Any, schema: dict[str, Any], rule: str) -> None:
    assert [fault.rule for fault in faults(value, schema)] == [rule]


def test_a_map_takes_any_key_and_checks_its_values() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "string"}}
    assert faults({"any.key/at-all": "x"}, schema) == []
    assert [fault.path for fault in faults({"a": 1}, schema)] == ["a"]


def test_a_field_in_the_wrong_place_is_told_where_it_belongs() -> None:
    text = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: a}
spec:
  replica: 2
  selector: {matchLabels: {a: b}}
  template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: "x:1"}]}}
"""
    assert [each.mend for each in judge({"a.yaml": text})] == ["did you mean replicas?"]


def test_kinds_of_other_groups_are_not_judged_and_a_misspelt_one_is_found() -> None:
    route = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: a}\n"
    assert judge({"a.yaml": route}) == []
    assert unchecked({"a.yaml": route}) == ["HTTPRoute/a"]
    misspelt = "apiVersion: apps/v1\nkind: Deploymnt\nmetadata: {name: a}\n"
    assert [each.mend for each in judge({"a.yaml": misspelt})] == ["did you mean Deployment?"]


def test_a_service_for_pods_of_other_files_is_sound() -> None:
    pods = (
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a, labels: {app: web}}\nspec: {containers: [{name: a, image: x}]}"
    )
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: b}\nspec: {selector: {app: LABEL}, ports: [{port: 1}]}\n"
    assert judge({"a.yaml": pods, "b.yaml": service.replace("LABEL", "picker")}) == []
    assert [each.rule for each in judge({"a.yaml": pods, "b.yaml": service.replace("LABEL", "webs")})] == [
        "selects-nothing"
    ]


@pytest.mark.parametrize(
    "text", ["", "---\n---\n", "# nothing\n", "apiVersion: v1\nkind: List\nitems: []\n", "apiVersion: v1\nkind: List\n"]
)
def test_empty_files_are_sound(text: str) -> None:
    assert [each.rule for each in judge({"a.yaml": text})] in ([], ["unknown-kind"])


@pytest.mark.parametrize(
    "text",
    ["a: [", "- 1\n", "just text", "kind: Pod\n", "apiVersion: 1\nkind: Pod\n", "\t", "&a [*a]", "a: !!python/x y"],
)
def test_what_is_no_object_is_a_finding_and_no_crash(text: str) -> None:
    assert judge({"a.yaml": text})


def test_without_an_evaluator_nothing_is_claimed_of_cel() -> None:
    assert check({"a": 1}, {"x-kubernetes-validations": [{"rule": "self.a > 1"}]}, load(), cel.unknown)[1] == []
