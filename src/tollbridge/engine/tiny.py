"""Makes a tiny random model in a second: for tests and for trying the fleet out without a download.

Real code paths, real tokenizer, meaningless text. Weights are larger than a trained model's initialisation, so that
attention is sharp, every token of the context matters, and the best logit is well ahead of the second: a wrong byte of
KV changes the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from tollbridge.engine.model import quiet_transformers

Family = Literal["llama", "qwen2", "qwen3", "mistral"]

VOCAB_SIZE = 512
PAD, BOS, EOS = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' }}{{ call['function'] | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = """The bridge keeper counts the carts that cross, and for each of them asks a toll that follows from its weight.
A light cart passes for a penny; a heavy one waits until the road beyond is free, or goes around by the ford below.
Nobody is asked to pay before the price is known, and nobody pays for what was carried over the day before.
In winter the river is high, the ford is closed, and every traveller has to choose between waiting and paying more.
So the keeper writes down how long the crossing takes, how many carts are queued, and what the next hour may bring.
When two roads lead to the same town, the shorter one is not always the faster one, and the ledger says which and why.
Travellers who read the ledger learn to trust it: the numbers are old friends, measured yesterday and checked today."""


def make_tiny_model(folder: Path, seed: int = 0, *, family: Family = "llama") -> Path:
    """Write a tiny random model of `family` with tokenizer and chat template; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    with quiet_transformers():
        module = _module(family, seed, vocab_size=len(tokenizer))
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """Train a byte-level BPE: any bytes can be written, and words take several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _module(family: Family, seed: int, *, vocab_size: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    window = {"sliding_window": None} if family == "mistral" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        **window,
    )
    with torch.random.fork_rng(devices=[]):  # construction draws from the global generator
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(module, seed)
    return module


@torch.no_grad()
def _fill(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        is_norm = "norm" in name
        parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.1 if is_norm else 0.25, generator=generator)
