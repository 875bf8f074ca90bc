"""One request inside the engine, from submit to its last output."""

from __future__ import annotations

from collections.abc import Iterable

from tollbridge.engine.base import EngineRequest, FinishReason, ModelInfo, StepOutput
from tollbridge.engine.ports import TextStream
from tollbridge.errors import RequestError
from tollbridge.sched.sequence import TokenSequence
from tollbridge.transfer.base import TransferEnd
from tollbridge.wire.params import WorkerReport

_SEED_MASK = (1 << 64) - 1


def check_request(request: EngineRequest, info: ModelInfo) -> None:
    """Raise RequestError when the tokens or limits of a request make no sense for this model."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("The prompt is empty: send at least one token.", param="prompt")
    if request.sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.sampling.max_tokens}: it must be at least 1.", param="max_tokens")
    wrong = max(prompt) if max(prompt) >= info.vocab_size else min(prompt)
    if not 0 <= wrong < info.vocab_size:
        raise RequestError(
            f"The prompt contains token id {wrong}, but {info.name} knows ids 0 to {info.vocab_size - 1}.",
            param="prompt",
        )


class LiveRequest:
    """A request with its sequence, its text and its clock readings (monotonic seconds)."""

    def __init__(
        self,
        request: EngineRequest,
        sequence: TokenSequence,
        stream: TextStream,
        *,
        seed: int,
        arrival_s: float,
        eos_token_ids: Iterable[int],
        digest: bytes = b"",
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.sampling = request.sampling
        self.seed = seed & _SEED_MASK
        self.digest = digest  # of what its KV is computed from; only for a split
        self._stream = stream
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._eos_ids = frozenset() if request.sampling.ignore_eos else frozenset(eos_token_ids)

        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None  # first got blocks
        self.prefill_s: float | None = None  # first could compute: for decode, after the KV came
        self.first_token_s: float | None = None

        self.cached_tokens = 0  # of the prompt, in this worker's prefix cache at admission
        self.loaded_tokens = 0  # of the prompt, over the wire and accepted
        self.num_generated = 0
        self.transfer_end: TransferEnd | None = None  # of a load

    @property
    def transfer_id(self) -> str:
        assert self.request.transfer is not None
        return self.request.transfer.transfer_id

    @property
    def prompt_computed(self) -> int:
        """Prompt tokens whose KV this worker computed so far."""
        reached = min(self.sequence.num_computed_peak, self.sequence.num_prompt_tokens)
        return max(0, reached - self.cached_tokens - self.loaded_tokens)

    def got_blocks(self, now_s: float) -> None:
        """Note the first admission or parking."""
        self.scheduled_s = now_s
        self.cached_tokens = self.sequence.num_hit_tokens

    def can_compute(self, now_s: float) -> None:
        """Note that nothing but the batch stands before its next token; only the first time counts."""
        if self.prefill_s is None:
            self.prefill_s = now_s

    def take(self, token_id: int) -> StepOutput:
        """Add a sampled token; the output says whether the request ends with it."""
        self.num_generated += 1
        text, reason, stop_reason = "", None, None  # type: str, FinishReason | None, int | str | None
        if token_id in self._eos_ids:
            reason = "stop"
        elif token_id in self._stop_ids:
            reason, stop_reason = "stop", token_id
        else:
            text, stop_reason = self._stream.push(token_id)
            if stop_reason is not None:
                return self._output((token_id,), text, "stop", stop_reason)
            if self.num_generated >= self.sampling.max_tokens:
                reason = "length"
        if reason is not None:
            text += self._stream.finish()
        return self._output((token_id,), text, reason, stop_reason)

    def end(self, reason: FinishReason, error: str = "") -> StepOutput:
        """Return the last output of a request that ends without a token."""
        return StepOutput(request_id=self.request.request_id, finish_reason=reason, error=error, report=self.report())

    def report(self) -> WorkerReport:
        """Return what this worker did for the request, as far as it got."""
        scheduled = self.arrival_s if self.scheduled_s is None else self.scheduled_s
        prefill = scheduled if self.prefill_s is None else self.prefill_s
        first_token = prefill if self.first_token_s is None else self.first_token_s
        return WorkerReport(
            role=self.request.transfer.role if self.request.transfer else "local",
            queue_s=scheduled - self.arrival_s,
            prefill_s=first_token - prefill,
            prompt_tokens=self.sequence.num_prompt_tokens,
            computed_tokens=self.prompt_computed,
            cached_tokens=self.cached_tokens,
            loaded_tokens=self.loaded_tokens,
            generated_tokens=self.num_generated,
            transfer=self.transfer_end,
        )

    def _output(
        self, token_ids: tuple[int, ...], text: str, reason: FinishReason | None, stop_reason: int | str | None
    ) -> StepOutput:
        return StepOutput(
            request_id=self.request.request_id,
            token_ids=token_ids,
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            report=None if reason is None else self.report(),
        )
