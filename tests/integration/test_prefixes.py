"""The router's picture of real workers: their caches, their tokens, their load."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import Stack, complete, get, post, record, running

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    with running(Stack(tmp_path_factory.mktemp("prefixes"), str(tiny_model_dir))) as running_stack:
        yield running_stack


def workers(stack: Stack) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in json.loads(get(stack.url + "/fleet"))["workers"]}


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.05)


def metric(stack: Stack, name: str) -> float:
    lines = get(stack.url + "/metrics").decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def found_by(known: dict[str, Any]) -> int:
    """Return the prompt tokens that the decode worker found in its cache."""
    return int(known["happened"]["decode_report"].get("cached_tokens", 0))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(4, 255) for _ in range(length)]


def test_both_workers_are_followed(stack: Stack) -> None:
    until(lambda: all(worker["follows_events"] for worker in workers(stack).values()))


def test_a_prompt_goes_where_its_prefix_is(stack: Stack) -> None:
    """What the index promises is what the worker finds, for prefixes at every place around a block's edge."""
    first = complete(stack, prompt(1, 200), "kv-aware")
    home = first.decision["decode"]
    for length in (17, 32, 33, 199, 200):
        answer = complete(stack, prompt(1, length), "kv-aware")
        known = record(stack, answer)
        assert answer.decision["decode"] == home
        assert known["decision"]["terms"]["cached_tokens"] == found_by(known) == (length - 1) // 16 * 16


def test_after_a_split_both_have_it(stack: Stack) -> None:
    assert record(stack, complete(stack, prompt(2, 160), "split"))["happened"]["split_verified"]
    again = record(stack, complete(stack, prompt(2, 160), "split"))
    terms, happened = again["decision"]["terms"], again["happened"]
    assert terms["decode_cached_tokens"] == happened["decode_report"]["cached_tokens"] == 144
    assert terms["cached_tokens"] == happened["prefill_report"]["cached_tokens"] == 144


def test_a_salt_is_a_world_of_its_own(stack: Stack) -> None:
    complete(stack, prompt(3, 100), "kv-aware", cache_salt="mine")
    for salt, cached in (("mine", 96), ("yours", 0)):
        known = record(stack, complete(stack, prompt(3, 100), "kv-aware", cache_salt=salt))
        assert known["decision"]["terms"]["cached_tokens"] == cached
        assert found_by(known) == cached


def test_what_was_told_stays_when_what_was_expected_is_over(stack: Stack) -> None:
    before = metric(stack, "tollbridge_router_kv_events_total")
    complete(stack, prompt(4, 100), "kv-aware")
    until(lambda: metric(stack, "tollbridge_router_kv_events_total") > before)
    held = metric(stack, "tollbridge_router_index_blocks")
    assert held > 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "A bridge, a toll, and a river."},
        {"prompt": "Long " * 400},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a toll?"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]},
    ],
)
def test_tokens_are_those_of_the_worker(stack: Stack, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    seen: list[str] = []
    while len(seen) < 3:
        answer = post(stack.url + path, {**body, "max_tokens": 2}, headers={"x-tollbridge-policy": "kv-aware"})
        assert answer.status == 200, answer.raw
        known = record(stack, answer)
        if known["decision"]["tokens_from"] == "text":
            continue  # a busy worker took more than the half second that it is given
        seen.append(known["decision"]["tokens_from"])
        assert known["decision"]["terms"]["prompt_tokens"] == answer.json["usage"]["prompt_tokens"]
        assert known["decision"]["terms"]["cached_tokens"] == found_by(known)
    assert set(seen) <= {"worker", "tokenizer", "memory"}


def test_the_routers_own_tokenizer_is_used_in_the_end(stack: Stack) -> None:
    numbers = itertools.count()

    def believed() -> bool:
        answer = post(stack.url + "/v1/completions", {"prompt": f"Toll number {next(numbers)}", "max_tokens": 1})
        return bool(record(stack, answer)["decision"]["tokens_from"] == "tokenizer")

    until(believed)


def test_load_is_what_the_workers_say(stack: Stack) -> None:
    until(lambda: all(worker["load"]["used_kv_tokens"] == 0 for worker in workers(stack).values()))
    for worker in workers(stack).values():
        load, engine = worker["load"], worker["status"]["engine"]
        assert load["block_size"] == 16
        assert load["max_num_batched_tokens"] == 128
        assert load["kv_bytes_per_token"] == worker["status"]["kv_bytes_per_token"] > 0
        assert load["free_kv_tokens"] == engine["num_blocks"] * 16
        assert (load["used_kv_tokens"], load["waiting_prefill_tokens"], load["num_sending"]) == (0, 0, 0)


def test_the_promise_is_kept(stack: Stack) -> None:
    promised = metric(stack, "tollbridge_router_cached_prompt_tokens_predicted_total")
    real = metric(stack, "tollbridge_router_cached_prompt_tokens_real_total")
    assert promised == real > 0
