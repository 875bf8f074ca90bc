"""An engine without a model: deterministic tokens from a thread of its own, and the same contract as the real one.

Token i of a request is a letter that depends on the prompt and i only. `hold()` keeps the thread from stepping, so a
test decides when what happens; `script` replaces the outputs of requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from tollbridge.engine.base import (
    ChatOptions,
    EngineRequest,
    EngineStatistics,
    FinishReason,
    ModelInfo,
    StepOutput,
    Structure,
)
from tollbridge.errors import RequestError
from tollbridge.wire.events import KVEvent
from tollbridge.wire.params import WorkerReport

VOCAB_SIZE = 256
MAX_MODEL_LEN = 128

Script = Callable[[EngineRequest], Iterator[StepOutput]]

_NO_OPTIONS = ChatOptions()


def _calls(message: dict[str, Any]) -> str:
    return "".join(
        f"{call['function']['name']}{call['function']['arguments']}" for call in message.get("tool_calls", ())
    )


class FakeTokenizer:
    """A token is a byte."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_strings(self, token_ids: list[int]) -> list[str]:
        return [chr(token_id) for token_id in token_ids]

    def apply_chat_template(self, messages: list[dict[str, object]], options: ChatOptions = _NO_OPTIONS) -> list[int]:
        if messages[0]["role"] == "martian":
            raise RequestError("The chat template knows no role martian.", param="messages")
        text = "".join(f"<tool>{tool['function']['name']}" for tool in options.tools or ())
        text += "".join(f"<{m['role']}>{m['content']}{_calls(m)}" for m in messages)
        return self.encode(text + ("<assistant>" if options.add_generation_prompt else ""))


def letters(request: EngineRequest) -> Iterator[StepOutput]:
    """Yield `max_tokens` letters, one a step."""
    start, last = sum(request.prompt_token_ids), request.sampling.max_tokens - 1
    for index in range(last + 1):
        token = ord("a") + (start + index) % 26
        yield StepOutput(
            request_id=request.request_id,
            token_ids=(token,),
            text=chr(token),
            finish_reason="length" if index == last else None,
            report=report(request, index + 1) if index == last else None,
        )


def report(request: EngineRequest, num_generated: int) -> WorkerReport:
    num_prompt_tokens = len(request.prompt_token_ids)
    loads = request.transfer is not None and request.transfer.role == "decode"
    return WorkerReport(
        role=request.transfer.role if request.transfer else "local",
        queue_s=0.01,
        prefill_s=0.02,
        prompt_tokens=num_prompt_tokens,
        cached_tokens=1,
        loaded_tokens=num_prompt_tokens - 2 if loads else 0,
        computed_tokens=1 if loads else num_prompt_tokens - 1,
        generated_tokens=num_generated,
    )


class FakeEngine:
    """Implements `engine.base.Engine`."""

    def __init__(self, *, script: Script = letters, max_num_seqs: int = 64) -> None:
        self.script = script
        self.max_num_seqs = max_num_seqs
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.released: list[str] = []  # transfer ids
        self.idle = threading.Event()  # set while no request is inside
        self.idle.set()
        self.events: list[KVEvent] = []
        self._waiting: list[EngineRequest] = []
        self._running: dict[str, tuple[EngineRequest, Iterator[StepOutput]]] = {}
        self._generated = 0
        self._wake = threading.Condition()
        self._held = False
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name="fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            block_size=16,
            num_blocks=100,
            kv_bytes_per_token=64,
            eos_token_ids=(0,),
        )

    @property
    def tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def hold(self) -> None:
        """Take no further step until `release`."""
        with self._wake:
            self._held = True

    def release(self) -> None:
        with self._wake:
            self._held = False
            self._wake.notify()

    def check_structure(self, structure: Structure) -> None:
        if structure.text == "nonsense":
            raise RequestError("The structure is nonsense.")

    def submit(self, request: EngineRequest) -> None:
        with self._wake:
            self.submitted.append(request)
            self._waiting.append(request)
            self.idle.clear()
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        with self._wake:
            self.aborted.append(request_id)
            self._wake.notify()
        self._end(request_id, "abort")

    def release_send(self, transfer_id: str) -> None:
        self.released.append(transfer_id)

    def take_events(self) -> list[KVEvent]:
        with self._wake:
            events, self.events = self.events, []
            return events

    def statistics(self) -> EngineStatistics:
        with self._wake:
            return EngineStatistics(
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_blocks=100,
                num_free_blocks=75,
                generation_tokens_total=self._generated,
                prompt_tokens_total=sum(len(r.prompt_token_ids) for r in self.submitted),
                prompt_tokens_by_source={"local_compute": 7, "external_kv_transfer": 5},
                prefix_cache_queries_total=12,
                prefix_cache_hits_total=3,
            )

    def check(self) -> None:
        return

    def shutdown(self) -> None:
        for request_id in [*self._running, *(r.request_id for r in self._waiting)]:
            self._end(request_id, "abort")
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._stop and (self._held or not (self._waiting or self._running)):
                    self._wake.wait()
                if self._stop:
                    return
                while self._waiting and len(self._running) < self.max_num_seqs:
                    request = self._waiting.pop(0)
                    self._running[request.request_id] = (request, self.script(request))
                running = list(self._running.values())
            for request, outputs in running:
                self._step(request, outputs)

    def _step(self, request: EngineRequest, outputs: Iterator[StepOutput]) -> None:
        output = next(outputs)
        with self._wake:
            if request.request_id not in self._running:  # aborted meanwhile
                return
            self._generated += len(output.token_ids)
            if output.finish_reason is not None:
                del self._running[request.request_id]
            request.sink(output)
            self._note_idle()

    def _end(self, request_id: str, reason: FinishReason) -> None:
        with self._wake:
            found = self._running.pop(request_id, None)
            waiting = [r for r in self._waiting if r.request_id == request_id]
            self._waiting = [r for r in self._waiting if r.request_id != request_id]
            for request in ([found[0]] if found else []) + waiting:
                request.sink(StepOutput(request_id=request_id, finish_reason=reason))
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._waiting and not self._running:
            self.idle.set()
