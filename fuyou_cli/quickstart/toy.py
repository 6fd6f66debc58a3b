"""Makes a toy Llama of random weights and its tokenizer without the hub, lets such a model complete a prompt, and runs a
recipe's first steps in plain PyTorch, in memory.

`python -m fuyou_cli.quickstart.toy make DIR PROMPT` and `... complete DIR PROMPT` print the completion, and one loss per line
does `... losses RECIPE STEPS MICRO_BATCH_SIZE THREADS TOTAL_STEPS [key=value ...]`. They run in separate processes, because a
whole model in memory exceeds the training's limit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuyou_cli.data.batches import Batch
    from fuyou_cli.recipe.schema import Recipe

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
        folder = Path(scratch, "model")
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder)
        model = skeleton(tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.load_state_dict(_initial(model, seed), assign=True)
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        folder.rename(directory)


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
        tokenizer_object=inner, eos_token=END, pad_token=PAD, model_max_length=POSITIONS, clean_up_tokenization_spaces=False
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


def in_memory_losses(recipe: Recipe, steps: int, *, micro_batch_size: int, total_steps: int) -> Iterator[float]:
    """Yields the loss of each of the first `steps` steps, in a plain loop: bf16 weights, fp32 masters, torch.optim.AdamW,
    clip_grad_norm_, the same rows in the same micro-batches. Needs 16 bytes of RAM per parameter, plus activations."""
    import torch
    from transformers import AutoModelForCausalLM

    from fuyou_cli.training.length import learning_rate

    model: Any = AutoModelForCausalLM.from_pretrained(
        recipe.model.name_or_path,
        dtype=getattr(torch, recipe.precision.compute),
        attn_implementation=recipe.model.attn_implementation,
        local_files_only=True,
    ).train()
    masters = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    decays = {True: recipe.optimizer.weight_decay, False: 0.0}  # only matrices decay
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters.values() if (m.dim() >= 2) == matrix], "weight_decay": decay}
            for matrix, decay in decays.items()
        ],
        lr=recipe.optimizer.lr,
        betas=recipe.optimizer.betas,
        eps=recipe.optimizer.eps,
    )
    rates = learning_rate(recipe, total_steps)
    for step, batch in enumerate(_batches(recipe, steps), start=1):
        yield _accumulate(model, masters, batch, micro_batch_size)
        if recipe.train.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(masters.values()), recipe.train.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rates.at(step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])


def _accumulate(model: Any, masters: dict[str, Any], batch: Batch, micro_batch_size: int) -> float:
    """Adds the gradients of one step to the masters in fp32, and returns the step's loss."""
    ids, labels = batch.tensors()
    total = 0.0
    for begin in range(0, ids.shape[0], micro_batch_size):
        part = slice(begin, begin + micro_batch_size)
        output = model(input_ids=ids[part], labels=labels[part], num_items_in_batch=batch.label_tokens, use_cache=False)
        output.loss.backward()
        total += float(output.loss.detach())
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.float()
            masters[name].grad = gradient if masters[name].grad is None else masters[name].grad.add_(gradient)
            parameter.grad = None
    return total


def _batches(recipe: Recipe, steps: int) -> Iterator[Batch]:
    from fuyou_cli.data.batches import collate
    from fuyou_cli.training.length import fed

    rows, sampler = fed(recipe, Path(recipe.model.name_or_path), check=lambda summary: None, say=lambda text: None)
    for step in range(steps):
        yield collate(rows, sampler.batch(step), pad_id=rows.summary.pad_id, max_len=recipe.dataset.max_seq_len)


if __name__ == "__main__":
    if sys.argv[1] == "losses":
        import torch

        from fuyou_cli.recipe.load import load_recipe

        # the numbers are those that the run resolved, including `auto` and epochs
        steps, micro_batch_size, threads, total_steps = map(int, sys.argv[3:7])
        torch.set_num_threads(threads)
        recipe = load_recipe(sys.argv[2], sys.argv[7:]).recipe
        for loss in in_memory_losses(recipe, steps, micro_batch_size=micro_batch_size, total_steps=total_steps):
            print(loss, flush=True)
    else:
        if sys.argv[1] == "make":
            make_model(Path(sys.argv[2]))
        print(complete(Path(sys.argv[2]), sys.argv[3]))
