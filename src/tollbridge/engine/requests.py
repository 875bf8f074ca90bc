"""One request inside the engine, from submit to its last output."""

from __future__ import annotations

from collections.abc import Iterable

from tollbridge.engine.base import EngineRequest, FinishReason, ModelInfo, StepOutput, TokenLogprobs
from tollbridge.engine.draws import Draw
from tollbridge.engine.ports import TextStream
from tollbridge.errors import RequestError, UnsupportedError
from tollbridge.sched.sequence import TokenSequence
from tollbridge.transfer.base import TransferEnd
from tollbridge.wire.params import WorkerReport


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
    if not 0 <= request.num_continued_tokens < len(prompt):
        raise RequestError(
            f"continued_tokens is {request.num_continued_tokens}: it must be fewer than the prompt has, {len(prompt)}.",
            param="continued_tokens",
        )
    if request.sampling.prompt_logprobs is not None and request.transfer is not None:
        raise UnsupportedError(
            "Log probabilities of the prompt need all of it computed here: they cannot be had from a split.",
            param="prompt_logprobs",
        )


class LiveRequest:
    """A request with its sequence, its text and its clock readings (monotonic seconds)."""

    def __init__(
        self,
        request: EngineRequest,
        sequence: TokenSequence,
        stream: TextStream,
        draw: Draw,
        *,
        arrival_s: float,
        eos_token_ids: Iterable[int],
        digest: bytes = b"",
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.sampling = request.sampling
        self.draw = draw
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
        self.transfer_end: TransferEnd | None = None  # of a load
        wants_scores = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants_scores else None  # until told

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

    @property
    def num_generated(self) -> int:
        return self.draw.num_drawn

    def score(self, first_position: int, logprobs: Iterable[TokenLogprobs]) -> None:
        """Note the log probabilities of prompt tokens from `first_position` on; those known already stay."""
        assert self._prompt_logprobs is not None
        for position, one in enumerate(logprobs, first_position):
            if position == len(self._prompt_logprobs):
                self._prompt_logprobs.append(one)
        self.sequence.scores_prompt = len(self._prompt_logprobs) < self.sequence.num_prompt_tokens

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None) -> StepOutput:
        """Add a sampled token; the output says whether the request ends with it."""
        error = self.draw.take(token_id)
        if error:
            return self.end("error", error)
        text, reason, stop_reason = self._judge(token_id)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return StepOutput(
            request_id=self.request.request_id,
            token_ids=(token_id,),
            text=text,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            report=None if reason is None else self.report(),
        )

    def _judge(self, token_id: int) -> tuple[str, FinishReason | None, int | str | None]:
        """Return the text that a token adds, whether the request ends with it, and the stop token or string if so."""
        may_stop = self.num_generated > self.sampling.min_tokens
        is_eos = token_id in self._eos_ids
        if is_eos or token_id in self._stop_ids:
            text = self._stream.push(token_id, may_stop=False)[0] if self.sampling.include_stop else ""
            return text + self._stream.finish(), "stop", None if is_eos else token_id
        text, stop = self._stream.push(token_id, may_stop=may_stop)
        if stop is not None:
            return text, "stop", stop
        if self.num_generated >= self.sampling.max_tokens:
            return text + self._stream.finish(), "length", None
        return text, None, None

    def check(self) -> None:
        """Raise AssertionError when its draws and its sequence are not of the same tokens."""
        self.draw.check(self.sequence.token_ids)
        known = self._prompt_logprobs
        assert known is None or len(known) <= self.sequence.num_prompt_tokens, "more scores than the prompt has tokens"

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
