"""The pure core: however lists, events and interruptions come, it ends with what the server has."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.discovery.apiserver import Pod as Json
from tests.discovery.apiserver import make_pod
from tollbridge.config.cluster import DiscoveryConfig
from tollbridge.discovery.base import Endpoint
from tollbridge.discovery.pods import Pod, maybe_endpoint
from tollbridge.discovery.watch import ExpiredError, Lines, Store, WatchError

CONFIG = DiscoveryConfig(kind="kubernetes")


def parse(pod: Json) -> Pod:
    return msgspec.json.decode(json.dumps(pod), type=Pod)


def line(kind: str, thing: object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode()


def versioned(name: str, version: int, uid: str = "u", **more: object) -> Json:
    pod = make_pod(name, **more)  # type: ignore[arg-type]
    pod["metadata"] |= {"resourceVersion": str(version), "uid": uid}
    return pod


@given(st.lists(st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"x").strip())), st.data())
def test_lines_come_whole_however_they_are_cut(wanted: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in wanted)
    lines, found = Lines(), []
    while stream:
        at = data.draw(st.integers(1, len(stream)))
        found += lines.feed(stream[:at])
        stream = stream[at:]
    assert found == [line for line in wanted if line.strip()]


def test_a_line_without_end_is_refused() -> None:
    lines = Lines(max_bytes=10)
    lines.feed(b"12345")
    lines.feed(b"12345\n12345")
    with pytest.raises(WatchError, match="10 bytes"):
        lines.feed(b"123456")


def test_a_new_pod_of_an_old_name_survives_the_end_of_the_old_one() -> None:
    store = Store(CONFIG)
    store.replace([parse(versioned("p0", 1, "old"))], "1")
    store.take(line("ADDED", versioned("p0", 2, "new")))
    store.take(line("DELETED", versioned("p0", 3, "old")))
    assert [endpoint.uid for endpoint in store.endpoints()] == ["new"]
    assert store.version == "3"


def test_a_bookmark_moves_the_version_and_nothing_else() -> None:
    store = Store(CONFIG)
    store.replace([parse(versioned("p0", 1))], "1")
    store.take(line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "77", "creationTimestamp": None}}))
    assert (store.version, [endpoint.name for endpoint in store.endpoints()]) == ("77", ["p0"])


def test_the_end_of_a_watch() -> None:
    store = Store(CONFIG)
    with pytest.raises(ExpiredError, match="too old"):
        store.take(line("ERROR", {"kind": "Status", "code": 410, "message": "too old"}))
    with pytest.raises(WatchError, match="500: etcd"):
        store.take(line("ERROR", {"kind": "Status", "code": 500, "message": "etcd"}))


@pytest.mark.parametrize(
    "odd", [b"{", b"[]", b"\xff", b'{"type": "ADDED", "object": 3}', b'{"type": "SOMETHING", "object": {}}']
)
def test_what_is_no_event_ends_the_watch_and_changes_nothing(odd: bytes) -> None:
    store = Store(CONFIG)
    store.replace([parse(versioned("p0", 1))], "1")
    with pytest.raises(WatchError):
        store.take(odd)
    assert (store.version, len(store.endpoints())) == ("1", 1)


class Cluster(RuleBasedStateMachine):
    """A server that changes, forgets and is interrupted; a store that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, Json] = {}
        self.history: list[tuple[int, bytes]] = []
        self.version = 0
        self.oldest = 0  # states before are forgotten
        self.num_uids = 0
        self.store = Store(CONFIG)

    @rule(
        name=st.sampled_from("abc"),
        role=st.sampled_from(["prefill", "decode", "both", "router", None]),
        revision=st.sampled_from(["r1", "r2"]),
        ready=st.booleans(),
        ip=st.sampled_from([None, "10.0.0.1", "10.0.0.2"]),
    )
    def put(self, name: str, role: str | None, revision: str, ready: bool, ip: str | None) -> None:
        self.version += 1
        old = self.pods.get(name)
        self.num_uids += old is None
        uid = old["metadata"]["uid"] if old else str(self.num_uids)
        pod = versioned(name, self.version, uid, role=role, revision=revision, ready=ready, ip=ip)
        self.pods[name] = pod
        self.history.append((self.version, line("MODIFIED" if old else "ADDED", pod)))

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), gently=st.booleans())
    def delete(self, data: st.DataObject, gently: bool) -> None:
        self.version += 1
        name = data.draw(st.sampled_from(sorted(self.pods)))
        pod = json.loads(json.dumps(self.pods[name]))
        pod["metadata"]["resourceVersion"] = str(self.version)
        if gently:
            pod["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
            self.pods[name] = pod
        else:
            del self.pods[name]
        self.history.append((self.version, line("MODIFIED" if gently else "DELETED", pod)))

    @rule()
    def compact(self) -> None:
        self.oldest = self.version
        self.history.clear()

    @rule(num_events=st.integers(0, 5), bookmark=st.booleans(), broken=st.booleans())
    def follow(self, num_events: int, bookmark: bool, broken: bool) -> None:
        """List if need be; then a watch that is cut off after some events."""
        if self.store.version is None:
            self.store.replace([parse(pod) for pod in self.pods.values()], str(self.version))
        if int(self.store.version or 0) < self.oldest:
            self.store.version = None  # 410
            return
        for version, event in [each for each in self.history if each[0] > int(self.store.version or 0)][:num_events]:
            self.store.take(event)
            assert self.store.version == str(version)
        if bookmark:
            self.store.take(line("BOOKMARK", {"metadata": {"resourceVersion": self.store.version}}))
        if broken:
            with pytest.raises(WatchError):
                self.store.take(b'{"type": "MODIFIED", "object": {"metadata"')
            self.store.version = None

    @rule()
    def catch_up(self) -> None:
        """Undisturbed, the store ends with what the server has, whatever was before."""
        for _ in range(2):
            self.follow(num_events=1 << 20, bookmark=True, broken=False)
        assert self.store.endpoints() == self.wanted()

    def wanted(self) -> list[Endpoint]:
        found = (maybe_endpoint(parse(self.pods[name]), CONFIG) for name in sorted(self.pods))
        return [endpoint for endpoint in found if endpoint is not None]

    @invariant()
    def names_are_unique(self) -> None:
        names = [endpoint.name for endpoint in self.store.endpoints()]
        assert len(names) == len(set(names))


TestCluster = Cluster.TestCase
