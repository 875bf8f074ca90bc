from __future__ import annotations

import queue
from pathlib import Path

import pytest

from tests.engine.driver import generate, make_bench
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import EngineRequest, SamplingParams, StepOutput
from tollbridge.engine.build import build_engine
from tollbridge.engine.core import EmbeddedEngine
from tollbridge.errors import ConfigError
from tollbridge.transfer.base import Fingerprint, KVMemory
from tollbridge.transfer.loopback import LoopbackNetwork
from tollbridge.wire.params import TransferParams

CONFIG = EngineConfig(kv_cache_mib=4, threads=1, max_num_batched_tokens=48)


def start(model: str | Path, config: EngineConfig = CONFIG, **more) -> EmbeddedEngine:
    return build_engine(str(model), config, dtype="float32", **more)


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path):
    engine = start(tiny_model_dir, name="tiny")
    yield engine
    engine.shutdown()


def ask(engine: EmbeddedEngine, request_id: str, prompt: list[int], **more) -> queue.SimpleQueue[StepOutput]:
    outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
    transfer = more.pop("transfer", None)
    sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **more})
    engine.submit(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            sink=outputs.put,
            transfer=transfer,
        )
    )
    return outputs


def collect(outputs: queue.SimpleQueue[StepOutput]) -> tuple[list[int], str, StepOutput]:
    ids: list[int] = []
    text = ""
    while True:
        output = outputs.get(timeout=120)
        ids += output.token_ids
        text += output.text
        if output.finish_reason is not None:
            return ids, text, output


def test_info(engine: EmbeddedEngine) -> None:
    info = engine.info
    assert (info.name, info.dtype, info.block_size, info.vocab_size) == ("tiny", "float32", 16, 512)
    assert info.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert info.num_blocks == 4 * 1024 * 1024 // (16 * info.kv_bytes_per_token)
    assert info.max_model_len == min(4096, info.num_blocks * 16)
    assert info.eos_token_ids == (2,)


def test_answers_are_the_models(engine: EmbeddedEngine, tiny_model_dir: Path) -> None:
    prompts = [list(range(300, 300 + size)) for size in (1, 40, 90)]  # words, so no prompt ends within a character
    want = generate(make_bench(tiny_model_dir), prompts, 8)
    asked = [ask(engine, f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    for outputs, ids in zip(asked, want, strict=True):
        got, text, last = collect(outputs)
        assert got == ids
        assert text == engine.tokenizer.decode(ids)
        assert last.finish_reason == "length"
    engine.check()


def test_seeded_sampling_repeats(engine: EmbeddedEngine) -> None:
    first = collect(ask(engine, "a", [5, 6, 7], temperature=1.0, seed=11))[0]
    assert collect(ask(engine, "b", [5, 6, 7], temperature=1.0, seed=11))[0] == first
    assert collect(ask(engine, "c", [5, 6, 7], temperature=1.0, seed=12))[0] != first


def test_stop_string(engine: EmbeddedEngine) -> None:
    _, text, _ = collect(ask(engine, "plain", [50, 60, 70], max_tokens=20))
    stop = text[6:8]
    _, cut, last = collect(ask(engine, "stopped", [50, 60, 70], max_tokens=20, stop=(stop,)))
    assert cut == text[: text.index(stop)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_a_split_over_loopback_equals_local(engine: EmbeddedEngine, tiny_model_dir: Path) -> None:
    seen: list[tuple[KVMemory, Fingerprint]] = []

    def make_sender(memory: KVMemory, fingerprint: Fingerprint):
        seen.append((memory, fingerprint))
        return network.sender(memory, fingerprint)

    network = LoopbackNetwork()
    prefill = start(tiny_model_dir, make_sender=make_sender)
    decode = start(tiny_model_dir, make_receiver=network.receiver)
    try:
        prompt = list(range(200, 300))
        want = collect(ask(engine, "local", prompt))[0]
        host, port = network_address(prefill)
        common = {"v": 1, "transfer_id": "ab" * 16, "host": host, "port": port, "expires": 9e9}
        first = ask(prefill, "p", prompt, max_tokens=1, transfer=TransferParams(role="prefill", **common))
        second = ask(decode, "d", prompt, transfer=TransferParams(role="decode", **common))
        assert collect(first)[0] == want[:1]
        got, _, last = collect(second)
        assert got == want
        assert last.report is not None
        assert last.report.loaded_tokens > 0
        assert seen[0][1].model
    finally:
        decode.shutdown()
        prefill.shutdown()


def network_address(engine: EmbeddedEngine) -> tuple[str, int]:
    return engine._desk._sender.address  # type: ignore[union-attr]  # the worker keeps the sender it made


def test_the_name_is_the_folders(tiny_model_dir: Path) -> None:
    engine = start(tiny_model_dir)
    engine.shutdown()
    assert engine.info.name == tiny_model_dir.name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(kv_cache_mib=4, max_model_len=5000, threads=1), "has 4096 positions"),
        (EngineConfig(kv_cache_mib=1, block_size=4096, threads=1), "less than one block"),
    ],
)
def test_impossible_sizes(tiny_model_dir: Path, config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny_model_dir, config)


@pytest.mark.model
def test_smollm2_answers(smollm2_dir: Path) -> None:
    engine = start(smollm2_dir, EngineConfig(kv_cache_mib=32, threads=1))
    try:
        prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
        _, text, last = collect(ask(engine, "a", prompt, max_tokens=30, ignore_eos=False))
        assert "Paris" in text
        assert last.finish_reason == "stop"
        assert "<|im_end|>" not in text
    finally:
        engine.shutdown()
