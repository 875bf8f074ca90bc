"""Write a tiny random Llama in float32 that vLLM's CPU attention can run (head size 32). Run by the vLLM interpreter.

Weights are large, so attention is sharp and the best logit is well ahead: one wrong block of KV changes the output.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 512


def main(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.1 if is_norm else 0.25, generator=generator)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
