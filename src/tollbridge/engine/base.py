"""The contract between the embedded engine and the HTTP door in front of it. No torch here.

The engine runs its loop `schedule -> run -> postprocess` in one thread of its own. `submit` and `abort` may be called
from any thread. Outputs reach the caller through the request's `sink`, which the engine thread calls after each step
that produced something for it; the sink must be cheap and must not raise (the door hands over to its event loop).
Each request gets exactly one output with `finish_reason` set, and nothing afterwards, also when aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tollbridge.wire.events import KVEvent
from tollbridge.wire.params import TransferParams, WorkerReport

FinishReason = Literal["stop", "length", "abort", "error"]


StructureKind = Literal["json", "json_object", "regex", "choice", "grammar", "calls"]


@dataclass(frozen=True)
class Structure:
    """What the output must look like. `text` is a JSON schema, a regular expression, a JSON list of strings or a
    grammar (Lark or GBNF; Lark that of tool calls); empty for any JSON object."""

    kind: StructureKind
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw tokens, with OpenAI's and vLLM's meanings. A draw depends on `seed`, the position and the request's
    own tokens only, never on the batch around it."""

    max_tokens: int
    min_tokens: int = 0  # before so many, no end-of-text and no stop token is drawn, and no stop string ends
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # of the likeliest token's probability; 0: all
    seed: int | None = None  # None: the engine draws one
    presence_penalty: float = 0.0  # taken off each token that was generated
    frequency_penalty: float = 0.0  # the same, as often as it was
    repetition_penalty: float = 1.0  # of tokens in prompt or output: positive logits are divided, others multiplied
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not hold
    structure: Structure | None = None
    stop: tuple[str, ...] = ()  # stop strings, excluded from the output unless `include_stop`
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # in the text
    logprobs: int | None = None  # how many of the likeliest tokens to name beside the drawn one; None: no logprobs
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, by the raw logits (vLLM's `raw_logprobs`): of the token that stands there,
    then of the likeliest ones, falling."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the first one, from 1


PromptLogprobs = Sequence[TokenLogprobs | None]  # by position; None for the first


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step added to one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new tokens
    text: str = ""  # new text: whole characters only, held back while a stop string may be starting
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `token_ids`, when asked for
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, when asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or token id that ended it, as vLLM reports it
    error: str = ""  # one sentence when finish_reason is "error"
    report: WorkerReport | None = None  # with the finish


Sink = Callable[[StepOutput], None]


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One prompt to continue. `transfer` gives this worker a role in a split; None serves it locally."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    sink: Sink
    transfer: TransferParams | None = None
    cache_salt: str | None = None
    arrival_s: float = 0.0  # monotonic seconds
    priority: int = 0  # the lower, the earlier
    # At the end of the prompt, what another worker has generated of this answer: output, to penalties and structure.
    num_continued_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """Gauges of now, and counters since start (`*_total`)."""

    num_running: int = 0
    num_waiting: int = 0  # waiting for capacity
    num_parked: int = 0  # waiting for KV from another worker
    num_blocks: int = 0
    num_free_blocks: int = 0  # free, or cached and evictable
    num_pinned_blocks: int = 0  # held for an unfinished send after their request ended
    max_pinned_blocks: int = 0  # beyond it finished sends are given up; the router splits no more requests with it
    waiting_prefill_tokens: int = 0  # prompt tokens that still have to be computed
    max_num_batched_tokens: int = 0  # token budget of a step
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prompt_tokens_by_source: dict[str, int] = field(
        default_factory=dict
    )  # local_compute, local_cache_hit, external_kv_transfer
    prefix_cache_queries_total: int = 0  # in tokens, as vLLM counts
    prefix_cache_hits_total: int = 0
    preemptions_total: int = 0
    kv_recomputed_tokens_total: int = 0  # tokens recomputed because a load failed


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the door needs to know of the loaded model."""

    name: str
    max_model_len: int  # tokens
    vocab_size: int  # ids at or above are refused
    dtype: str
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int  # all layers, K and V
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What shapes the prompt of a chat besides its messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is left open
    add_special_tokens: bool = False  # on top of those that the template writes
    tools: list[dict[str, Any]] | None = None  # as OpenAI describes them
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # more variables for the template


class Tokenizer(Protocol):
    """Text to token ids and back; safe to call from several threads."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""
        ...

    def apply_chat_template(self, messages: list[dict[str, object]], options: ChatOptions = ...) -> list[int]:
        """Return the prompt's token ids.

        RequestError when the template refuses the messages, UnsupportedError for tools that it does not know.
        """
        ...


class Engine(Protocol):
    """The seam: the door knows only this."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def check_structure(self, structure: Structure) -> None:
        """Compile `structure` for requests to come (any thread; it may take long); RequestError when it makes no sense.

        UnsupportedError where the library for it is absent.
        """
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; RequestError or ContextLengthError when it can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort" at the next step; unknown or ended ids are ignored."""
        ...

    def release_send(self, transfer_id: str) -> None:
        """Cancel a send that nobody will fetch (any thread); unknown and ended ones are ignored."""
        ...

    def take_events(self) -> list[KVEvent]:
        """Return the KV cache events since the last call (any thread)."""
        ...

    def statistics(self) -> EngineStatistics: ...

    def check(self) -> None:
        """Raise AssertionError when an invariant of pool, prefix cache or scheduler is broken."""
        ...

    def shutdown(self) -> None:
        """Abort everything, stop and join the thread."""
        ...
