"""DynamoGraphDeployment: what the operator needs, and what it adds by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Document, Finding, Manifest, at, items

_SEMVER = re.compile(r"v?\d+\.\d+\.\d+([-+.].*)?")
_WORKERS = ("worker", "prefill", "decode")
MAIN = "main"


def rules(case: Case) -> Iterator[Finding]:
    for document in case.of("DynamoGraphDeployment"):
        if document.spec.get("restart"):
            yield document.finding(
                "dynamo-restart",
                "spec.restart",
                what="restart is set",
                why="it must be unset when the object is made",
                mend="take it away; set it later to restart",
            )
        for index, component in enumerate(items(document.spec, "components")):
            yield from _component(document, f"spec.components[{index}]", component)


def _component(document: Document, path: str, component: Manifest) -> Iterator[Finding]:
    length = len(document.name) + len(str(component.get("name", ""))) + 1
    if length > 45:
        yield document.finding(
            "generated-length",
            f"{path}.name",
            what=f"{document.name}-{component.get('name')} has {length} characters",
            why="the operator makes names and labels of 63 characters from it, with a hash and suffixes",
            mend="shorten the names: 45 together at most",
        )
    if "minAvailable" in component:
        yield document.finding(
            "dynamo-min",
            f"{path}.minAvailable",
            what="minAvailable is set",
            why="only with Grove; an error otherwise",
            mend="take it away, or set up Grove",
        )
    if component.get("type") is None:
        yield document.finding(
            "dynamo-type",
            f"{path}.type",
            what=f"the component {component.get('name')} has no type",
            why="it gets no labels of a role and no probes",
            mend="write type: prefill, decode, worker or frontend",
        )
    containers = items(at(component, ["podTemplate", "spec"]), "containers")
    if "podTemplate" in component:
        yield from _main(document, f"{path}.podTemplate.spec", component, containers)


def _main(document: Document, path: str, component: Manifest, containers: list[Manifest]) -> Iterator[Finding]:
    main = next((each for each in containers if each.get("name") == MAIN), None)
    if main is None:
        yield document.finding(
            "dynamo-main",
            f"{path}.containers",
            what=f"no container is called {MAIN}",
            why="the operator configures that one, and refuses or ignores the others",
            mend=f"call it {MAIN}",
        )
        return
    where = f"{path}.containers[{containers.index(main)}]"
    if component.get("type") not in _WORKERS:
        return
    image = str(main.get("image", ""))
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    foreign = "dynamo" not in image or not _SEMVER.fullmatch(tag) or "@" in image
    if foreign and not component.get("runtimeVersionOverride"):
        yield document.finding(
            "dynamo-version",
            f"{where}.image",
            what=f"the tag of {image} says no version of Dynamo",
            why="the operator cannot tell what the image understands, and refuses it",
            mend='add runtimeVersionOverride: "1.6.2" to the component',
        )
    plain = "dynamo." not in str([main.get("command"), main.get("args")])
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if plain and not main.get(probe):
            yield document.finding(
                "dynamo-probe",
                f"{where}.{probe}",
                what=f"{probe} is not given",
                why="the operator adds its own on port 9090, /live after one failure, which a plain vLLM does not have",
                mend=f"write a {probe} on /health of vLLM's port",
            )
    if plain and not main.get("command"):
        yield document.finding(
            "dynamo-command",
            f"{where}.command",
            what="there is no command",
            why="the operator puts /bin/sh -c in front of the args",
            mend="write command and args",
        )
