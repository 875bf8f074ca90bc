"""An API server as far as kubectl needs one to create and apply: discovery, OpenAPI, and strict validation of objects.

It validates with the vendored schemas and fills in defaults, and keeps nothing but
a list of what it accepted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tollbridge.deploy.lint import cel
from tollbridge.deploy.lint.schemas import Kind, load
from tollbridge.deploy.lint.structure import check

_PLURALS = {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses", "Endpoints": "endpoints"}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def plural(kind: str) -> str:
    name = kind.lower()
    return _PLURALS.get(kind, f"{name}es" if name.endswith(("s", "ch")) else f"{name}s")


class ApiServer(ThreadingHTTPServer):
    """`accepted` are the objects, as they were stored."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.accepted: list[dict[str, Any]] = []
        self.kinds = list(load().kinds.values())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def apis(self) -> list[str]:
        return sorted({kind.api for kind in self.kinds})

    def resources(self, api: str) -> dict[str, Any]:
        listed = [
            {
                "name": plural(kind.name),
                "singularName": kind.name.lower(),
                "namespaced": kind.namespaced,
                "kind": kind.name,
                "verbs": _VERBS,
            }
            for kind in self.kinds
            if kind.api == api
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": listed}

    def groups(self) -> dict[str, Any]:
        versions = [
            {"name": api.partition("/")[0], "version": {"groupVersion": api, "version": api.partition("/")[2]}}
            for api in self.apis()
            if "/" in api
        ]
        groups = [
            {"name": each["name"], "versions": [each["version"]], "preferredVersion": each["version"]}
            for each in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def openapi(self, api: str) -> dict[str, Any]:
        """Return what tells kubectl that the server itself validates fields."""
        group, _, version = api.rpartition("/")
        parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        paths = {
            f"/{_root(api)}/namespaces/{{namespace}}/{plural(kind.name)}/{{name}}": {
                "patch": {
                    "parameters": [parameter],
                    "responses": {},
                    "x-kubernetes-action": "patch",
                    "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind.name},
                }
            }
            for kind in self.kinds
            if kind.api == api
        }
        return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "1.37"}, "paths": paths}

    def kind_of(self, manifest: dict[str, Any]) -> Kind | None:
        return next(
            (k for k in self.kinds if (k.api, k.name) == (manifest.get("apiVersion"), manifest.get("kind"))), None
        )


def _root(api: str) -> str:
    return f"apis/{api}" if "/" in api else f"api/{api}"


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        documents: dict[str, Any] = {
            "api": {"kind": "APIVersions", "versions": ["v1"]},
            "apis": self.server.groups(),
            "version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
            "openapi/v3": {
                "paths": {_root(api): {"serverRelativeURL": f"/openapi/v3/{_root(api)}"} for api in self.server.apis()}
            },
        }
        for api in self.server.apis():
            documents[_root(api)] = self.server.resources(api)
            documents[f"openapi/v3/{_root(api)}"] = self.server.openapi(api)
        if path in documents:
            self.answer(200, documents[path])
        else:
            self.refuse(404, "NotFound", f"{path} not found")

    def do_POST(self) -> None:
        self.take()

    def do_PATCH(self) -> None:
        self.take()

    def take(self) -> None:
        manifest = yaml.safe_load(self.rfile.read(int(self.headers["content-length"])))
        kind = self.server.kind_of(manifest)
        if kind is None:
            return self.refuse(404, "NotFound", f"no such kind {manifest.get('kind')}")
        strict = parse_qs(urlsplit(self.path).query).get("fieldValidation") == ["Strict"]
        value, faults = check(manifest, kind.schema, load(), cel.evaluator())
        wrong = [fault for fault in faults if strict or fault.rule != "unknown-field"]
        if wrong:
            return self.refuse(422, "Invalid", "; ".join(fault.what for fault in wrong))
        value["metadata"] = {**value["metadata"], "uid": "1", "resourceVersion": "1"}
        self.server.accepted.append(value)
        return self.answer(201 if self.command == "POST" else 200, value)

    def refuse(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.answer(code, {**status, "code": code, "reason": reason, "message": message})

    def answer(self, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running() -> Iterator[ApiServer]:
    server = ApiServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
