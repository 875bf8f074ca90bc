"""A real model, really sampled: split equals local equals stock transformers with the naive reference, token by token;
in bfloat16, where the last digit depends on the batch, split equals local as long as nothing runs beside."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_build import ask, collect
from tests.support import sampling
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import SamplingParams, StepOutput
from tollbridge.engine.build import build_engine
from tollbridge.engine.core import EmbeddedEngine
from tollbridge.transfer.base import Fingerprint, KVMemory
from tollbridge.transfer.loopback import LoopbackNetwork
from tollbridge.wire.params import TransferParams

CONFIG = EngineConfig(kv_cache_mib=4, threads=1, max_num_batched_tokens=24)
PROMPT = [7 + 5 * i % 500 for i in range(41)]
MAX_TOKENS = 12
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 4},
    "penalised": {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0},
    "bound": {
        "temperature": 1.0,
        "seed": 5,
        "allowed_token_ids": tuple(range(30, 60)),
        "bad_words": ((31,), (32, 33)),
        "min_tokens": 4,
    },
}


class Split:
    """Two engines of one dtype and the wire between them; decode also serves locally."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.network = LoopbackNetwork()
        self.address = ("", 0)
        self.prefill = build_engine(str(folder), CONFIG, dtype=dtype, make_sender=self._sender)
        self.decode = build_engine(str(folder), CONFIG, dtype=dtype, make_receiver=self.network.receiver)
        self.alone = build_engine(str(folder), CONFIG, dtype=dtype)

    def _sender(self, memory: KVMemory, fingerprint: Fingerprint) -> Any:
        sender = self.network.sender(memory, fingerprint)
        self.address = sender.address
        return sender

    def ask(self, prompt: list[int], **more: Any) -> tuple[list[int], StepOutput]:
        name, (host, port) = secrets.token_hex(16), self.address
        legs = [
            TransferParams(v=1, transfer_id=name, role=role, host=host, port=port, expires=9e9)  # type: ignore[arg-type]
            for role in ("prefill", "decode")
        ]
        first = ask(self.prefill, name, prompt, **{**more, "max_tokens": 1, "min_tokens": 0}, transfer=legs[0])
        second = ask(self.decode, name, prompt, **more, transfer=legs[1])
        collect(first)
        ids, _, last = collect(second)
        return ids, last

    def close(self) -> None:
        for engine in (self.decode, self.prefill, self.alone):
            engine.check()
            engine.shutdown()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def split(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Iterator[Split]:
    split = Split(tiny_model_dir, request.param)
    yield split
    split.close()


def test_the_kv_cache_has_the_dtype_of_the_model(split: Split) -> None:
    size = {"float32": 4, "bfloat16": 2}[split.alone.info.dtype]
    assert split.alone.info.kv_bytes_per_token == 4 * 2 * 2 * 16 * size


@pytest.mark.parametrize("feature", FEATURES)
def test_split_is_local_is_stock_transformers(split: Split, tiny_model_dir: Path, feature: str) -> None:
    more = {"max_tokens": MAX_TOKENS, "ignore_eos": False, **FEATURES[feature]}
    prompt = [*PROMPT, list(FEATURES).index(feature) + 100]
    local, _, _ = collect(ask(split.alone, feature, prompt, **more))
    got, last = split.ask(prompt, **more)
    assert got == local
    assert last.report is not None
    assert last.report.loaded_tokens > 0
    if split.alone.info.dtype == "float32":
        assert got == stock(tiny_model_dir, split.alone, prompt, SamplingParams(**{"seed": 0, **more}))


def stock(folder: Path, engine: EmbeddedEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    output: list[int] = []
    ends = set(engine.info.eos_token_ids)
    while len(output) < params.max_tokens and not (output and output[-1] in ends):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].numpy()
        output.append(sampling.pick(logits, params, prompt, output, seed=params.seed or 0, end_ids=ends))
    return output


@pytest.mark.parametrize("split", ["float32"], indirect=True)
def test_prompt_logprobs_are_those_of_stock_transformers(split: Split, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    outputs = ask(split.alone, "scored", PROMPT, max_tokens=1, prompt_logprobs=2)
    told = outputs.get(timeout=120).prompt_logprobs
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert told is not None
    assert (len(told), told[0]) == (len(PROMPT), None)
    for position, one in enumerate(told[1:], 1):
        assert one is not None
        assert one.token_ids == (PROMPT[position], *want[position - 1].topk(2).indices.tolist())
        np.testing.assert_allclose(one.logprobs, want[position - 1][list(one.token_ids)].numpy(), atol=1e-3)
