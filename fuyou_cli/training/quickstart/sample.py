"""`python -m fuyou_cli.training.quickstart.sample MODEL_DIR PROMPT ...`: greedy completions, one JSON string per line.

A process of its own: generating takes the whole model in memory, which the training budget does not cover.
"""

from __future__ import annotations

import json
import sys

NEW_TOKENS = 24


def complete(directory: str, prompts: list[str]) -> list[str]:
    """What the model writes after each prompt, up to its end token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    model.eval()
    completions: list[str] = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            written = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        completions.append(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return completions


if __name__ == "__main__":
    for completion in complete(sys.argv[1], sys.argv[2:]):
        print(json.dumps(completion, ensure_ascii=False), flush=True)
