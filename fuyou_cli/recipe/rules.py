"""Makes a `Recipe` from plain data, or lists everything that is wrong with it, with what was probably meant by an unknown key.

Rules between keys are checked after every single key is right. Keys that are gone are taken out first: one that says what fuyou
does anyway gives a note, any other value is an error that says what to write instead.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..core.json_files import reason, show_path, show_value
from .diagnostics import Diagnostic, Keys, spelt
from .schema import LrSchedulerSection, OptimizerSection, Recipe, Section

_NEEDED = {"model": "model.name_or_path", "dataset": "dataset.train"}  # a missing section lacks this key
_EXAMPLES = {
    "output_dir": "write `output_dir: outputs/my-run`",
    "model.name_or_path": "write the folder of a model, or its hub id",
    "dataset.train": "write a list of files: `train: [{path: data.jsonl}]`",
}
_FIRST = {  # main keys
    "model": "name_or_path", "tokenizer": "name_or_path", "adapter": "type", "optimizer": "name", "lr_scheduler": "name",
}  # fmt: skip
_TRUE = {"dataset.packing": "write `concat`, or `isolated` to keep the samples of a row apart"}  # other tools' true
_OUT_OF_RANGE = {
    "greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short", "too_long", "string_too_short",
}  # fmt: skip
_TIERS = ("weights", "gradients", "optimizer_states", "boundaries")
_OPTIMIZERS_WITH = {"betas": ("adamw", "lion"), "eps": ("adamw",)}
LEAST_PEER_TIMEOUT = 5  # seconds
_KEEP_ONE = "keep one; `key=null` clears the other on the command line"

Broken = Iterator[tuple[str, str, str | None]]  # the key to point at, what is wrong, what to do


def check(data: dict[str, Any], *, ignore: frozenset[Keys] = frozenset()) -> tuple[Recipe | None, list[Diagnostic]]:
    """Returns the recipe, or None and the findings. Does not report keys at or below `ignore` again."""
    findings: list[Diagnostic] = []
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        findings += [_finding(detail) for detail in error.errors(include_url=False)]
    findings += list(broken_rules(recipe)) if recipe is not None else []
    findings = [finding for finding in findings if not any(finding.path[: len(path)] == path for path in ignore)]
    return (None if findings else recipe), findings


def _finding(detail: ErrorDetails) -> Diagnostic:
    path: Keys = tuple(part for part in detail["loc"] if part != "[key]")
    kind, shown = detail["type"], show_path(path)
    if kind == "extra_forbidden":
        dotted = ".".join(part for part in path if isinstance(part, str))
        suggestion = suggest_key(dotted, shown_section=show_path(path[:-1]))
        return Diagnostic(path=path, code="unknown-key", message=f"unknown key `{shown}`", help=suggestion, at_key=True)
    if kind == "missing":
        return _missing(path)
    if kind == "literal_error":
        return _choice(path, detail["input"], str(detail["ctx"]["expected"]))
    remedy = _type_help(kind, detail["input"])
    if kind == "model_type" and shown in _FIRST and isinstance(detail["input"], str):
        remedy = f"write `{shown}: {{{_FIRST[shown]}: {show_value(detail['input'])}}}`"
        if (shown, detail["input"]) == ("adapter", "qlora"):
            remedy = "write `adapter: {type: lora}` and `model.quantize: nf4`"
    return Diagnostic(path=path, code=_code(kind), message=f"`{shown}`: {reason(detail)}", help=remedy)


def _code(kind: str) -> str:
    if kind.endswith("_type") or kind == "finite_number":
        return "wrong-type"
    return "out-of-range" if kind in _OUT_OF_RANGE else kind.replace("_", "-")


def _missing(path: Keys) -> Diagnostic:
    if path and isinstance(path[-1], int):  # a pair with only one value
        shown = show_path(path[:-1])
        return Diagnostic(path=path[:-1], code="out-of-range", message=f"`{shown}`: expected two values, got one")
    key = _NEEDED.get(show_path(path), show_path(path))
    return Diagnostic(path=path, code="missing-key", message=f"`{key}` is missing", help=_EXAMPLES.get(key), at_key=True)


def _choice(path: Keys, value: Any, expected: str) -> Diagnostic:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    choices = [choice.lower() if choice in ("True", "False") else choice for choice in choices]
    listed = choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
    return Diagnostic(
        path=path,
        code="not-a-choice",
        message=f"`{show_path(path)}`: expected {listed}, got {show_value(value)}",
        help=suggest_choice(value, choices) or _type_help("literal_error", value, show_path(path)),
    )


def _type_help(kind: str, value: Any, key: str = "") -> str | None:
    if value is True and key in _TRUE:
        return _TRUE[key]
    if isinstance(value, bool) and kind in ("string_type", "literal_error"):
        return "YAML reads yes, no, on and off as true and false; quote the word"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and kind == "string_type":
        return "quote it"
    if isinstance(value, str) and value.lower() == "none":
        return "in YAML, write `null` for no value"
    if isinstance(value, str) and kind in ("float_type", "int_type") and _is_number(value):
        return "write it without quotes"
    if isinstance(value, str) and kind == "tuple_type":
        return "write a list as [a, b]"
    return None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


# ---- rules between keys ----------------------------------------------------------------------------------------------


def broken_rules(recipe: Recipe) -> Iterator[Diagnostic]:
    """Finds every rule that the recipe breaks."""
    for rule in _RULES:
        for key, message, remedy in rule(recipe):
            yield Diagnostic(path=tuple(key.split(".")), code="conflict", message=message, help=remedy)


def _revision(recipe: Recipe) -> Broken:
    name = recipe.model.name_or_path
    try:
        local = name.startswith(("/", "./", "../", "~")) or Path(name).is_dir()
    except OSError:  # the name is too long: another check reports it
        return
    if local and recipe.model.revision is not None:
        message = f"`model.revision` is set, but {show_value(name)} is a folder, which has no revisions"
        yield "model.revision", message, "leave it out, or name a model of the hub"


def _schedule(recipe: Recipe) -> Broken:
    train, scheduler = recipe.train, recipe.lr_scheduler
    if train.epochs is not None and train.max_steps is not None:
        yield "train.max_steps", "`train.max_steps` and `train.epochs` both set the length of the run", _KEEP_ONE
    if train.epochs is None and train.max_steps is None:
        yield "train.epochs", "the length of the run is not set", "write `train.epochs` or `train.max_steps`"
    key, steps, last = "lr_scheduler.warmup_steps", scheduler.warmup_steps, train.max_steps
    if steps is not None and scheduler.warmup_ratio is not None:
        yield key, f"`{key}` and `lr_scheduler.warmup_ratio` both set the length of the warm-up", _KEEP_ONE
    if steps is not None and last is not None and steps > last:
        yield key, f"a warm-up of {steps} steps does not end within `train.max_steps: {last}`", None
    key, usual = "lr_scheduler.min_lr_ratio", LrSchedulerSection.model_fields["min_lr_ratio"].default
    if scheduler.name == "constant" and scheduler.min_lr_ratio not in (1, usual):
        yield key, f"a constant schedule never decays, so `{key}` has no effect", "leave it out, or use linear, cosine or wsd"


def _batch(recipe: Recipe) -> Broken:
    batch, micro = recipe.train.batch_size, recipe.train.micro_batch_size
    if micro != "auto" and batch % micro:
        message = f"`train.batch_size: {batch}` is not a multiple of `train.micro_batch_size: {micro}`"
        yield "train.micro_batch_size", message, f"use {_divisor_near(batch, micro)}, or auto"


def _ranks(recipe: Recipe) -> Broken:
    if recipe.train.peer_timeout < LEAST_PEER_TIMEOUT:
        message = f"`train.peer_timeout` must be {LEAST_PEER_TIMEOUT}s or more"
        yield "train.peer_timeout", message, "a rank gives a sign of life each second, and is late where others keep it busy"


def _lanes(recipe: Recipe) -> Broken:
    train, lanes = recipe.train, recipe.train.lanes
    if recipe.adapter is None:
        for key, is_asked in (("train.lanes", lanes > 1), ("train.parallel", train.parallel == "replicas")):
            if is_asked:
                message = f"`{key}: {getattr(train, key.removeprefix('train.'))}` is for adapters, whose gradients are small"
                yield key, message, "leave it out: several processes train a whole model as a ring"
        return
    if lanes == 1:
        return
    micro = 1 if train.micro_batch_size == "auto" else train.micro_batch_size
    if train.batch_size % (lanes * micro):
        message = f"`train.batch_size: {train.batch_size}` is no multiple of `train.lanes: {lanes}` times {micro}"
        yield "train.lanes", message, "each lane has as many micro-batches: change one of them"
    for key, is_asked in (
        ("train.sweep_tokens", train.sweep_tokens != "auto"), ("train.router_aux_loss", train.router_aux_loss is not None),
    ):  # fmt: skip
        if is_asked:
            yield key, f"`{key}` does not go with `train.lanes: {lanes}`", "leave one of them out"


def _divisor_near(batch: int, micro: int) -> int:
    """Finds the largest divisor of `batch` that is at most `micro`."""
    small = [divisor for divisor in range(1, math.isqrt(batch) + 1) if batch % divisor == 0]
    return max(divisor for pair in small for divisor in (pair, batch // pair) if divisor <= micro)


def _data(recipe: Recipe) -> Broken:
    for number, entry in enumerate(recipe.dataset.train):
        if entry.weight is None and any(other.weight is not None for other in recipe.dataset.train):
            message = f"`dataset.train[{number}]` has no weight, but another entry has one"
            yield "dataset.train", message, "give a weight to every entry or to none (then entries are used completely)"
    if recipe.dataset.streaming and recipe.train.max_steps is None:
        message = "`dataset.streaming` does not know how many rows there are, so `train.epochs` gives no number of steps"
        yield "dataset.streaming", message, "set train.max_steps"
    if recipe.dataset.streaming and recipe.dataset.eval_fraction:
        message = "`dataset.eval_fraction` holds back samples of all the data, but `dataset.streaming` does not read it all"
        yield "dataset.eval_fraction", message, "name a file in dataset.eval"


def _evaluation(recipe: Recipe) -> Broken:
    samples, has_sets = recipe.eval.samples, bool(recipe.dataset.eval or recipe.dataset.eval_fraction)
    if recipe.eval.every_steps is not None and not has_sets and samples is None:
        remedy = "name a file in dataset.eval, or hold rows back: dataset.eval_fraction=0.05"
        yield "eval.every_steps", "`eval.every_steps` but no `dataset.eval` to evaluate", remedy
    if recipe.train.early_stopping is not None and (recipe.eval.every_steps is None or not has_sets):
        lacks = "eval.every_steps`, after which it could stop" if has_sets else "dataset.eval`, whose loss could stop it"
        message = f"`train.early_stopping` but no `{lacks}"
        yield "train.early_stopping", message, "set eval.every_steps, and dataset.eval or dataset.eval_fraction"
    if recipe.eval.keep_best and not has_sets:
        message = "`eval.keep_best` but no `dataset.eval`, whose loss says which is best"
        yield "eval.keep_best", message, "name a file in dataset.eval, or hold rows back: dataset.eval_fraction=0.05"
    if recipe.eval.keep_best and (recipe.export.dtype, recipe.precision.compute) == ("float32", "bfloat16"):
        message = "`eval.keep_best` keeps what computes, which is bfloat16, but `export.dtype` is float32"
        yield "eval.keep_best", message, "use `export.dtype: bfloat16`, or leave keep_best out"
    if samples is not None and samples.max_new_tokens >= recipe.dataset.max_seq_len:
        message = f"`eval.samples.max_new_tokens: {samples.max_new_tokens}` leaves a prompt no token of `dataset.max_seq_len`"
        yield "eval.samples.max_new_tokens", message, f"use less than {recipe.dataset.max_seq_len}"
    if any(entry.weight is not None for entry in recipe.dataset.eval):
        yield "dataset.eval", "`dataset.eval` has a weight, but each of its sets is evaluated whole", "leave the weight out"


def _device(recipe: Recipe) -> Broken:
    device, gpu = recipe.offload.device, recipe.offload.max_memory.gpu
    if device != "cpu":
        return
    for tier in _TIERS:
        if getattr(recipe.offload, tier) == "gpu":
            yield f"offload.{tier}", f"`offload.{tier}: gpu` needs a GPU, but `offload.device` is cpu", "use cpu"
    if recipe.offload.activations == "keep":
        why = "which has no separate memory for them"
        yield "offload.activations", f"`offload.activations: keep` on `offload.device: cpu`, {why}", "use auto"
    if not gpu.is_auto:
        yield "offload.max_memory.gpu", "`offload.device: cpu` has no gpu memory to limit", "leave it auto"
    if recipe.model.attn_implementation == "flash_attention_2":
        yield "model.attn_implementation", "flash_attention_2 does not run on `offload.device: cpu`", "use sdpa"


def _optimizer(recipe: Recipe) -> Broken:
    name, states = recipe.optimizer.name, recipe.optimizer.state_dtype
    if name != "adamw" and states != "float32":
        message = f"`optimizer.state_dtype: {states}` is for adamw; {name} keeps its momentum in float32"
        yield "optimizer.state_dtype", message, "use float32, or `optimizer.name: adamw`"
    for key, used_by in _OPTIMIZERS_WITH.items():
        usual = OptimizerSection.model_fields[key].default
        if name not in used_by and getattr(recipe.optimizer, key) != usual:
            message = f"`optimizer.{key}` is set, but {name} has none"
            yield f"optimizer.{key}", message, f"leave it out, or use {' or '.join(used_by)}"


def _together(recipe: Recipe) -> Broken:
    offload = recipe.offload
    if offload.boundaries == "gpu" and offload.activations == "swap":
        message = "`offload.boundaries: gpu` but `offload.activations: swap` keeps outputs of operators with them in RAM"
        yield "offload.boundaries", message, "use cpu, or `offload.activations: keep`, which keeps outputs on the GPU"
    if offload.optimizer_states != "gpu":
        if offload.gradients == "gpu":
            message = "`offload.gradients: gpu` also needs the optimizer states on the device"
            yield "offload.gradients", message, "add `offload.optimizer_states: gpu`, or leave it auto"
        return
    for tier in ("weights", "gradients"):
        if (home := getattr(offload, tier)) not in ("auto", "gpu"):
            message = f"`offload.{tier}: {home}` but `offload.optimizer_states: gpu` updates whole stages on the device"
            yield f"offload.{tier}", message, "leave it auto"
    if (name := recipe.optimizer.name) != "adamw":
        message = f"`offload.optimizer_states: gpu` but `optimizer.name: {name}` is updated on the CPU only"
        yield "offload.optimizer_states", message, "use cpu, ssd or auto, or `optimizer.name: adamw`"
    elif (states := recipe.optimizer.state_dtype) != "float32":
        message = f"`offload.optimizer_states: gpu` but `optimizer.state_dtype: {states}` is updated on the CPU only"
        yield "offload.optimizer_states", message, "use cpu, ssd or auto, or `optimizer.state_dtype: float32`"


def _strategy(recipe: Recipe) -> Broken:
    strategy = recipe.offload.strategy
    for tier in _TIERS:
        key, home = f"offload.{tier}", getattr(recipe.offload, tier)
        if strategy == "none" and home == "ssd":
            yield key, f"`{key}: ssd` is set, but `offload.strategy: none` does not use the ssd", None
        if strategy == "manual" and home == "auto" and tier in ("weights", "optimizer_states"):
            message = f"`offload.strategy: manual` needs `{key}` to be gpu, cpu or ssd"
            yield "offload.strategy", message, "name the tier, or use strategy auto and name only the tiers that matter to you"


def _deferral(recipe: Recipe) -> Broken:
    share = recipe.offload.defer_updates
    if share != "auto" and share < 1 and recipe.train.clip_grad_norm is not None:
        setting = f"`offload.defer_updates: {show_value(share)}`"
        message = f"{setting} but `train.clip_grad_norm` makes every update wait for the norm"
        yield "offload.defer_updates", message, "leave it auto, or turn clipping off with `train.clip_grad_norm: null`"


def _norm_first(recipe: Recipe) -> Broken:
    key, offload = "offload.norm_first", recipe.offload
    if offload.norm_first != "always":
        return
    others = {
        "train.clip_grad_norm: null": recipe.train.clip_grad_norm is None,
        "train.sweep_tokens": recipe.train.sweep_tokens != "auto",
        "offload.gradients": offload.gradients != "auto",
        "offload.strategy: none": offload.strategy == "none",
        "offload.defer_updates": offload.defer_updates != "auto",
        "adapter": recipe.adapter is not None,
        "freeze": bool(recipe.freeze),
        "model.trust_remote_code": recipe.model.trust_remote_code,
    }
    for other in (name for name, is_set in others.items() if is_set):
        yield key, f"`{key}: always` does not go with `{other}`", "leave it auto"


def _skipping(recipe: Recipe) -> Broken:
    key, steps = "train.skip_nonfinite", recipe.train.skip_nonfinite
    if steps and recipe.train.clip_grad_norm is None:
        why = "a step's first updates start before its last gradients are known, so the step cannot be skipped"
        message = f"`{key}: {show_value(steps)}` without `train.clip_grad_norm`: {why}"
        yield key, message, "set train.clip_grad_norm, or leave it 0"


def _balanced(recipe: Recipe) -> Broken:
    key = "train.router_aux_loss"
    if recipe.train.router_aux_loss is None:
        return
    if recipe.adapter is not None:
        message = f"`{key}` balances routers, but with `adapter` none of them learns"
        yield key, message, "leave it null"
    if recipe.train.sweep_tokens != "auto":
        message = f"`{key}` counts the experts of all rows of a step before backward, so a step takes one sweep"
        yield "train.sweep_tokens", message, f"leave it auto, or `{key}` null"


def _compiled(recipe: Recipe) -> Broken:
    activations = recipe.offload.activations
    if recipe.train.compile and activations == "swap":
        message = "`offload.activations: swap` stores outputs of operators, but `train.compile: true` leaves none"
        yield "offload.activations", message, "use auto or recompute, or leave train.compile false"
    if recipe.train.compile and recipe.dataset.packing == "isolated":
        message = "`train.compile: true` needs rows of one shape, but in `dataset.packing: isolated` documents have many"
        yield "train.compile", message, "leave it false, or use `dataset.packing: concat`"


def _adapter(recipe: Recipe) -> Broken:
    if recipe.adapter is not None and recipe.freeze:
        yield "freeze", "`freeze` is set, but `adapter` freezes every parameter of the model already", "leave it out"
    if recipe.adapter is not None and recipe.adapter.experts:
        if recipe.adapter.use_dora:
            yield "adapter.use_dora", "`adapter.use_dora` but `adapter.experts: true`: experts have no DoRA", "leave out one"
        if recipe.adapter.lora_dropout:
            yield "adapter.lora_dropout", "`adapter.experts: true` needs `adapter.lora_dropout: 0`", "set it to 0"


def _quantised(recipe: Recipe) -> Broken:
    key, kind = "model.quantize", recipe.model.quantize
    if recipe.model.double_quant and kind != "nf4":
        yield (
            "model.double_quant",
            f"`model.double_quant` but `{key}: {kind}`: it is of the maxima of nf4",
            f"set `{key}: nf4`, or leave double_quant out",
        )
    if kind == "none":
        return
    if recipe.adapter is None and not recipe.freeze:
        message = f"`{key}: {kind}`, but every parameter is trained, and only frozen weights can rest quantised"
        yield key, message, "add an `adapter` (`type: lora`), or name layers in `freeze`"
    if recipe.offload.optimizer_states == "gpu":
        message = f"`offload.optimizer_states: gpu` but `{key}: {kind}`: a stage that is updated on the device is not quantised"
        yield "offload.optimizer_states", message, "leave it auto: an adapter's states are small, and are updated on the CPU"


def _others(recipe: Recipe) -> Broken:
    if recipe.model.attn_implementation == "flash_attention_2" and recipe.precision.compute == "float32":
        message = "flash_attention_2 cannot compute in `precision.compute: float32`"
        yield "model.attn_implementation", message, "use sdpa, or compute in bfloat16"
    if len(set(recipe.logging.backends)) != len(recipe.logging.backends):
        yield "logging.backends", "`logging.backends` names a backend twice", None


_RULES: tuple[Callable[[Recipe], Broken], ...] = (
    _revision, _schedule, _batch, _ranks, _lanes, _data, _evaluation, _device, _optimizer, _together, _strategy, _deferral,
    _norm_first, _skipping, _balanced, _compiled, _adapter, _quantised, _others,
)  # fmt: skip


# ---- keys that are gone ----------------------------------------------------------------------------------------------


class Removed(NamedTuple):
    """Says what became of the key at `path`: of all its values, or of those that `values` names if the key is still there."""

    path: str  # dotted
    same: tuple[object, ...]  # values that change nothing: they ask for what fuyou does now, or were for what is gone
    why: Mapping[object, str] | str  # what became of it, by value or for all
    instead: Mapping[object, str] | str
    values: Callable[[object], bool] | None = None


_INT8 = (
    "delete the key: two extents of everything take 24 bytes per parameter on the drives (bfloat16), or 12.3 with "
    "`optimizer.state_dtype: int8`"
)
_COPIES = "delete the key: `checkpoint.commit_every_steps` sets the interval; `fuyou export` and `eval.keep_best` keep copies"

REMOVED: tuple[Removed, ...] = (
    Removed(
        "checkpoint.mode", ("auto", "in_place"),
        {"redo": "a store always keeps two extents of everything", "snapshot": "a store keeps its last two states"},
        {"redo": _INT8, "snapshot": _COPIES},
    ),
    Removed("checkpoint.snapshot_every_steps", (None,), "stores of snapshots are gone", _COPIES),
    Removed("checkpoint.keep_last", (2,), "a store keeps its last two states", _COPIES),
    Removed(
        "model.kernels", ("torch",), "compiled blocks do what Liger's kernels did",
        "delete the key and write `train.compile: true`",
    ),
    Removed(
        "optimizer.name", (), "SGD is no optimizer of fuyou's any more", "write `adamw` or `lion`",
        values=lambda value: value == "sgd",
    ),
    Removed("optimizer.momentum", (0.9,), "only SGD had it", "delete the key; `optimizer.betas` is Lion's and AdamW's"),
    Removed(
        "offload.wear", (), "written bytes have no price any more", "write `spare`, or `ignore` for the fastest plan",
        values=lambda value: value == "balanced",
    ),
    Removed(
        "offload.defer_updates", (), "all updates wait for the next forward, or none", "leave it auto, or write 1 or 0",
        values=lambda value: isinstance(value, float) and 0 < value < 1,
    ),
    Removed(
        "offload.device", (), "only fuyou's tests have such a device", "write `auto`, `cpu` or `cuda`",
        values=lambda value: value == "emulated",
    ),
    Removed("precision.master", ("float32",), "the master is always float32", "delete the key"),
    Removed("precision.allow_tf32", (False,), "float32 is computed in float32", "delete the key"),
    Removed("export.push_to_hub", (None,), "fuyou does not upload", "delete the key, and upload the exported folder yourself"),
    Removed("export.private", (True,), "fuyou does not upload", "delete the key"),
)  # fmt: skip

REMOVED_KEYS = frozenset(row.path for row in REMOVED if row.values is None)


def take_removed(data: dict[str, Any]) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """Takes what is gone out of a recipe's data. Returns notes, and errors."""
    notes, errors = [], []
    for row in REMOVED:
        path = tuple(row.path.split("."))
        section: Any = data
        for part in path[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or path[-1] not in section:
            continue
        value = section[path[-1]]
        if row.values is not None and not row.values(value):
            continue
        del section[path[-1]]
        shown = f"{row.path}: {spelt(value)}"
        if value in row.same:
            notes.append(Diagnostic(path=path, code="removed", message=f"`{shown}` has no effect any more: delete the key"))
            continue
        why, instead = (_of(value, text) for text in (row.why, row.instead))
        errors.append(Diagnostic(path=path, code="removed", message=f"`{shown}` is gone: {why}", help=instead))
    return notes, errors


def _of(value: object, texts: Mapping[object, str] | str) -> str:
    """Returns the text for a value. One that the key never had gets the first."""
    if isinstance(texts, str):
        return texts
    return next((text for of_value, text in texts.items() if of_value == value), next(iter(texts.values())))


# ---- what was probably meant by an unknown key -----------------------------------------------------------------------


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
    return next((section for part in get_args(annotation) if (section := section_in(part)) is not None), None)


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
