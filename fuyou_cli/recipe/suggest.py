"""Suggests what somebody probably meant by a key this schema does not have."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any, get_args

from .fields import Section
from .schema import Recipe

# The names other trainers use for the same idea, by their last part. They are suggested, never accepted: a recipe reads
# the same for everybody.
_OTHER_NAMES = {
    "model.name_or_path": "base_model model_name_or_path model_name checkpoint_dir",
    "model.attn_implementation": "flash_attention attn_impl",
    "dataset.max_seq_len": "max_length max_seq_length sequence_len cutoff_len",
    "dataset.packing": "packed sample_packing neat_packing",
    "dataset.loss_on": (
        "train_on_input train_on_inputs train_on_prompt mask_history mask_prompt roles_to_train "
        "completion_only_loss assistant_only_loss"
    ),
    "dataset.eval_fraction": "val_set_size val_size test_split_size val_split_fraction",
    "dataset.eval": "dataset_val",
    "dataset.train": "datasets",
    "train.micro_batch_size": "per_device_train_batch_size",
    "train.batch_size": "gradient_accumulation_steps global_batch_size",
    "train.epochs": "num_epochs num_train_epochs",
    "train.clip_grad_norm": "max_grad_norm max_norm gradient_clipping",
    "train.threads": "num_threads",
    "optimizer.lr": "learning_rate",
    "optimizer.eps": "adam_epsilon",
    "lr_scheduler.name": "lr_scheduler_type",
    "lr_scheduler.min_lr_ratio": "min_lr",
    "precision.compute": "dtype torch_dtype bf16 fp16",
    "precision.allow_tf32": "tf32",
    "offload.activations": (
        "gradient_checkpointing enable_activation_checkpointing enable_activation_offloading "
        "activation_offloading use_unsloth_gc"
    ),
    "offload.weights": "fsdp_cpu_offload layer_offloading",
    "offload": "deepspeed",
    "offload.max_memory.gpu": "gpu_memory_limit",
    "offload.dir": "nvme_path offload_folder",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "checkpoint.commit_every_steps": "save_steps",
    "checkpoint.keep_last": "save_total_limit",
    "eval": "eval_steps",
    "logging.every_steps": "logging_steps",
    "logging.backends": "report_to",
}
ALIASES = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}

_CLOSE = 0.7


def section_in(annotation: Any) -> type[Section] | None:
    """Finds the section class inside an annotation such as `tuple[DatasetEntry, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part)) is not None), None)


@cache
def known_keys() -> tuple[str, ...]:
    """Lists every key of the schema as a dotted path, sections included, list indices left out."""

    def below(section: type[Section], prefix: str) -> list[str]:
        keys = []
        for name, field in section.model_fields.items():
            keys.append(prefix + name)
            nested = section_in(field.annotation)
            keys += below(nested, f"{prefix}{name}.") if nested is not None else []
        return keys

    return tuple(below(Recipe, ""))


def suggest_key(dotted: str, *, shown_section: str) -> str:
    """Makes the `help:` line for an unknown key. `dotted` has no list indices, `shown_section` has them."""
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
    """Finds the nearest spelling, whole or in one of its words: `nmae` is near `name_or_path`."""
    spelt = {word: candidate for candidate in reversed(candidates) for word in candidate.split("_")}
    spelt |= {candidate: candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower()[:80], spelt, n=1, cutoff=_CLOSE)  # a longer one is no slip of the pen
    return spelt[close[0]] if close else None
