from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tollbridge.engine.base import ChatOptions
from tollbridge.engine.tokenizer import ModelTokenizer
from tollbridge.errors import RequestError, StartupError, UnsupportedError


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer(tiny_model_dir, name="tiny")


@pytest.mark.parametrize("text", ["", "a  b\n", "the toll", "你好 👩‍👩‍👧‍👦", "x .  , don't"])
def test_decode_undoes_encode(tokenizer: ModelTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template(tokenizer: ModelTokenizer) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    ids = tokenizer.apply_chat_template(messages)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert ids == tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False)
    assert tokenizer.apply_chat_template(messages, ChatOptions(add_generation_prompt=False)) == tokenizer.encode(text)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_text_parts_are_joined(tokenizer: ModelTokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == tokenizer.apply_chat_template(
        [{"role": "user", "content": "a\nb"}]
    )


def test_absent_content_is_empty(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": None}]) == tokenizer.apply_chat_template(
        [{"role": "assistant", "content": ""}]
    )


def test_other_parts_are_refused(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(UnsupportedError, match="text parts only"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize(
    "message", [{"role": "wizard", "content": "x"}, {"content": "x"}, {"role": "user", "content": 5}]
)
def test_what_the_template_refuses_is_the_callers_mistake(tokenizer: ModelTokenizer, message: dict) -> None:
    with pytest.raises(RequestError, match="The chat template of tiny refuses the messages"):
        tokenizer.apply_chat_template([message])


def test_no_template(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UnsupportedError, match="has no chat template"):
        ModelTokenizer(folder, name="m").apply_chat_template([{"role": "user", "content": "x"}])


def test_no_tokenizer(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model_dir / "config.json", tmp_path)
    with pytest.raises(StartupError, match="no usable tokenizer"):
        ModelTokenizer(tmp_path, name="m")


def test_saved_truncation_and_padding_are_switched_off(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(document))
    tokenizer = ModelTokenizer(folder, name="m")
    assert tokenizer.decode(tokenizer.encode("a long text indeed")) == "a long text indeed"


def test_several_threads_at_once(tokenizer: ModelTokenizer) -> None:
    texts = [f"the toll {number} 你好" for number in range(60)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts)) == texts


@pytest.mark.model
def test_smollm2(smollm2_dir: Path) -> None:
    tokenizer = ModelTokenizer(smollm2_dir, name="smollm2")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Count 1234"}])
    start, end, newline = 1, 2, 198
    assert ids[0] == start
    assert ids.count(end) == 2  # the default system message, and ours
    assert ids[-4:] == [start, *tokenizer.encode("assistant"), newline]
    assert [tokenizer.decode([one]) for one in tokenizer.encode(" 1234")] == [" ", "1", "2", "3", "4"]


def test_tools_that_the_template_does_not_know_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    options = ChatOptions(tools=[{"type": "function", "function": {"name": "weather"}}])
    with pytest.raises(UnsupportedError, match="takes no tools") as refused:
        ModelTokenizer(folder, name="m").apply_chat_template([{"role": "user", "content": "hi"}], options)
    assert refused.value.param == "tools"


def test_tools_and_variables_reach_the_template(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ tools | tojson }} {{ mood }} {{ messages[0].content }}")
    made = ModelTokenizer(folder, name="m")
    options = ChatOptions(tools=[{"type": "function"}], template_kwargs={"mood": "dry"})
    ids = made.apply_chat_template([{"role": "user", "content": "hi"}], options)
    assert made.decode(ids) == '[{"type": "function"}] dry hi'
    for name in ("chat_template", "tokenize", "messages", "tools", "return_dict"):
        with pytest.raises(RequestError, match=name):
            made.apply_chat_template([{"role": "user", "content": "hi"}], ChatOptions(template_kwargs={name: "x"}))


def test_a_last_message_may_be_left_open(tokenizer: ModelTokenizer) -> None:
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    ids = tokenizer.apply_chat_template([{"role": "assistant", "content": "A toll is"}], options)
    assert ids == tokenizer.encode("<|im_start|>assistant\nA toll is")
    assert tokenizer.token_strings(ids)[0] == "<|im_start|>"
