"""Write a tiny random model in float32 that vLLM can run on a CPU. Run by the vLLM interpreter: KIND FOLDER.

    llama    grouped-query attention, head size 32
    mla      DeepSeek's latent attention, with the one latent size that vLLM's CPU kernel knows
    gemma3   sliding-window layers beside full ones
    mamba    a state-space model: no KV to ship
    lora     an adapter of the llama

Weights are large, so attention is sharp and the best logit is well ahead: one wrong block of KV changes the output.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

VOCAB_SIZE = 512
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(folder: Path) -> None:
    save(LlamaForCausalLM(LlamaConfig(**COMMON)), folder)


def gemma3(folder: Path) -> None:
    config = Gemma3TextConfig(**COMMON, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2)
    save(Gemma3ForCausalLM(config), folder)


def mla(folder: Path) -> None:
    sizes = {**COMMON, "num_hidden_layers": 2, "num_key_value_heads": 4}
    del sizes["head_dim"]
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    config = DeepseekV2Config(
        **sizes, **latent, first_k_dense_replace=2, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=32
    )
    save(DeepseekV2ForCausalLM(config), folder)


def mamba(folder: Path) -> None:
    save(MambaForCausalLM(MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2)), folder)


def lora(folder: Path) -> None:
    """Write an adapter of rank 8 for the query and value projections of the llama."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, 64, generator=generator) * 0.3
            weights[f"{key}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "tiny"}))


def save(model: PreTrainedModel, folder: Path) -> None:
    model = model.to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.1 if is_norm else 0.25, generator=generator)
    model.save_pretrained(folder)


KINDS: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (llama, mla, gemma3, mamba, lora)}

if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
