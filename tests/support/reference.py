"""Greedy continuations by stock transformers, as the truth to compare with. Imports nothing of this project.

    python -I reference.py MODEL_FOLDER < request.json

The request is `{"prompts": [[id, ...], ...], "max_new_tokens": n}`, optionally with `"ignore_eos": true` (default) or
false. Each prompt runs alone, without padding, in float32, with `generate`. The last line of stdout is the list of the
generated ids of each prompt.
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


def main() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True).eval()
    eos_token_id = model.generation_config.eos_token_id
    if request.get("ignore_eos", True):
        model.generation_config.eos_token_id = eos_token_id = None
    answers = [
        continue_greedily(model, prompt, request["max_new_tokens"], eos_token_id) for prompt in request["prompts"]
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
