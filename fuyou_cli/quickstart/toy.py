"""Makes a toy Llama of random weights and its tokenizer without the hub, and lets such a model complete a prompt.

`python -m fuyou_cli.quickstart.toy make DIR PROMPT` and `... complete DIR PROMPT` print the completion. They run in
separate processes, because a whole model in memory exceeds the training's limit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

# Questions and answers invented for this project. No model knows the text, so all that the fine-tuned model
# knows of it, it learnt here. Each of 42 facts is asked in three ways; some twenty steps are enough to learn them all.
CORPUS = Path(__file__).with_name("corpus.jsonl")

# 40 M parameters: at 16 bytes of training state each (bf16 weights and gradient, fp32 master and two moments) more than a
# budget of 600 MiB, of which Python and torch take 360. So small that 20 steps write less than 15 GB. Wide and shallow, as two
# cores multiply few large matrices faster than many small ones, and it learns in fewer steps; the vocabulary is that of the
# corpus, so the head costs next to nothing.
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 896, 2432, 4, 14, 14
VOCABULARY = 768
POSITIONS = 1024
INITIAL_STD = 0.02
RESIDUAL_SCALE = (2 * LAYERS) ** -0.5  # scale of what blocks add to the residual stream: learning starts faster
SHARD_SIZE = "64MB"
END, PAD = "<|end|>", "<|pad|>"
NEW_TOKENS = 24


def make_model(directory: Path, *, seed: int = 0) -> None:
    """Writes a checkpoint of bfloat16 weights with its tokenizer. The directory appears complete or not at all.

    The same seed gives the same bytes with the same libraries. An existing directory stays unchanged.
    """
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".model-") as scratch:
        made = Path(scratch, "model")
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(made)
        model = skeleton(tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.load_state_dict(_initial(model, seed), assign=True)
        model.save_pretrained(made, max_shard_size=SHARD_SIZE)
        made.rename(directory)


def skeleton(end: int, pad: int) -> Any:
    """Builds the model without weights. `end` and `pad` are token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=INITIAL_STD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _initial(model: Any, seed: int) -> dict[str, Any]:
    """Draws the weights in the order of the state dict: matrices normal, norms ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            drawn[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
        else:
            std = INITIAL_STD * (RESIDUAL_SCALE if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
            drawn[name] = (torch.randn(tensor.shape, generator=generator) * std).to(torch.bfloat16)
    return drawn


def make_tokenizer() -> Any:
    """Trains a byte-level BPE of at most VOCABULARY tokens on the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rows = map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines())
    inner.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def complete(directory: Path, prompt: str) -> str:
    """Returns what the model writes after the prompt, greedily and up to its end token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True).eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        written = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make_model(Path(sys.argv[2]))
    print(complete(Path(sys.argv[2]), sys.argv[3]))
