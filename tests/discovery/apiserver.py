"""A stand-in for the API server of a cluster: pods only, but list and watch as the real one has them.

States are numbered; a watch begins after one and gets every change since, bookmarks in between, and is closed after
`timeoutSeconds`. `compact` forgets old states (410), `freeze` leaves connections open and silent, `stop` and `start`
restart it on the same port with its state, `refuse` answers with an error, `hold` lets lists wait.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from typing import Any

from aiohttp import web

NAMESPACE = "models"
PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
Pod = dict[str, Any]


def make_pod(
    name: str,
    role: str | None = "prefill",
    revision: str | None = "r1",
    *,
    ip: str | None = "127.0.0.1",
    ready: bool = True,
    ports: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
    node: str = "node-a",
) -> Pod:
    """Return a pod as `deploy render` makes them; None leaves a label or the address out."""
    own = {"tollbridge.io/role": role, "tollbridge.io/revision": revision, "app": "models"}
    listens = [{"name": each, "containerPort": port, "protocol": "TCP"} for each, port in (ports or {}).items()]
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {key: value for key, value in own.items() if value is not None} | (labels or {}),
            "creationTimestamp": "2026-11-29T12:00:00Z",
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "worker:1", "ports": listens}]},
        "status": {
            "phase": "Running" if ip else "Pending",
            **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
            "conditions": [{"type": "PodScheduled", "status": "True"}, _ready(ready)],
        },
    }


def _ready(ready: bool) -> dict[str, str]:
    return {"type": "Ready", "status": "True" if ready else "False"}


class ApiServer:
    """Use inside `async with`. Changes are made by its methods, at once."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.pods: dict[str, Pod] = {}
        self.url = ""
        self.token: str | None = None  # what it wants to see; None: it does not ask
        self.refuse: tuple[int, dict[str, str]] | None = None  # status and headers of every answer
        self.refuse_watch: int | None = None
        self.hold = asyncio.Event()  # lists wait for it
        self.hold.set()
        self.frozen = False  # watches say nothing and are not closed
        self.expires_by_event = False  # 410 as an event, else as the status
        self.bookmark_s = 0.05
        self.max_watch_s: float | None = None  # shorter than it is asked for
        self.lists: list[dict[str, str]] = []  # the queries it saw
        self.watches: list[dict[str, str]] = []
        self.num_open = 0  # watches
        self._history: list[tuple[int, Pod | None, Pod | None]] = []  # (state, before, after)
        self._version = 100
        self._oldest = 0
        self._uids = 0
        self._changed = asyncio.Event()
        self._snapshots: dict[str, list[Pod]] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._tls = tls

    # --- life

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._get)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Close the port and every connection; the state stays."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # --- the state

    def put(self, pod: Pod) -> None:
        """Create the pod, or replace it under its uid."""
        name = pod["metadata"]["name"]
        before = self.pods.get(name)
        pod = copy.deepcopy(pod)
        self._uids += before is None
        pod["metadata"]["uid"] = before["metadata"]["uid"] if before else f"uid-{self._uids}"
        self._note(before, pod)

    def delete(self, name: str) -> None:
        """The pod is gone."""
        self._note(self.pods[name], None)

    def drain(self, name: str) -> None:
        """The pod is to be deleted, and still runs."""
        pod = copy.deepcopy(self.pods[name])
        pod["metadata"]["deletionTimestamp"] = "2026-11-29T12:34:56Z"
        self._note(self.pods[name], pod)

    def set_ready(self, name: str, ready: bool) -> None:
        pod = copy.deepcopy(self.pods[name])
        pod["status"]["conditions"] = [_ready(ready)]
        self._note(self.pods[name], pod)

    def compact(self) -> None:
        """Forget every state but this one: watches from before get 410."""
        self._oldest = self._version
        self._history.clear()

    def _note(self, before: Pod | None, after: Pod | None) -> None:
        self._version += 1
        shown = copy.deepcopy(after if after is not None else before)
        assert shown is not None
        shown["metadata"]["resourceVersion"] = str(self._version)
        if after is None:
            del self.pods[shown["metadata"]["name"]]
            self._history.append((self._version, before, None))
        else:
            self.pods[shown["metadata"]["name"]] = shown
            self._history.append((self._version, before, shown))
        self._changed.set()
        self._changed = asyncio.Event()

    # --- requests

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.refuse is not None:
            return _status(self.refuse[0], "the server is not well", headers=self.refuse[1])
        query = dict(request.query)
        if query.get("watch") == "true":
            self.watches.append(query)
            if self.refuse_watch is not None:
                return _status(self.refuse_watch, "pods is forbidden: cannot watch")
            return await self._watch(request, query)
        self.lists.append(query)
        await self.hold.wait()
        return self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        version, start = str(self._version), 0
        if query.get("continue"):
            version, _, offset = query["continue"].partition("@")
            start = int(offset)
            if int(version) < self._oldest:
                return _status(410, "The provided continue parameter is too old")
        elif version not in self._snapshots:
            self._snapshots[version] = [p for p in self.pods.values() if _matches(p, query.get("labelSelector", ""))]
        items = self._snapshots[version]
        end = start + int(query.get("limit", "500"))
        rest = f"{version}@{end}" if end < len(items) else ""
        metadata = {"resourceVersion": version, **({"continue": rest} if rest else {})}
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items[start:end]}
        )

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        at = int(query.get("resourceVersion") or self._version)
        if at < self._oldest and not self.expires_by_event:
            return _status(410, "too old resource version")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.num_open += 1
        try:
            if at < self._oldest:
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(_line("ERROR", status))
                return response
            await self._follow(response, query, at)
        finally:
            self.num_open -= 1
        return response

    async def _follow(self, response: web.StreamResponse, query: dict[str, str], at: int) -> None:
        lasts_s = min(float(query["timeoutSeconds"]), float("inf") if self.max_watch_s is None else self.max_watch_s)
        end_s = asyncio.get_running_loop().time() + lasts_s
        while (left_s := end_s - asyncio.get_running_loop().time()) > 0 or self.frozen:
            if self.frozen:
                await asyncio.Event().wait()  # until the client has had enough
            changed = self._changed
            for version, before, after in [each for each in self._history if each[0] > at]:
                line = _event(version, before, after, query.get("labelSelector", ""))
                if line:
                    await response.write(line)
                at = version
            try:
                async with asyncio.timeout(min(left_s, self.bookmark_s)):
                    await changed.wait()
            except TimeoutError:
                if query.get("allowWatchBookmarks") == "true" and not self.frozen:
                    mark = {"kind": "Pod", "metadata": {"resourceVersion": str(at), "creationTimestamp": None}}
                    await response.write(_line("BOOKMARK", mark))


def _event(version: int, before: Pod | None, after: Pod | None, selector: str) -> bytes:
    """Return the change as a watch with `selector` sees it, nothing when it does not."""
    was, now = (pod is not None and _matches(pod, selector) for pod in (before, after))
    if not was and not now:
        return b""
    pod = copy.deepcopy(after if now else before)
    assert pod is not None
    pod["metadata"]["resourceVersion"] = str(version)
    return _line("DELETED" if not now else "MODIFIED" if was else "ADDED", pod)


def _line(kind: str, thing: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def _status(code: int, message: str, *, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return web.json_response(body, status=code, headers=headers)


def _matches(pod: Pod, selector: str) -> bool:
    """Existence and equality, as far as tests need them."""
    labels = pod["metadata"]["labels"]
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value.removeprefix("=")):
            return False
    return True
