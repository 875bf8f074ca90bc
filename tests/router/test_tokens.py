"""Token ids in the router: whose they are, what happens when nobody has them, and that memory is bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.router_rig import PATIENCE_S
from tests.support.stub_worker import StubWorker, stubs
from tollbridge.clock import SystemClock
from tollbridge.kv.content import Content
from tollbridge.router.fleet import Fleet
from tollbridge.router.ingress import Call, parse_body
from tollbridge.router.limits import Limits
from tollbridge.router.tokenizer import TemplateError, maybe_load
from tollbridge.router.tokens import Tokens
from tollbridge.router.upstream import Upstream

TEXT = "The toll of the bridge is three crowns. "
CHAT = [{"role": "user", "content": TEXT}]


def call(model: str | None = "stub-model", **body: Any) -> Call:
    raw = json.dumps(body).encode()
    return Call(
        id="r", path="/v1/completions", body=parse_body(raw), body_bytes=len(raw), model=model, stream=False,
        override=None, trace={},
    )  # fmt: skip


@asynccontextmanager
async def tokens(worker: StubWorker, folder: Path | None = None, **limits: Any) -> AsyncIterator[Tokens]:
    limits = {"tokenize_timeout_s": PATIENCE_S, **limits}
    async with stubs(worker):
        fleet = Fleet([worker.config], clock=SystemClock())
        fleet[worker.name].ready, fleet[worker.name].models = True, ({"id": worker.model},)
        upstream = Upstream(Limits(**limits))
        async with upstream:
            made = Tokens(folder, fleet, upstream, Limits(**limits))
            await made.load()
            yield made
            made.check()
            await made.close()


def like(folder: Path) -> Callable[[dict[str, Any]], tuple[dict[str, Any], int]]:
    """Return how a worker with the model in `folder` answers /tokenize."""
    local = maybe_load(folder)
    assert local is not None

    def answer(body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        if "messages" in body:
            return {"tokens": local.chat(body["messages"])}, 200
        return {"tokens": local.text(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))}, 200

    return answer


async def settle(made: Tokens) -> None:
    """Let the probes end."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*made._probes)


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_ids_need_nobody(prompt: list[Any]) -> None:
    worker = StubWorker("w")
    async with tokens(worker) as made:
        found = await made.of(call(prompt=prompt, cache_salt="s"))
        assert (found.origin, found.num_tokens) == ("ids", 3)
        assert found.content == Content.of_tokens([5, 6, 7], salt="s")
        assert worker.num_asked == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[1], [2]]}, {"prompt": ["a", "b"]}, {"prompt": [1, "a"]}, {"prompt": [-1]}, {"prompt": [1 << 40]},
        {"prompt": 3}, {"prompt": None}, {"messages": "x"}, {"messages": [1]}, {},
        {"prompt": "a", "truncate_prompt_tokens": 5}, {"prompt": "a", "add_special_tokens": "x"},
    ],
)  # fmt: skip
async def test_what_is_no_single_prompt_is_nothing(body: dict[str, Any]) -> None:
    async with tokens(StubWorker("w")) as made:
        found = await made.of(call(**body))
        assert (found.origin, found.content, found.num_tokens) == ("none", None, None)


async def test_a_worker_is_asked_and_the_answer_remembered() -> None:
    worker = StubWorker("w")
    async with tokens(worker) as made:
        first = await made.of(call(prompt=TEXT))
        again = await made.of(call(prompt=TEXT))
        assert (first.origin, again.origin) == ("worker", "memory")
        assert first.content == again.content == Content.of_tokens([1, 2, 3])
        assert worker.num_asked == 1
        other = await made.of(call(prompt=TEXT, add_special_tokens=False))
        assert other.origin == "worker", "the same text, but not the same tokens"


async def test_what_shapes_the_tokens_goes_along() -> None:
    worker, asked = StubWorker("w"), []
    worker.tokenize = lambda body: (asked.append(body) or {"tokens": [9]}, 200)  # type: ignore[func-returns-value]
    async with tokens(worker) as made:
        await made.of(call(messages=CHAT, tools=[{"type": "function"}], chat_template_kwargs={"thinking": True}))
        assert asked == [
            {
                "model": "stub-model",
                "messages": CHAT,
                "tools": [{"type": "function"}],
                "chat_template_kwargs": {"thinking": True},
            }
        ]


@pytest.mark.parametrize("answer", [({"error": "no"}, 400), ({"tokens": "x"}, 200), ({"tokens": [-1]}, 200), ({}, 500)])
async def test_without_an_answer_the_text_must_do(answer: tuple[dict[str, Any], int]) -> None:
    worker = StubWorker("w")
    worker.tokenize = lambda body: answer
    async with tokens(worker) as made:
        found = await made.of(call(prompt=TEXT))
        assert (found.origin, found.num_tokens) == ("text", None)
        assert found.content is not None and found.content.unit_bytes == 1
        assert made.statistics().failed_total == 1


async def test_long_ids_are_as_good_as_short_ones() -> None:
    async with tokens(StubWorker("w")) as made:
        ids = list(range(5000))
        long = await made.of(call(prompt=ids))
        assert (long.origin, long.num_tokens) == ("ids", 5000)
        assert long.content is not None
        assert long.content.data == Content.of_tokens(ids).data
        for odd in ([ids, [1]], [*ids[:10], "x", *ids], [-1, *ids], [0.5, *ids]):
            assert (await made.of(call(prompt=odd))).num_tokens is None


@pytest.mark.parametrize(("status", "num_asked"), [(404, 1), (501, 1), (400, 3), (500, 3)])
async def test_a_worker_without_tokenize_is_asked_once_in_its_life(status: int, num_asked: int) -> None:
    worker = StubWorker("w")
    worker.tokenize = lambda body: ({}, status)
    async with tokens(worker) as made:
        for at in range(3):
            assert (await made.of(call(prompt=TEXT + str(at)))).origin == "text"
        assert worker.num_asked == num_asked
        for one in made._fleet:
            one.incarnation = "another"
        await made.of(call(prompt=TEXT))
        assert worker.num_asked == num_asked + 1


async def test_a_worker_that_is_gone_or_late_does_not_hold_anybody_up() -> None:
    worker = StubWorker("w")
    async with tokens(worker, tokenize_timeout_s=0.05) as made:
        release = asyncio.Event()

        async def late(request: Any) -> Any:
            await release.wait()

        worker._tokenize = late  # type: ignore[method-assign]
        await worker.stop()
        assert (await made.of(call(prompt=TEXT))).origin == "text"
        await worker.start()
        assert (await made.of(call(prompt=TEXT))).origin == "text"


async def test_a_prompt_that_is_too_long_is_not_tokenised() -> None:
    worker = StubWorker("w")
    async with tokens(worker, max_tokenize_bytes=100) as made:
        assert (await made.of(call(prompt=TEXT * 9))).origin == "text"
        assert worker.num_asked == 0


async def test_our_own_tokenizer_is_believed_once_a_worker_agrees(tiny_model_dir: Path) -> None:
    worker = StubWorker("w")
    worker.tokenize = like(tiny_model_dir)
    async with tokens(worker, tiny_model_dir) as made:
        first = await made.of(call(prompt=TEXT))
        assert first.origin == "worker"
        await settle(made)
        asked = worker.num_asked
        for body in ({"prompt": TEXT + "!"}, {"messages": CHAT}, {"prompt": TEXT * 40}):
            found = await made.of(call(**body))
            theirs = worker.tokenize(body)[0]["tokens"]
            assert (found.origin, found.content) == ("tokenizer", Content.of_tokens(theirs))
        assert worker.num_asked == asked
        tools = await made.of(call(messages=CHAT, tools=[{}]))
        parts = await made.of(call(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]))
        assert (tools.origin, parts.origin) == ("worker", "text"), "only the worker knows what it makes of these"


async def test_a_tokenizer_that_differs_is_not_believed(tiny_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = StubWorker("w")  # says 1, 2, 3 to everything
    async with tokens(worker, tiny_model_dir) as made:
        await made.of(call(prompt=TEXT))
        await settle(made)
        assert (await made.of(call(prompt=TEXT + "!"))).origin == "worker"
        assert "agrees on nothing" in caplog.text


async def test_a_probe_without_an_answer_is_made_again(tiny_model_dir: Path) -> None:
    worker = StubWorker("w")
    worker.tokenize = lambda body: ({}, 503)
    async with tokens(worker, tiny_model_dir) as made:
        await made.of(call(prompt=TEXT))
        await settle(made)
        worker.tokenize = like(tiny_model_dir)
        await made.of(call(prompt=TEXT + "?"))
        await settle(made)
        assert (await made.of(call(prompt=TEXT + "!"))).origin == "tokenizer"


async def test_memory_is_bounded() -> None:
    worker = StubWorker("w")
    worker.tokenize = lambda body: ({"tokens": [1] * 10}, 200)
    async with tokens(worker, remembered_token_bytes=200) as made:
        for number in range(9):
            await made.of(call(prompt=f"{TEXT}{number}"))
            made.check()
        assert made.statistics().num_remembered == 5
        assert (await made.of(call(prompt=f"{TEXT}8"))).origin == "memory"
        assert (await made.of(call(prompt=f"{TEXT}0"))).origin == "worker"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert maybe_load(tmp_path) is None


def test_a_template_that_refuses(tiny_model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model_dir / name).read_bytes())
    local = maybe_load(tmp_path)
    assert local is not None
    with pytest.raises(TemplateError, match="no chat template"):
        local.chat(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[0].role) }}")
    local = maybe_load(tmp_path)
    assert local is not None
    with pytest.raises(TemplateError, match="no user"):
        local.chat(CHAT)


def test_the_ids_are_those_of_transformers(tiny_model_dir: Path) -> None:
    from tollbridge.engine.base import ChatOptions
    from tollbridge.engine.tokenizer import ModelTokenizer

    local, theirs = maybe_load(tiny_model_dir), ModelTokenizer(tiny_model_dir, name="tiny")
    assert local is not None
    for text in (TEXT, "", " \n\t", "Ünïcödé 你好 <|im_start|>user", msgspec.json.encode(CHAT).decode()):
        for special in (True, False):
            assert local.text(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
    talk = [{"role": "system", "content": "Brief."}, *CHAT, {"role": "assistant", "content": "Three."}, *CHAT]
    for prompt in (True, False):
        assert local.chat(talk, add_generation_prompt=prompt) == theirs.apply_chat_template(
            [dict(each) for each in talk], ChatOptions(add_generation_prompt=prompt)
        )
