"""Two engines on one GPU: a split goes from GPU memory to GPU memory, and answers as one engine alone does."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine.test_build import ask, collect, start
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.core import EmbeddedEngine
from tollbridge.transfer.base import Fingerprint, KVMemory
from tollbridge.transfer.cuda import CudaMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tcp import TcpReceiver, TcpSender
from tollbridge.wire.params import TransferParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

CONFIG = EngineConfig(kv_cache_mib=8, threads=1, max_num_batched_tokens=48, device="cuda")
OPTIONS = TransferOptions(streams=2, min_frame_bytes=4096, max_frame_bytes=16384, ring_bytes=1 << 20)


@dataclass
class Split:
    prefill: EmbeddedEngine
    decode: EmbeddedEngine
    sender: TcpSender

    def params(self, role: str, transfer_id: str) -> TransferParams:
        host, port = self.sender.address
        return TransferParams(v=1, transfer_id=transfer_id, role=role, host=host, port=port, expires=9e9)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def split(tiny_model_dir: Path) -> Iterator[Split]:
    senders: list[TcpSender] = []

    def make_sender(memory: KVMemory, fingerprint: Fingerprint) -> TcpSender:
        assert isinstance(memory, CudaMemory)
        senders.append(TcpSender(memory, fingerprint, OPTIONS))
        return senders[-1]

    prefill = start(tiny_model_dir, CONFIG, make_sender=make_sender)
    decode = start(tiny_model_dir, CONFIG, make_receiver=lambda *both: TcpReceiver(*both, OPTIONS))
    yield Split(prefill, decode, senders[0])
    decode.shutdown()
    prefill.shutdown()


def test_graphs_answer_as_the_eager_engine_does(tiny_model_dir: Path) -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(200, 500) for _ in range(length)] for length in (1, 17, 100, 250, 33)]
    answers = []
    for graphs in (False, True):
        engine = start(tiny_model_dir, msgspec.structs.replace(CONFIG, cuda_graphs=graphs))
        asked = [ask(engine, f"g{index}", prompt, max_tokens=40) for index, prompt in enumerate(prompts)]
        answers.append([collect(one)[0] for one in asked])
        engine.shutdown()
    assert answers[0] == answers[1]


def test_splits_answer_as_one_engine_does(split: Split, tiny_model_dir: Path) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(200, 500) for _ in range(length)] for length in (17, 100, 300, 33, 250, 64)]
    alone = start(tiny_model_dir, CONFIG)
    want = [collect(ask(alone, f"w{index}", prompt))[0] for index, prompt in enumerate(prompts)]
    alone.shutdown()
    legs = []
    for index, prompt in enumerate(prompts):
        transfer_id = secrets.token_hex(16)
        first = ask(split.prefill, f"p{index}", prompt, max_tokens=1, transfer=split.params("prefill", transfer_id))
        second = ask(split.decode, f"d{index}", prompt, transfer=split.params("decode", transfer_id))
        legs.append((first, second))
    for (first, second), ids, prompt in zip(legs, want, prompts, strict=True):
        assert collect(first)[0] == ids[:1]
        got, _, last = collect(second)
        assert got == ids
        assert last.report is not None
        assert last.report.loaded_tokens == len(prompt) - 1
    split.prefill.check()
    split.decode.check()
