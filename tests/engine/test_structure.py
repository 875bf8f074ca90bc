"""Structured output on a real vocabulary: what is drawn is what was asked for; nonsense is refused in a sentence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.engine.test_build import collect, start
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import EngineRequest, SamplingParams, Structure
from tollbridge.engine.core import EmbeddedEngine
from tollbridge.engine.structure import MAX_TEXT_BYTES
from tollbridge.errors import RequestError, UnsupportedError

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONFIG = EngineConfig(kv_cache_mib=8, threads=1)


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[EmbeddedEngine]:
    engine = start(tiny_model_dir, CONFIG)
    yield engine
    engine.check()
    engine.shutdown()


def say(engine: EmbeddedEngine, structure: Structure, **more: Any) -> tuple[list[int], str, str | None]:
    outputs: SimpleQueue[Any] = SimpleQueue()
    prompt = more.pop("prompt", (5, 6, 7))
    continued = more.pop("num_continued_tokens", 0)
    sampling = SamplingParams(**{"max_tokens": 60, "seed": 3, "structure": structure, **more})
    engine.submit(
        EngineRequest(
            request_id=f"r{id(outputs)}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            sink=outputs.put,
            num_continued_tokens=continued,
        )
    )
    ids, text, last = collect(outputs)
    return ids, text, last.finish_reason


def without_spaces(engine: EmbeddedEngine) -> tuple[tuple[int, float], ...]:
    spaces = [token for token in range(512) if re.search(r"\s", engine.tokenizer.decode([token]))]
    return tuple((token, -100.0) for token in spaces)


@pytest.mark.parametrize("seed", range(6))
def test_a_schema(engine: EmbeddedEngine, seed: int) -> None:
    tight = without_spaces(engine)  # a schema allows any number of them, and this model has no taste
    _, text, finish = say(engine, Structure("json", json.dumps(PERSON)), seed=seed, temperature=1.5, logit_bias=tight)
    assert finish == "stop"
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert person["name"] in ("ada", "bob")
    assert 0 <= person["age"] <= 99


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        (Structure("regex", "[ab]{3}-[0-9]+x"), "[ab]{3}-[0-9]+x"),
        (Structure("choice", '["yes", "no \\"really\\"", "naïve"]'), 'yes|no "really"|naïve'),
        (Structure("grammar", 'start: "x" "y"+ "z"'), "xy+z"),
    ],
)
def test_other_structures(engine: EmbeddedEngine, structure: Structure, pattern: str) -> None:
    for seed in range(4):
        _, text, finish = say(engine, structure, seed=seed, max_tokens=200)
        assert finish == "stop"
        assert re.fullmatch(pattern, text)


def test_any_object(engine: EmbeddedEngine) -> None:
    _, text, finish = say(engine, Structure("json_object"), max_tokens=40)
    assert text.lstrip().startswith("{")
    assert finish == "length" or isinstance(json.loads(text), dict)


def test_min_tokens_and_ignore_eos_do_not_break_a_structure(engine: EmbeddedEngine) -> None:
    """Complete is complete; whoever ignores the end of the text goes on behind it as he likes."""
    _, text, finish = say(engine, Structure("choice", '["yes"]'), min_tokens=9, max_tokens=9)
    assert (text, finish) == ("yes", "stop")
    ids, text, finish = say(engine, Structure("choice", '["yes"]'), ignore_eos=True, max_tokens=30)
    assert (text[:3], finish, len(ids)) == ("yes", "length", 30)


def test_an_answer_that_goes_on_elsewhere(engine: EmbeddedEngine) -> None:
    structure = Structure("json", json.dumps(PERSON))
    tight = without_spaces(engine)
    whole, _, _ = say(engine, structure, logit_bias=tight)
    for cut in range(1, len(whole)):
        sent = (5, 6, 7, *whole[:cut])
        rest, _, finish = say(engine, structure, prompt=sent, num_continued_tokens=cut, logit_bias=tight)
        assert (rest, finish) == (whole[cut:], "stop")
    with pytest.raises(RequestError, match="do not fit the structure"):
        say(engine, structure, num_continued_tokens=2)


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure("regex", "("), "regex"),
        (Structure("json", '{"type": "nonsense"}'), "json"),
        (Structure("json", "{"), "json"),
        (Structure("json", "[1]"), "json"),
        (Structure("grammar", "start: nobody"), "grammar"),
        (Structure("choice", "[]"), "choice"),
        (Structure("regex", "a" * (MAX_TEXT_BYTES + 1)), "64 KiB"),
        (Structure("json", '{"multipleOf": 123456789}'), "least common multiple"),
        (Structure("json", '{"multipleOf": 0.123456789123}'), "least common multiple"),
        (Structure("json", '{"\\u006dultipleOf"\n: 987654321000}'), "least common multiple"),
        (Structure("json", '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'), "least common multiple"),
        (Structure("grammar", 'start: %json {"multipleOf": 123456789}'), "least common multiple"),
        (Structure("json", '{"multipleOf": 1-2}'), "json"),
        (Structure("json", '{"multipleOf": 123457, "x": "\\u0022multipleOf\\u0022: 1-2"}'), "least common multiple"),
        (Structure("grammar", 'start: %json {"multipleOf": 123457}\n// "multipleOf": 1-2\n'), "least common multiple"),
        (Structure("grammar", 'start: %json {"multipleOf": 1e1000000}'), "grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused(engine: EmbeddedEngine, structure: Structure, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        engine.check_structure(structure)
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 400


@pytest.mark.parametrize(
    ("kind", "number"), [("number", "0.01"), ("integer", "12"), ("integer", "86400"), ("integer", "1e6")]
)
def test_multiples_of_little(engine: EmbeddedEngine, kind: str, number: str) -> None:
    engine.check_structure(Structure("json", f'{{"type": "{kind}", "multipleOf": {number}}}'))


def test_many_alternatives(engine: EmbeddedEngine) -> None:
    """As many as a structure's text has room for."""
    words = [f"word{index}" for index in range(5000)]
    _, text, finish = say(engine, Structure("choice", json.dumps(words)), max_tokens=40)
    assert finish == "stop"
    assert text in words
    properties = {f"p{index}": {"type": "null"} for index in range(1500)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    _, text, finish = say(engine, Structure("json", json.dumps(schema)), max_tokens=12)
    assert finish in ("stop", "length")
    assert text.lstrip().startswith("{")


def test_what_was_compiled_is_kept(engine: EmbeddedEngine) -> None:
    structures = engine._structures
    assert structures is not None
    structure = Structure("regex", "kept[0-9]")
    before = structures.statistics()
    for _ in range(3):
        engine.check_structure(structure)
        say(engine, structure)
    after = structures.statistics()
    assert after.compiled_total == before.compiled_total + 1
    assert after.started_total == before.started_total + 3
    assert after.num_compiled <= 64


def test_without_the_library(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    from tollbridge.engine.tokenizer import ModelTokenizer

    structures = ModelTokenizer(tiny_model_dir, name="tiny").structures(vocab_size=512, eos_token_ids=(2,))
    with pytest.raises(UnsupportedError, match=r"tollbridge\[structured\]"):
        structures.check(Structure("json_object"))
