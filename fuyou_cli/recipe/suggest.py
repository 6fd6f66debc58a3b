"""What somebody probably meant by a key this schema does not have."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any, get_args

from .fields import Section
from .schema import Recipe

# The names other trainers use for the same idea, by their last part. They are suggested, never accepted: a recipe reads
# the same for everybody.
ALIASES: dict[str, str] = {
    "base_model": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "model_name": "model.name_or_path",
    "checkpoint_dir": "model.name_or_path",
    "flash_attention": "model.attn_implementation",
    "attn_impl": "model.attn_implementation",
    "max_length": "dataset.max_seq_len",
    "max_seq_length": "dataset.max_seq_len",
    "sequence_len": "dataset.max_seq_len",
    "cutoff_len": "dataset.max_seq_len",
    "packed": "dataset.packing",
    "sample_packing": "dataset.packing",
    "neat_packing": "dataset.packing",
    "train_on_input": "dataset.loss_on",
    "train_on_inputs": "dataset.loss_on",
    "train_on_prompt": "dataset.loss_on",
    "mask_history": "dataset.loss_on",
    "mask_prompt": "dataset.loss_on",
    "roles_to_train": "dataset.loss_on",
    "completion_only_loss": "dataset.loss_on",
    "assistant_only_loss": "dataset.loss_on",
    "val_set_size": "dataset.eval_fraction",
    "val_size": "dataset.eval_fraction",
    "test_split_size": "dataset.eval_fraction",
    "val_split_fraction": "dataset.eval_fraction",
    "dataset_val": "dataset.eval",
    "datasets": "dataset.train",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "global_batch_size": "train.batch_size",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_grad_norm": "train.clip_grad_norm",
    "max_norm": "train.clip_grad_norm",
    "gradient_clipping": "train.clip_grad_norm",
    "num_threads": "train.threads",
    "learning_rate": "optimizer.lr",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "lr_scheduler.name",
    "min_lr": "lr_scheduler.min_lr_ratio",
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "tf32": "precision.allow_tf32",
    "gradient_checkpointing": "offload.activations",
    "enable_activation_checkpointing": "offload.activations",
    "enable_activation_offloading": "offload.activations",
    "activation_offloading": "offload.activations",
    "use_unsloth_gc": "offload.activations",
    "fsdp_cpu_offload": "offload.weights",
    "layer_offloading": "offload.weights",
    "deepspeed": "offload",
    "gpu_memory_limit": "offload.max_memory.gpu",
    "nvme_path": "offload.dir",
    "offload_folder": "offload.dir",
    "resume_from_checkpoint": "checkpoint.resume",
    "auto_resume_from_checkpoints": "checkpoint.resume",
    "save_steps": "checkpoint.commit_every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every_steps",
    "logging_steps": "logging.every_steps",
    "report_to": "logging.backends",
}

_CLOSE = 0.7


def section_in(annotation: Any) -> type[Section] | None:
    """The section class inside an annotation such as `tuple[DatasetEntry, ...]` or `EvalSection | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part)) is not None), None)


@cache
def known_keys() -> tuple[str, ...]:
    """Every key of the schema as a dotted path, sections included, list indices left out."""

    def below(section: type[Section], prefix: str) -> list[str]:
        keys = []
        for name, field in section.model_fields.items():
            keys.append(prefix + name)
            nested = section_in(field.annotation)
            keys += below(nested, f"{prefix}{name}.") if nested is not None else []
        return keys

    return tuple(below(Recipe, ""))


def suggest_key(dotted: str, *, shown_section: str) -> str:
    """The `help:` line for an unknown key. `dotted` has no list indices, `shown_section` has them."""
    section, _, name = dotted.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in known_keys() if key.rpartition(".")[0] == section]
    elsewhere = [key for key in known_keys() if key.rpartition(".")[2] == name]
    if "." in name or dotted in known_keys():
        return f"sections are nested: write `{dotted.partition('.')[0]}:` and the rest below it, indented"
    if name in ALIASES:
        return f"fuyou calls this `{ALIASES[name]}`"
    if len(elsewhere) == 1:
        return f"`{name}` belongs at `{elsewhere[0]}`"
    if close := _closest(name, siblings):
        return f"did you mean `{f'{shown_section}.{close}' if shown_section else close}`?"
    leaves = sorted({key.rpartition(".")[2] for key in known_keys()})
    if close := _closest(name, leaves):
        return f"did you mean `{next(key for key in known_keys() if key.rpartition('.')[2] == close)}`?"
    return f"keys here: {', '.join(siblings)}" if siblings else "this key takes a value, it is not a section"


def suggest_choice(value: object, choices: list[str]) -> str | None:
    close = _closest(value, choices) if isinstance(value, str) else None
    return f"did you mean `{close}`?" if close else None


def _closest(name: str, candidates: list[str]) -> str | None:
    """The nearest spelling, whole or in one of its words: `nmae` is near `name_or_path`."""
    if len(name) > 80:  # no slip of the pen, and matching costs the square
        return None

    def nearness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, name.lower(), candidate).ratio()
        words = candidate.split("_") if "_" in candidate else []
        word = max((difflib.SequenceMatcher(None, name.lower(), word).ratio() for word in words), default=0.0)
        return max(whole, word - 0.01)

    best = max(candidates, key=nearness, default=None)
    return best if best is not None and nearness(best) >= _CLOSE else None
