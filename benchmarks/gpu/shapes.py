"""Model folders for `--load-format dummy`: the real shape, no weights, a tokenizer of made-up words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Source of the shapes: the models' own config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "use_sliding_window": False,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 152064,  # its own is 128,256; the token ids that are drawn are the same for all
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "use_sliding_window": False,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
    },
    "rehearsal": {  # runs anywhere
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}


def kv_bytes_per_token(shape: str) -> int:
    """Return the KV bytes of a token over all layers, in bf16."""
    config = SHAPES[shape]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2)


def make_model(shape: str, folder: Path) -> Path:
    """Write config and tokenizer of `shape` under `folder`; return the model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    target = folder / shape
    target.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | COMMON
    (target / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w2"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target
