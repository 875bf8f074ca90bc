from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tollbridge.clock import ManualClock
from tollbridge.config.cluster import WorkerConfig
from tollbridge.errors import ConfigError, ModelNotFoundError
from tollbridge.router.fleet import Fleet, kv_address, parse_address
from tollbridge.router.load import Report

TWO = [
    WorkerConfig(name="p0", prefer="prefill", url="http://p0:8000"),
    WorkerConfig(name="d0", prefer="decode", url="http://d0:8000/"),
]


def fleet(workers: list[WorkerConfig] = TWO) -> tuple[Fleet, ManualClock]:
    clock = ManualClock()
    return Fleet(workers, clock=clock), clock


def up(f: Fleet, *names: str, model: str = "m") -> None:
    for name in names:
        f[name].ready, f[name].models = True, ({"id": model},)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:7801", ("10.0.0.1", 7801)),
        ("[::1]:7801", ("::1", 7801)),
        ("host:0", None),
        ("host", None),
        ("", None),
        ("host:x", None),
        ("host:99999", None),
        ("tcp://10.0.0.1:80:", None),
    ],
)
def test_parse_address(text: str, address: object) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("configured", "said", "address"),
    [
        ("127.0.0.1:0", "10.0.0.9:7801", ("10.0.0.9", 7801)),  # port 0: the worker chose
        ("10.0.0.5:7900", "10.0.0.9:7801", ("10.0.0.5", 7900)),  # the cluster file counts
        ("127.0.0.1:0", "0.0.0.0:7801", ("p0.example", 7801)),  # nobody can dial 0.0.0.0
        ("0.0.0.0:7900", None, ("p0.example", 7900)),
        ("127.0.0.1:0", "[::]:7801", ("p0.example", 7801)),
        ("127.0.0.1:0", None, None),
        ("127.0.0.1:0", "nonsense", None),
    ],
)
def test_kv_address(configured: str, said: str | None, address: object) -> None:
    assert kv_address(WorkerConfig(name="p0", url="http://p0.example:8000", kv=configured), said) == address


@pytest.mark.parametrize("url", ["http://host:0", "host:80", "ftp://host", "http://"])
def test_urls_that_cannot_be_dialled(url: str) -> None:
    with pytest.raises(ConfigError, match="'w'"):
        fleet([WorkerConfig(name="w", url=url)])


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="same name"):
        fleet([TWO[0], TWO[0]])


def test_suspicion_fades_and_ends_with_success() -> None:
    f, clock = fleet()
    assert not f.is_suspect(f["p0"])
    f.failed(f["p0"])
    assert f["p0"].recheck.is_set()
    assert f.is_suspect(f["p0"])
    clock.advance(0.26)
    assert not f.is_suspect(f["p0"])
    f.failed(f["p0"])
    f.succeeded(f["p0"])
    assert not f.is_suspect(f["p0"])


def test_view_and_load() -> None:
    f, _ = fleet()
    up(f, "p0", "d0")
    with f.serving(f["p0"], "prefill"), f.serving(f["d0"], "decode"):
        workers = {worker.name: worker for worker in f.view("m").workers}
        assert (workers["p0"].num_prefills, workers["d0"].num_decodes) == (1, 1)
        assert f.statistics().num_prefills == 1
        f.check()
    assert f.statistics().num_ready == 2
    assert f.statistics().num_decodes == 0
    assert f["d0"].num_served == 1


def test_models() -> None:
    f, _ = fleet()
    assert [worker.ready for worker in f.view(None).workers] == [False, False]
    assert f.view("m").workers == ()  # nobody ready, nothing known: not a 404
    up(f, "p0")
    up(f, "d0", model="other")
    assert [worker.name for worker in f.view("m").workers] == ["p0"]
    with pytest.raises(ModelNotFoundError, match="use m, other"):
        f.view("gpt-9")
    f["p0"].ready = False  # known, but away: unavailable, not unknown
    assert [worker.name for worker in f.view("m").workers] == ["p0"]


@pytest.mark.parametrize("full", [False, True])
def test_a_worker_at_its_pinned_bound(full: bool) -> None:
    f, _ = fleet()
    up(f, "p0", "d0")
    f["p0"].load.told(Report(pinned_full=full), 0.0)
    assert [worker.pinned_full for worker in f.view("m").workers] == [full, False]


def test_a_suspect_is_no_prefill_worker_and_its_return_takes_one_probe() -> None:
    f, clock = fleet()
    up(f, "p0", "d0")
    f["p0"].kv = ("p0", 7801)
    f.failed(f["p0"])
    view = f.view(None).workers[0]
    assert (view.suspect, view.kv) == (True, None)
    clock.advance(0.26)
    assert f.view(None).workers[0].kv == ("p0", 7801)
    with f.serving(f["p0"], "prefill"):
        assert f.view(None).workers[0].suspect  # the probe is out
    assert not f.view(None).workers[0].suspect  # it ended without a verdict
    f.check()


def test_links_and_load_of_a_split() -> None:
    f, clock = fleet()
    up(f, "p0", "d0")
    f["p0"].load.told(Report(kv_bytes_per_token=10.0), 0.0)
    clock.advance(1.0)
    with f.serving(f["p0"], "prefill", prefill_tokens=100, kv_tokens=100):
        moved = f.begin_transfer(f["p0"], f["d0"], 80)
        assert f.links() == {("p0", "d0"): 1}
        views = {worker.name: worker for worker in f.view("m").workers}
        assert (views["p0"].waiting_prefill_tokens, views["p0"].num_sending, views["p0"].sending_bytes) == (100, 1, 800)
        assert views["d0"].num_receiving == 1
        f.check()
        moved()
        moved()
    assert f.links() == {}
    views = {worker.name: worker for worker in f.view("m").workers}
    assert (views["p0"].waiting_prefill_tokens, views["p0"].num_sending, views["d0"].num_receiving) == (0, 0, 0)
    f.check()


def test_an_adapter_is_told_from_its_base() -> None:
    f, _ = fleet()
    f["p0"].models = ({"id": "base", "parent": None}, {"id": "lora", "parent": "base"})
    assert [f.adapter(name) for name in ("base", "lora", "else", None)] == [None, "lora", None, None]


def test_a_view_is_made_again_only_when_something_has_changed() -> None:
    f, clock = fleet()
    up(f, "p0", "d0")
    worker = f["d0"]

    def changes() -> list[Callable[[], object]]:
        stack = ExitStack()
        return [
            lambda: setattr(worker, "kv", ("d0", 7801)),
            lambda: stack.enter_context(f.serving(worker, "decode", prefill_tokens=7, kv_tokens=9)),
            lambda: worker.load.told(Report(num_running=3, free_kv_tokens=100), clock.monotonic()),
            lambda: f.begin_transfer(f["p0"], worker, 64),
            lambda: f.doubt(worker),
            lambda: clock.advance(0.3),  # suspicion fades
            lambda: setattr(worker, "ready", False),
            stack.close,
        ]

    for change in changes():
        before = f.view_of(worker)
        assert f.view_of(worker) is before
        change()
        f.check()
        assert f.view_of(worker) != before


def test_who_serves_a_model_is_known_at_once() -> None:
    f, _ = fleet()
    up(f, "p0", "d0")
    assert [worker.name for worker in f.serving_model("m")] == ["p0", "d0"]
    f["d0"].models = ({"id": "n"}, {"id": "lora", "parent": "n"})
    assert [worker.name for worker in f.serving_model("n")] == ["d0"]
    assert (f.adapter("lora"), f.adapter("n"), f.adapter(None)) == ("lora", None, None)
    left = f["p0"]
    f.leave(left)
    entered = f.enter(TWO[0])
    entered.models = left.models
    assert f.serving_model("m") == [entered], "the same name and cards, but not the same worker"
    assert list(f.serving_model(None)) == list(f)
