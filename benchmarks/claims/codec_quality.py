"""What `transfer.codec: fp8` does to answers: SmolLM2 continues from KV that went through the codec, and from exact KV.

Passages of English technical prose (Python's own topics, at hand everywhere). The first tokens of each are prefilled
once; decode then goes on from the exact KV and from encoded and decoded KV. Two things are measured, both
teacher-forced, so that one early difference does not count again for every token behind it: the perplexity of the
passage's own continuation, and how often the most likely next token is the same, along what the model itself writes.
Beside them, how many continuations are the same to the last token.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from typing import Any

from benchmarks.support.result import ClaimResult
from tollbridge.transfer.codec import Fp8Codec

DESCRIPTION = "fp8 on the wire: half of bfloat16's bytes, perplexity within 1 %, 95 % of the tokens the same"
MAX_PERPLEXITY_RATIO = 1.01
MIN_AGREEMENT = 0.95
NUM_CONTEXT, NUM_CONTINUED = 384, 64  # tokens
BATCH = 4  # passages at a time

Cache = list[tuple[Any, Any]]  # by layer: K and V, [passages, heads, tokens, head_size]


def run(quick: bool) -> ClaimResult:
    """Compare the two KVs on every passage."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tollbridge.engine.store import pull_smollm2

    folder = pull_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in eval mode
    passages = _passages(tokenizer, count=4 if quick else 12)
    judge = _Judge(model)
    with torch.inference_mode():
        for start in range(0, len(passages), BATCH):
            judge.add(torch.tensor(passages[start : start + BATCH]))
    ratio, agreement = judge.perplexity("fp8") / judge.perplexity("none"), judge.num_agreed / judge.num_tokens
    return ClaimResult(
        holds=ratio <= MAX_PERPLEXITY_RATIO and agreement >= MIN_AGREEMENT,
        figures={
            "perplexity_none": judge.perplexity("none"),
            "perplexity_fp8": judge.perplexity("fp8"),
            "perplexity_ratio": ratio,
            "token_agreement": agreement,
            "same_continuations": judge.num_same / len(passages),
            "bytes_of_bfloat16": _ratio(model, "bfloat16"),
            "bytes_of_float32": _ratio(model, "float32"),
        },
        bounds={"perplexity_ratio": f"<= {MAX_PERPLEXITY_RATIO}", "token_agreement": f">= {MIN_AGREEMENT}"},
        conditions={
            "model": folder.name,
            "dtype": "float32",
            "passages": len(passages),
            "context_tokens": NUM_CONTEXT,
            "continued_tokens": NUM_CONTINUED,
        },
    )


class _Judge:
    """Adds up what is seen of both KVs."""

    def __init__(self, model: Any) -> None:
        self.num_agreed = self.num_tokens = self.num_same = 0
        self._model = model
        self._loss = {"none": 0.0, "fp8": 0.0}

    def perplexity(self, codec: str) -> float:
        return math.exp(self._loss[codec] / self.num_tokens)

    def add(self, passages: Any) -> None:
        """Take passages [passages, context + continued]."""
        context, text = passages[:, :NUM_CONTEXT], passages[:, NUM_CONTEXT:]
        kv: dict[str, Cache] = {"none": self._prefill(context[:, :-1])}
        kv["fp8"] = through_fp8(kv["none"])
        last = context[:, -1:]
        for name, cache in kv.items():
            scores = self._continue(cache, last, text[:, :-1]).log_softmax(-1)
            self._loss[name] -= float(scores.gather(2, text[:, :, None]).sum())
        own = self._write(kv["none"], last)
        said = self._continue(kv["fp8"], last, own[:, :-1]).argmax(-1)
        self.num_agreed += int((said == own).sum())
        self.num_tokens += own.numel()
        self.num_same += int((said == own).all(dim=1).sum())  # the same all along, so the text would be

    def _prefill(self, tokens: Any) -> Cache:
        cache = self._model(tokens, use_cache=True).past_key_values
        return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def _continue(self, kv: Cache, last: Any, tokens: Any) -> Any:
        """Return the logits of the tokens after `last` and after each of `tokens`."""
        import torch

        return self._model(torch.cat((last, tokens), dim=1), past_key_values=_cache(kv)).logits

    def _write(self, kv: Cache, last: Any) -> Any:
        """Return what the model writes after `last`, most likely token by most likely token."""
        import torch

        cache, written = _cache(kv), [last]
        for _ in range(NUM_CONTINUED):
            written.append(self._model(written[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
        return torch.cat(written[1:], dim=1)


def through_fp8(kv: Cache) -> Cache:
    """Return `kv` as decode gets it."""
    return [_layer_through_fp8(*layer) for layer in kv]


def _layer_through_fp8(key: Any, value: Any) -> tuple[Any, Any]:
    import torch

    tokens = torch.stack((key, value)).permute(1, 3, 0, 2, 4).contiguous()  # [passages, tokens, 2, heads, head_size]
    codec = Fp8Codec(dtype="float32", num_kv_heads=tokens.shape[3], head_size=tokens.shape[4])
    data = tokens.view(-1).view(torch.uint8).numpy().data
    codec.decode(codec.encode([data]), [data])
    key, value = tokens.permute(2, 0, 3, 1, 4)
    return key.contiguous(), value.contiguous()


def _cache(kv: Cache) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (key, value) in enumerate(kv):
        cache.update(key.clone(), value.clone(), index)
    return cache


def _passages(tokenizer: Any, *, count: int) -> list[list[int]]:
    """Return passages spread evenly over the topics."""
    topics = pydoc_data.topics.topics
    tokens = tokenizer("\n\n".join(topics[name] for name in sorted(topics))).input_ids
    size = NUM_CONTEXT + NUM_CONTINUED
    step = (len(tokens) - size) // count
    return [tokens[index * step : index * step + size] for index in range(count)]


def _ratio(model: Any, dtype: str) -> float:
    """Return wire bytes over memory bytes."""
    config = model.config
    heads = int(config.num_key_value_heads)
    size = int(config.hidden_size // config.num_attention_heads)
    memory_bytes = 2 * heads * size * {"float32": 4, "bfloat16": 2}[dtype]
    return Fp8Codec(dtype=dtype, num_kv_heads=heads, head_size=size).token_bytes / memory_bytes
