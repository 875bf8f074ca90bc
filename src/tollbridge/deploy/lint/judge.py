"""Everything that is wrong with a set of manifests: each by its schema first, then all together by the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tollbridge.deploy.lint import structure
from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.cel import Evaluate, evaluator
from tollbridge.deploy.lint.findings import Document, Finding
from tollbridge.deploy.lint.reading import read
from tollbridge.deploy.lint.rules import (
    containers,
    devices,
    dynamo,
    flags,
    network,
    objects,
    ours,
    pairs,
    pods,
    pools,
    probes,
    rights,
    routers,
    sets,
    transfer,
    words,
)
from tollbridge.deploy.lint.schemas import Schemas, load

RULES = (
    objects,
    words,
    pods,
    containers,
    sets,
    dynamo,
    flags,
    transfer,
    ours,
    pairs,
    probes,
    devices,
    network,
    pools,
    rights,
    routers,
)
_WHY = {
    "unknown-field": "the API server refuses it, or drops it without a word",
    "rule": "the API server refuses it",
    "duplicate": "the API server refuses it, or one of the two is lost",
}
_LATER = {"groupIdentity", "groupReplacementPolicy", "maxGroupRestarts"}  # of LWS after 0.10
_SKIPPED = {"Kustomization", "CustomResourceDefinition"}


def judge(files: Mapping[str, str], evaluate: Evaluate | None = None) -> list[Finding]:
    """Return the findings in `files`, text by name, in the order of files."""
    documents: list[Document] = []
    findings: list[Finding] = []
    for name, text in files.items():
        found, unreadable = read(name, text)
        documents += found
        findings += unreadable
    return findings + judge_objects(documents, evaluate)


def judge_objects(documents: Iterable[Document], evaluate: Evaluate | None = None) -> list[Finding]:
    """Return the findings in objects, those of their schemas first."""
    schemas = load()
    evaluate = evaluator() if evaluate is None else evaluate
    findings: list[Finding] = []
    sound: list[Document] = []
    for document in documents:
        kept, wrong = _fits(document, schemas, evaluate)
        findings += wrong
        sound += [kept] if kept is not None else []
    return _distinct([*findings, *_by_rules(Case(sound))])


def _by_rules(case: Case) -> Iterator[Finding]:
    for rule in RULES:
        yield from rule.rules(case)


def _fits(document: Document, schemas: Schemas, evaluate: Evaluate) -> tuple[Document | None, list[Finding]]:
    """Return the object with defaults (None where nothing is known of it), and what its schema refuses."""
    if document.kind in _SKIPPED:
        return None, []
    api = str(document.manifest.get("apiVersion"))
    kind = schemas.kinds.get((api, document.kind))
    if kind is None:
        return None, list(_unknown(document, api, schemas))
    value, faults = structure.check(document.manifest, kind.schema, schemas, evaluate)
    kept = msgspec.structs.replace(document, manifest=value)
    return kept, [_finding(document, fault) for fault in faults]


def _finding(document: Document, fault: structure.Fault) -> Finding:
    mend = fault.mend
    if fault.path.rpartition(".")[2] in _LATER:
        mend = "take it away, or install an LWS later than 0.10"
    why = _WHY.get(fault.rule, "the API server refuses it")
    return document.finding(fault.rule, fault.path, what=fault.what, why=why, mend=mend)


def unchecked(files: Mapping[str, str]) -> list[str]:
    """Return "Kind/name" of the objects whose kind nothing is known of: they were not judged."""
    schemas = load()
    documents = [document for name, text in files.items() for document in read(name, text)[0]]
    return [f"{each.kind}/{each.name}" for each in documents if not _is_known(each, schemas)]


def _is_known(document: Document, schemas: Schemas) -> bool:
    """Whether an object is of a group of ours, or looks as if it were meant to be."""
    group = str(document.manifest.get("apiVersion")).rpartition("/")[0]
    groups = {api.rpartition("/")[0] for api, _ in schemas.kinds}
    return document.kind in _SKIPPED or group in groups or bool(schemas.versions(document.kind))


def _unknown(document: Document, api: str, schemas: Schemas) -> Iterator[Finding]:
    if not _is_known(document, schemas):
        return
    versions = schemas.versions(document.kind)
    if versions:
        what = f"{document.kind} in {api} is not known"
        why, mend = "that version is old, never existed, or has another shape", f"write apiVersion: {versions[-1]}"
    else:
        near = schemas.closest(document.kind)
        what = f"the kind {document.kind} of {api} is not known here"
        why = "the API server has none, or it was not checked"
        mend = f"did you mean {near}?" if near else "check it with its own tools, and leave it out here"
    yield document.finding("unknown-kind", "apiVersion", what=what, why=why, mend=mend)


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Return each finding once; a quantity that is none is seen by the schema and by the rules."""
    first: dict[tuple[str, ...], Finding] = {}
    for each in findings:
        what = "" if each.rule == "quantity" else each.what
        first.setdefault((each.file, each.object, each.rule, each.path, what), each)
    return list(first.values())
