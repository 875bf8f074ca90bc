"""Greedy continuations by stock transformers, as the truth to compare with. Imports nothing of this project.

    python -I reference.py MODEL_FOLDER... < request.json

The request is `{"prompts": [[id, ...], ...], "max_new_tokens": n}`, optionally with `"ignore_eos": true` (default) or
false. Each prompt runs alone, without padding, in float32, with `generate`. Prints one line for each model: the list of
the generated ids of each prompt.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def continue_greedily(model, prompt: list[int], max_new_tokens: int, eos_token_id: list[int] | None) -> list[int]:
    input_ids = torch.tensor([prompt])
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
    )
    return output[0, len(prompt) :].tolist()


def answer(folder: str, prompts: list[list[int]], max_new_tokens: int, ignore_eos: bool = True) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    eos_token_id = model.generation_config.eos_token_id
    if ignore_eos:
        model.generation_config.eos_token_id = eos_token_id = None
    return [continue_greedily(model, prompt, max_new_tokens, eos_token_id) for prompt in prompts]


def main() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    request = json.load(sys.stdin)
    for folder in sys.argv[1:]:
        print(json.dumps(answer(folder, **request)))


if __name__ == "__main__":
    main()
