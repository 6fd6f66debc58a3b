"""Suggests the key that the user probably meant by an unknown key."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any, get_args

from .schema import Recipe, Section

# Names that other trainers use for the same idea, by their last part. They are suggested but never accepted, so that
# recipes read the same for all users.
_OTHER_NAMES = {
    "model.name_or_path": "base_model model_name_or_path model_name model_id pretrained_model_name_or_path checkpoint_dir",
    "model.attn_implementation": "flash_attention attn_impl flash_attn use_flash_attention_2 sdp_attention xformers_attention",
    "dataset.max_seq_len": "max_length max_seq_length sequence_len cutoff_len seq_len model_max_length",
    "dataset.packing": "packed sample_packing neat_packing",
    "dataset.loss_on": (
        "train_on_input train_on_inputs train_on_prompt mask_history mask_prompt roles_to_train "
        "completion_only_loss assistant_only_loss"
    ),
    "dataset.eval_fraction": "val_set_size val_size test_split_size val_split_fraction",
    "dataset.eval": "dataset_val eval_dataset test_datasets",
    "dataset.train": "datasets dataset_name dataset_path train_file train_dataset data data_path",
    "dataset.num_workers": "dataloader_num_workers dataset_num_proc preprocessing_num_workers dataset_processes",
    "dataset.train.format": "type ds_type",
    "tokenizer.name_or_path": "tokenizer_name tokenizer_name_or_path",
    "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size",
    "train.batch_size": "gradient_accumulation_steps global_batch_size train_batch_size",
    "train.epochs": "num_epochs num_train_epochs n_epochs",
    "train.max_steps": "max_train_steps num_steps total_steps iters max_iters",
    "train.compile": "torch_compile",
    "train.early_stopping.patience": "early_stopping_patience",
    "train.clip_grad_norm": "max_grad_norm max_norm gradient_clipping",
    "train.threads": "num_threads",
    "optimizer.lr": "learning_rate",
    "optimizer.name": "optim optimizer_type",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.weight_decay": "wd",
    "lr_scheduler.name": "lr_scheduler_type lr_schedule",
    "lr_scheduler.min_lr_ratio": "min_lr cosine_min_lr_ratio",
    "lr_scheduler.warmup_steps": "num_warmup_steps lr_warmup_steps",
    "precision.compute": "dtype torch_dtype bf16 fp16",
    "offload.activations": (
        "gradient_checkpointing enable_activation_checkpointing enable_activation_offloading "
        "activation_offloading use_unsloth_gc"
    ),
    "offload.weights": "fsdp_cpu_offload layer_offloading cpu_offload device_map",
    "offload": "deepspeed fsdp fsdp_config accelerate_config",
    "offload.max_memory.gpu": "gpu_memory_limit",
    "offload.dir": "nvme_path offload_folder",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "checkpoint.commit_every_steps": "save_steps save_strategy saves_per_epoch save_every",
    "eval.every_steps": "eval_steps evals_per_epoch",
    "eval": "eval_strategy evaluation_strategy do_eval per_device_eval_batch_size",
    "eval.keep_best": "load_best_model_at_end",
    "logging.every_steps": "logging_steps steps_per_report",
    "logging.backends": "report_to use_wandb use_tensorboard",
    "logging.wandb.project": "wandb_project",
    "logging.wandb.name": "wandb_name wandb_run_id run_name",
    "output_dir": "output_path save_dir logging_dir",
    "adapter": "use_peft use_lora lora qlora peft_config finetuning_type",
    "model.quantize": "load_in_4bit load_in_8bit quantization_bit quantization bnb_4bit_quant_type",
    "model.double_quant": "bnb_4bit_use_double_quant double_quantization",
    "adapter.type": "peft_type",
    "adapter.from": "lora_model_dir adapter_name_or_path lora_path adapter_path resume_from",
    "adapter.r": "lora_r lora_rank rank",
    "adapter.target_modules": "lora_target_modules lora_target lora_target_linear",
    "adapter.modules_to_save": "lora_modules_to_save additional_target",
    "adapter.use_rslora": "peft_use_rslora",
    "adapter.use_dora": "peft_use_dora",
}
_MEANINGS = {  # for keys that measure the same idea differently
    "gradient_accumulation_steps": "the rows of one optimizer step, micro-batches times accumulation",
    "per_device_train_batch_size": "the rows computed at once; auto chooses the fastest that fits",
    "min_lr": "a share of optimizer.lr",
    "adam_beta1": "a list of two: [0.9, 0.95]",
    "device_map": "auto, gpu, cpu or ssd",
    "save_strategy": "auto commits as often as it costs little; a run is always saved when it stops",
    "bf16": "bfloat16 or float32",
    "fp16": "bfloat16 or float32",
    "qlora": "LoRA; `model.quantize: nf4` quantises the weights below it",
    **dict.fromkeys(["load_in_4bit", "load_in_8bit", "quantization_bit"], "nf4 or int8, of the weights below an adapter"),
}
_INT8_ADAMW = "write `name: adamw` and `optimizer.state_dtype: int8`"
_OTHER_CHOICES = {
    **dict.fromkeys(["adamw8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"], _INT8_ADAMW),
    "adafactor": f"{_INT8_ADAMW} for small states: a factored moment needs sums over a whole matrix before its first element "
    "is updated, and an update here passes each part of it once",
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
    """Lists every key of the schema as a dotted path, with sections and without list indices."""

    def below(section: type[Section], prefix: str) -> list[str]:
        keys = []
        for attribute, field in section.model_fields.items():
            name = field.alias or attribute
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
        return f"sections are nested: write `{dotted.partition('.')[0]}:` and indent the rest below it"
    if name in ALIASES:
        return _ours(name)
    if len(elsewhere) == 1:
        return (
            f"`{name}` belongs at `{elsewhere[0]}`"
            if "." in elsewhere[0]
            else f"`{name}` belongs in no section: do not indent it"
        )
    if close := _closest(name, siblings):
        return f"did you mean `{f'{shown_section}.{close}' if shown_section else close}`?"
    leaves = sorted({key.rpartition(".")[2] for key in known_keys()})
    if close := _closest(name, leaves):
        return f"did you mean `{next(key for key in known_keys() if key.rpartition('.')[2] == close)}`?"
    return f"keys here: {', '.join(siblings)}" if siblings else "this key takes a value, it is not a section"


def _ours(name: str) -> str:
    """Names fuyou's key for another trainer's key, with its meaning."""
    key = ALIASES[name]
    meaning = f": {_MEANINGS[name]}" if name in _MEANINGS else ""
    return f"fuyou calls this `{key}`{meaning}"


def suggest_choice(value: object, choices: list[str]) -> str | None:
    if not isinstance(value, str):
        return None
    if value.lower() in _OTHER_CHOICES:
        return _OTHER_CHOICES[value.lower()]
    close = _closest(value, choices)
    return f"did you mean `{close}`?" if close else None


def _closest(name: str, candidates: list[str]) -> str | None:
    """Finds the nearest spelling, whole or in one of its words: `nmae` is near `name_or_path`."""
    spelt = {word: candidate for candidate in reversed(candidates) for word in candidate.split("_")}
    spelt |= {candidate: candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower()[:80], spelt, n=1, cutoff=_CLOSE)  # a longer key is not a typing error
    return spelt[close[0]] if close else None
