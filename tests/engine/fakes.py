"""A model whose next token is a hash of the KV it reads from its paged memory: wrong KV gives wrong tokens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from tollbridge.clock import Clock, SystemClock
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import EngineRequest, ModelInfo, SamplingParams, StepOutput, TokenLogprobs
from tollbridge.engine.core import EmbeddedEngine
from tollbridge.engine.draws import Draw
from tollbridge.engine.ports import Sampled
from tollbridge.engine.sampler import TokenSampler
from tollbridge.sched.plan import SequenceChunk, StepPlan
from tollbridge.transfer.base import Fingerprint
from tollbridge.transfer.memory import BufferMemory
from tollbridge.wire.params import TransferParams

NUM_LAYERS = 3
TOKEN_BYTES = 8
BLOCK_SIZE = 4
VOCAB_SIZE = 1000
EOS = 999
TIMEOUT_S = 120.0


def make_memory(num_blocks: int) -> BufferMemory:
    size = NUM_LAYERS * num_blocks * BLOCK_SIZE * TOKEN_BYTES
    return BufferMemory(
        bytearray(b"\xee" * size),
        num_layers=NUM_LAYERS,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        token_bytes=TOKEN_BYTES,
    )


def fingerprint() -> Fingerprint:
    return Fingerprint(
        model="fake",
        dtype="bytes",
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_size=TOKEN_BYTES // 2,
        block_size=BLOCK_SIZE,
        layout="token-major",
    )


def kv_of(prefix: bytes, token_id: int, layer: int) -> bytes:
    return xxh3_64_digest(prefix + token_id.to_bytes(4, "big") + bytes([layer]))


def draw(layers: Sequence[bytes], seed: int, position: int) -> int:
    return xxh3_64_intdigest(b"".join(layers) + f"{seed}/{position}".encode()) % VOCAB_SIZE


def kv_after(tokens: Sequence[int]) -> list[bytes]:
    """The KV of `tokens`, by layer."""
    layers = [b""] * NUM_LAYERS
    for token in tokens:
        layers = [kv + kv_of(kv, token, layer) for layer, kv in enumerate(layers)]
    return layers


def reference(prompt: Sequence[int], *, max_tokens: int, seed: int = 0, ignore_eos: bool = True) -> list[int]:
    """What a worker must generate for `prompt`, computed without blocks, batches or caches."""
    tokens, layers = list(prompt), [b""] * NUM_LAYERS
    for _ in range(max_tokens):
        for position in range(len(layers[0]) // TOKEN_BYTES, len(tokens)):
            layers = [kv + kv_of(kv, tokens[position], layer) for layer, kv in enumerate(layers)]
        tokens.append(draw(layers, seed, len(tokens)))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Computes plans on a BufferMemory; `before` may block or raise in the engine's thread."""

    num_layers = NUM_LAYERS

    def __init__(self, memory: BufferMemory) -> None:
        self.memory = memory
        self.plans: list[StepPlan] = []
        self.before: Callable[[StepPlan], None] = lambda plan: None

    def run(self, plan: StepPlan, on_layer: Callable[[int], None]) -> list[list[bytes]]:
        self.plans.append(plan)
        self.before(plan)
        for layer in range(NUM_LAYERS):
            for chunk in plan.chunks:
                self._compute(chunk, layer)
            on_layer(layer)
        return [row for chunk in plan.chunks for row in self._rows(chunk)]

    def _compute(self, chunk: SequenceChunk, layer: int) -> None:
        kv = b"".join(self.memory.views(layer, chunk.block_table, 0, chunk.first_token))
        for position, token in enumerate(chunk.token_ids, chunk.first_token):
            value = kv_of(kv, token, layer)
            self.memory.views(layer, chunk.block_table, position, 1)[0][:] = value
            kv += value

    def _rows(self, chunk: SequenceChunk) -> list[list[bytes]]:
        """Return what was read up to each of the last tokens of a chunk."""
        end = chunk.first_token + len(chunk.token_ids)
        kv = [b"".join(self.memory.views(layer, chunk.block_table, 0, end)) for layer in range(NUM_LAYERS)]
        ends = range(end - chunk.num_rows + 1, end + 1)
        return [[layer[: last * TOKEN_BYTES] for layer in kv] for last in ends]


class FakeSampler:
    """Ignores every parameter."""

    def sample(self, logits: Any, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Sampled:
        picked = logits if rows is None else [logits[row] for row in rows]
        return Sampled([draw(row, one.seed, one.position) for row, one in zip(picked, draws, strict=True)])

    def score(self, logits: Any, first_row: int, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        return [TokenLogprobs((token_id,), (0.0,), rank=1) for token_id in token_ids]


def hash_logits(layers: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Logits `[VOCAB_SIZE]` by all of the KV; twenty tokens and the end are likely, so that tokens come again."""
    rng = np.random.default_rng(xxh3_64_intdigest(b"".join(layers)))
    logits = rng.standard_normal(VOCAB_SIZE, dtype=np.float32)
    logits[[*range(20), EOS]] += 6
    return logits


class HashSampler:
    """The real sampler over `hash_logits`."""

    def __init__(self) -> None:
        self._real = TokenSampler()

    def sample(self, logits: Any, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Sampled:
        return self._real.sample(self._tensor(logits), draws, rows)

    def score(self, logits: Any, first_row: int, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        return self._real.score(self._tensor(logits), first_row, token_ids, num_top)

    def _tensor(self, logits: Any) -> torch.Tensor:
        return torch.from_numpy(np.stack([hash_logits(row) for row in logits]))


class FakeStream:
    """Token 7 reads "7 "; a stop string may span tokens, and nothing is held back but the last space."""

    def __init__(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._stop = sampling.stop
        self._text = ""
        self._sent = 0

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        self._text += f"{token_id} "
        for stop in self._stop if may_stop else ():
            if (at := self._text.find(stop)) >= 0:
                return self._text[self._sent : at], stop
        return self._up_to(len(self._text) - 1), None

    def finish(self) -> str:
        return self._up_to(len(self._text))

    def _up_to(self, end: int) -> str:
        text, self._sent = self._text[self._sent : end], max(end, self._sent)
        return text


class FakeTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))

    def token_strings(self, token_ids: list[int]) -> list[str]:
        return [str(token_id) for token_id in token_ids]

    def apply_chat_template(self, messages: list[dict[str, object]], options: object = None) -> list[int]:
        raise NotImplementedError


class Answer:
    """A sink that collects outputs and lets a test wait for them."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id or f"r{id(self)}"
        self.outputs: list[StepOutput] = []
        self._changed = threading.Condition()

    def __call__(self, output: StepOutput) -> None:
        with self._changed:
            assert not (self.outputs and self.outputs[-1].finish_reason), "an output after the last"
            self.outputs.append(output)
            self._changed.notify_all()

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def last(self) -> StepOutput:
        return self.outputs[-1]

    def wait(self) -> StepOutput:
        """Return the last output."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.outputs and self.outputs[-1].finish_reason, TIMEOUT_S)
            return self.outputs[-1]

    def wait_tokens(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.token_ids) >= count, TIMEOUT_S)


class Gate:
    """A `FakeRunner.before` that stops the engine in front of each step until it is let through."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self.arrived = 0

    def __call__(self, plan: StepPlan) -> None:
        with self._changed:
            self.arrived += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed >= self.arrived, TIMEOUT_S)

    def wait_arrived(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.arrived >= count, TIMEOUT_S)

    def let_through(self, count: int = 1_000_000) -> None:
        with self._changed:
            self._allowed += count
            self._changed.notify_all()


class Worker:
    """An engine on fakes."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_batched_tokens: int = 32,
        max_num_seqs: int = 8,
        max_model_len: int = 200,
        memory: BufferMemory | None = None,
        sender: Any = None,
        receiver: Any = None,
        clock: Clock | None = None,
        sampler: Any = None,
        structures: Any = None,
    ) -> None:
        self.runner = FakeRunner(memory or make_memory(num_blocks))
        self.num_blocks = self.runner.memory.num_blocks
        self.engine = EmbeddedEngine(
            info=ModelInfo(
                name="fake",
                max_model_len=max_model_len,
                vocab_size=VOCAB_SIZE,
                dtype="bytes",
                block_size=BLOCK_SIZE,
                num_blocks=self.num_blocks,
                kv_bytes_per_token=NUM_LAYERS * TOKEN_BYTES,
                eos_token_ids=(EOS,),
            ),
            config=EngineConfig(
                block_size=BLOCK_SIZE, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
            ),
            tokenizer=FakeTokenizer(),
            runner=self.runner,
            sampler=sampler or FakeSampler(),
            text_streams=FakeStream,
            structures=structures,
            sender=sender,
            receiver=receiver,
            clock=clock or SystemClock(),
            rng=random.Random(1),
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.shutdown()
        if exc[0] is None:
            self.assert_empty()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 6,
        request_id: str | None = None,
        transfer: TransferParams | None = None,
        cache_salt: str | None = None,
        arrival_s: float = 0.0,
        priority: int = 0,
        num_continued_tokens: int = 0,
        **sampling: Any,
    ) -> Answer:
        answer = Answer(request_id or "")
        self.engine.submit(
            EngineRequest(
                request_id=answer.request_id,
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(**{"max_tokens": max_tokens, "seed": 0, "ignore_eos": True, **sampling}),
                sink=answer,
                transfer=transfer,
                cache_salt=cache_salt,
                arrival_s=arrival_s,
                priority=priority,
                num_continued_tokens=num_continued_tokens,
            )
        )
        return answer

    def wait_free(self) -> None:
        """Step until every block is free: transfers end in threads of their own."""
        self.wait_pinned(0)

    def wait_pinned(self, num_blocks: int) -> None:
        """Step until so many blocks are pinned, and all others free."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.engine.statistics().num_free_blocks != self.num_blocks - num_blocks:
            assert time.monotonic() < deadline_s, f"not {num_blocks} blocks are held: {self.engine.statistics()}"
            self.submit([1], max_tokens=1).wait()

    def assert_empty(self) -> None:
        """Nothing runs, waits or is held, and every invariant stands."""
        self.engine.check()
        statistics = self.engine.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks == self.num_blocks
        assert not (statistics.num_running or statistics.num_waiting or statistics.num_parked)
        assert not (statistics.num_pinned_blocks or statistics.waiting_prefill_tokens)


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % VOCAB_SIZE for i in range(length)]
