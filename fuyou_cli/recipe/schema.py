"""Defines `Recipe`: the whole schema, its types, ranges, defaults, and what every key does; for editors as JSON Schema, for
people as a page in Markdown.

Rules between keys are in `rules`. YAML has no sizes, memory limits and `auto`: they are types of their own. One function checks
each, so that a wrong value gives one error and not one per member of a union.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fuyou_cli.core.paths import folder
from fuyou_cli.core.units import LARGEST_SIZE, LONGEST_TIME, format_time, parse_size, parse_time

Auto = Literal["auto"]
Patterns = TypeVar("Patterns", dict[str, int], tuple[str, ...])

_LARGEST_BLOCK = 1 << 30  # of one I/O, as in native/src/internal.h
_DEEPEST_QUEUE = 256  # I/Os in flight per direction, as there
_LARGEST_WHOLE = 2**31 - 1
_SMALLEST_PLAIN = 1 << 17  # bytes; in a smaller number the unit was forgotten
_MOST_ENTRIES = 16
_MOST_THREADS = 1024  # torch crashes when the system has no more of them


def wrong(code: str, reason: str) -> PydanticCustomError:
    """Makes an error: the diagnostic shows `code`, and `reason` completes "`key`: ..."."""
    return PydanticCustomError(code, "{reason}", {"reason": reason})


def without_null(text: str) -> str:
    """Accepts text without null characters, which no file system allows in a name."""
    if "\0" in text:
        raise wrong("out_of_range", "has a null character, but paths and names must not")
    return text


def not_empty(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Accepts a list that is not empty."""
    if not values:
        raise wrong("out_of_range", "must not be empty")
    return values


def few(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Accepts a list that is not long."""
    if len(values) > _MOST_ENTRIES:
        raise wrong("out_of_range", f"has {len(values)} entries, but at most {_MOST_ENTRIES} are allowed")
    return values


def _size(value: Any) -> int:
    try:
        size = parse_size(value)
    except ValueError:
        raise wrong("wrong_type", "expected a size such as 2GiB, 512MiB or 1.5TB") from None
    if not 0 < size <= LARGEST_SIZE:
        raise wrong("out_of_range", f"a size must be between 1 byte and {format_size(LARGEST_SIZE)}")
    return size


def _size_with_unit(value: Any) -> int:
    """Reads a size. Refuses a small number without a unit: 64 is meant to be 64GiB, not bytes."""
    size = _size(value)
    if size < _SMALLEST_PLAIN and str(value).strip().isdigit():
        raise wrong("out_of_range", f"expected a size with its unit, such as {size}{'GiB' if size < 1024 else 'MiB'}")
    return size


def _time(value: Any) -> int:
    try:
        seconds = parse_time(value)
    except (TypeError, ValueError):  # TypeError: not a text
        raise wrong("wrong_type", "expected a time such as 8h, 90m, 1h30m, 45s or 2d") from None
    if not 0 < seconds <= LONGEST_TIME:
        raise wrong("out_of_range", f"a time must be between 1s and {format_time(LONGEST_TIME)}")
    return seconds


def format_size(size: int) -> str:
    """Formats a size as the shortest text that `parse_size` reads back exactly: 5000000000 is "5GB"."""
    for power in range(5, 0, -1):
        for base, suffix in ((1024, "iB"), (1000, "B")):
            if size % base**power == 0 and size > 0:
                return f"{size // base**power}{'KMGTP'[power - 1]}{suffix}"
    return str(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """Holds `auto`, a number of bytes, or a share of the memory that exists."""

    text: str  # as written; --show-config shows it
    size: int | None = None
    share: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.size is None and self.share is None

    def resolve(self, *, total: int, auto: int) -> int:
        """Computes the bytes, given `total` bytes, and the bytes that `auto` stands for."""
        if self.size is not None:
            return self.size
        return auto if self.share is None else int(total * self.share)


def _memory_limit(value: object) -> MemoryLimit:
    if isinstance(value, MemoryLimit):
        return value
    if value == "auto":
        return MemoryLimit(text="auto")
    if isinstance(value, str) and value.rstrip().endswith("%"):
        return MemoryLimit(text=value.strip(), share=_percentage(value))
    try:
        size = _size_with_unit(value)
    except PydanticCustomError as error:
        if error.type == "out_of_range":
            raise
        raise wrong("wrong_type", "expected auto, a size such as 24GiB, or a share such as 90%") from None
    return MemoryLimit(text=value.strip() if isinstance(value, str) else format_size(size), size=size)


def _percentage(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise wrong("wrong_type", "expected a share such as 90%") from None
    if not 0 < share <= 1:
        raise wrong("out_of_range", "a share must be above 0% and at most 100%")
    return share


def _auto_or(read: Callable[[object], object]) -> PlainValidator:
    return PlainValidator(lambda value: value if value == "auto" else read(value))


def _whole(least: int, most: int = _LARGEST_WHOLE) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong("wrong_type", "expected auto or a whole number")
        if not least <= value <= most:
            bounded = most < _LARGEST_WHOLE or value > most
            range_ = f"from {least} to {most}" if bounded else f"of at least {least}"
            raise wrong("out_of_range", f"must be auto or a whole number {range_}")
        return value

    return read


def _all_or_none(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong("wrong_type", "expected auto, 0 or 1")
    if value not in (0, 1):
        raise wrong("out_of_range", "must be auto, 0 or 1")
    return float(value)


def _block(value: object) -> int:
    size = _size(value)
    if size % 4096:
        raise wrong("out_of_range", "must be a multiple of 4KiB, because direct I/O moves whole blocks")
    if size > _LARGEST_BLOCK:
        raise wrong("out_of_range", f"must be at most {format_size(_LARGEST_BLOCK)}")
    return size


def _folders(value: object) -> tuple[str, ...]:
    folders = [value] if isinstance(value, str) else value
    if not isinstance(folders, (list, tuple)) or not all(isinstance(name, str) and name for name in folders):
        raise wrong("wrong_type", "expected a folder or a list of folders")
    for name in folders:
        without_null(name)
    if len(set(folders)) != len(folders):
        raise wrong("conflict", "names the same folder twice")
    if len(folders) > 16:
        raise wrong("out_of_range", "at most 16 folders are allowed")
    return tuple(folders)


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise wrong("out_of_range", f"{pattern!r} is not a regular expression: {error}") from None


def of_patterns(values: Patterns) -> Patterns:
    """Accepts a dictionary whose keys are regular expressions, or a list of names that peft puts into one."""
    for pattern in values:
        _compiles(pattern)
    return values


def _module_names(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        _compiles(value)
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise wrong("wrong_type", "expected all-linear, a list of module names, or a regular expression")
    return not_empty(tuple(value))


_SIZE: dict[str, Any] = {"type": ["integer", "string"], "pattern": r"^\s*\d+(\.\d+)?\s*([kKMGTP]i?B|B)?\s*$", "minimum": 1}


def _spelt(**schema: Any) -> WithJsonSchema:
    """Describes the accepted values to an editor."""
    return WithJsonSchema(schema)


def _auto_spelt(kind: str, least: int, most: float | None = None) -> WithJsonSchema:
    bounds = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return _spelt(anyOf=[{"const": "auto"}, {"type": kind, **bounds}])


Size = Annotated[int, PlainValidator(_size_with_unit), PlainSerializer(format_size), _spelt(**_SIZE)]
Time = Annotated[
    int, PlainValidator(_time), PlainSerializer(format_time), _spelt(type="string", pattern=r"^\s*(\d+[dhms]\s*)+$")
]
Limit = Annotated[
    MemoryLimit,
    PlainValidator(_memory_limit),
    PlainSerializer(lambda limit: limit.text),
    _spelt(anyOf=[{"const": "auto"}, _SIZE, {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*%\s*$"}]),
]
AutoPositive = Annotated[int | Auto, _auto_or(_whole(1)), _auto_spelt("integer", 1)]
AutoDepth = Annotated[int | Auto, _auto_or(_whole(1, _DEEPEST_QUEUE)), _auto_spelt("integer", 1, _DEEPEST_QUEUE)]
AutoThreads = Annotated[int | Auto, _auto_or(_whole(1, _MOST_THREADS)), _auto_spelt("integer", 1, _MOST_THREADS)]
AutoCount = Annotated[int | Auto, _auto_or(_whole(0)), _auto_spelt("integer", 0)]
AllOrNone = Annotated[float | Auto, _auto_or(_all_or_none), _spelt(enum=["auto", 0, 1])]
AutoBlock = Annotated[
    int | Auto,
    _auto_or(_block),
    PlainSerializer(lambda v: v if v == "auto" else format_size(v)),
    _spelt(anyOf=[{"const": "auto"}, _SIZE]),
]
ModuleNames = Annotated[
    str | tuple[str, ...],
    PlainValidator(_module_names),
    PlainSerializer(lambda names: names if isinstance(names, str) else list(names)),
    _spelt(anyOf=[{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]),
]
Folders = Annotated[
    tuple[str, ...],
    PlainValidator(_folders),
    PlainSerializer(list),
    _spelt(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 16}]),
]


class Section(BaseModel):
    """Defines a part of the recipe: unknown keys are errors, values are not converted, nothing changes after loading.

    `key: null` means "not written", unless null is itself a value of the key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_cleared(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return cls._fill({key: value for key, value in data.items() if value is not None or cls._takes_null(key)})

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        """Adds defaults that depend on which other keys are written."""
        return data

    @classmethod
    def _takes_null(cls, key: object) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is None or type(None) in get_args(field.annotation)


def key(default: object, description: str) -> Any:
    """Declares a key with its default. `description`: for editors and for the reference page."""
    return Field(default=default, description=description)


# ---- the sections ----------------------------------------------------------------------------------------------------


Text = Annotated[str, Field(min_length=1), AfterValidator(without_null)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
AtLeastZero = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
AnyTier = Literal["auto", "gpu", "cpu", "ssd"]

_AUTO = MemoryLimit(text="auto")
_LIST = Field(strict=False)  # YAML has lists, not tuples
_FEW = Field(strict=False, json_schema_extra={"minItems": 1, "maxItems": 16})  # `not_empty` and `few`, for editors


class ModelSection(Section):
    name_or_path: Text = key(..., "A folder with a model of safetensors, or a name on the hub.")
    revision: Text | None = key(None, "A branch, tag or commit on the hub.")
    attn_implementation: Literal["sdpa", "flash_attention_2", "eager"] = key(
        "sdpa", "What computes attention. `eager` is slower; `flash_attention_2` is an extra package."
    )
    trust_remote_code: bool = key(False, "Lets the model's own code run. That of a tokenizer is never run.")
    quantize: Literal["none", "nf4", "int8", "mxfp4", "fp8"] = key(
        "none", "How frozen weights of the blocks' linear layers rest: as in bitsandbytes, or as in the model's files."
    )
    double_quant: bool = key(False, "Keeps the maxima of the blocks of `nf4` in eight bits.")

    @property
    def quantisation(self) -> Literal["nf4", "nf4_double", "int8", "mxfp4", "fp8"] | None:
        """Returns the format in which weights rest; None: in the compute dtype."""
        if self.quantize == "none":
            return None
        return "nf4_double" if self.double_quant and self.quantize == "nf4" else self.quantize


class TokenizerSection(Section):
    name_or_path: Text | None = key(None, "Another folder or hub name than the model's.")
    chat_template: Text | None = key(None, "A .jinja file, for models that have no template of their own.")
    pad_token: Text | None = key(None, "The token that fills short rows; it never carries loss.")


class DatasetEntry(Section):
    path: Text = key(
        ...,
        "A file, folder or glob of json, jsonl, parquet, csv, arrow or txt, also compressed; or a data set of"
        " the hub. A .txt file is cut at blank lines: each paragraph is a sample (to train on, `packing: "
        "concat` takes it whole, but for `eval_fraction`).",
    )
    name: Text | None = key(None, "The subset of a hub data set.")
    revision: Text | None = key(
        None, "A branch, tag or commit of a hub data set. Without it, what was newest when it was first read."
    )
    split: Text = key("train", "The split of a hub data set, or a part of it: `train[:10%]`.")
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized", "input_output"] = key(
        "auto", "How a row is read. `auto`: the columns of the first row decide, and the choice is printed."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Names of columns that differ from the format's, as `{prompt: question, completion: answer}`.",
    )
    weight: PositiveFloat | None = key(
        None, "Share of the rows among the weights of all entries. Without weights, entries are used completely."
    )
    max_samples: Positive | None = key(None, "Uses only the first samples, for a trial run.")


class DatasetSection(Section):
    train: Annotated[tuple[DatasetEntry, ...], _LIST, AfterValidator(not_empty)] = key(..., "What is trained on.")
    eval: Annotated[tuple[DatasetEntry, ...], _LIST] = key(
        (), "Sets whose loss and perplexity the run tells. Each is a set of its own, and never packed."
    )
    eval_fraction: BelowOne = key(0.0, "Share of the training samples that is held back, to be evaluated; never packed.")
    max_seq_len: Annotated[int, Field(ge=2, le=2**24)] = key(
        4096, "Tokens of a row at most. Attention and boundaries grow with it."
    )
    overlong: Literal["truncate", "drop", "split", "error"] = key(
        "truncate", "What happens to longer samples; the counts are printed."
    )
    packing: Literal[False, "concat", "isolated"] = key(
        False,
        "`concat`: rows are cut from one stream; `isolated`: documents of a row do not see each other. Only "
        "of rows to train on: a sample to evaluate is a row of its own.",
    )
    loss_on: Literal["auto", "all", "assistant", "last_assistant", "completion"] = key(
        "auto", "What carries loss. `auto`: the assistant's messages, the completion, or all of a text."
    )
    shuffle: bool = key(True, "Rows in an order that the seed decides; of a stream, within parts of about 4 million tokens.")
    streaming: bool = key(
        False, "Reads and tokenises while the run trains, so that large data need not wait; needs `train.max_steps`."
    )
    num_workers: Annotated[int, Field(ge=0, le=1024)] = key(4, "Threads that tokenise, before training starts.")
    cache_dir: Text | None = key(None, "Where tokenised rows are kept (default: `data` in `output_dir`).")

    @property
    def weights(self) -> tuple[float, ...]:
        """Returns the weights of a mixture; nothing if entries are used completely, one after the other."""
        weights = tuple(entry.weight for entry in self.train if entry.weight is not None)
        return weights if len(weights) > 1 else ()


class AdapterSection(Section):
    """Asks for LoRA. Names and meanings are peft's."""

    type: Literal["lora"] = key("lora", "What is trained beside the frozen model.")
    start: Annotated[Text | None, Field(alias="from", exclude_if=lambda value: value is None)] = key(
        None,
        "A folder with an adapter that was saved before, or a run's `output_dir`: training starts from it. "
        "Keys that are left out are its own; others have to be those it was trained with, but for the "
        "dropout.",
    )
    r: Positive = key(8, "Rank of LoRA's matrices.")
    lora_alpha: Positive = key(8, "LoRA's scale is `lora_alpha / r`.")
    lora_dropout: BelowOne = key(0.0, "Dropout before LoRA's first matrix.")
    target_modules: ModuleNames = key(
        "all-linear", "`all-linear`, names of linear layers (or ends of them), or one regular expression."
    )
    use_rslora: bool = key(False, "Scales by `lora_alpha / sqrt(r)`.")
    use_dora: bool = key(False, "Trains a magnitude for each output as well.")
    experts: Annotated[bool, Field(exclude_if=lambda value: not value)] = key(
        False, "Trains A and B for each matrix of each expert of a mixture as well, with `r` and `lora_alpha`."
    )
    modules_to_save: Annotated[tuple[Text, ...], _LIST, AfterValidator(of_patterns)] = key(
        (), "Names of modules that are trained in full beside the adapter."
    )
    rank_pattern: Annotated[dict[str, Positive], AfterValidator(of_patterns)] = Field(
        default_factory=dict, description="Other ranks, by regular expression of the layer's name."
    )
    alpha_pattern: Annotated[dict[str, Positive], AfterValidator(of_patterns)] = Field(
        default_factory=dict, description="Other alphas, by regular expression of the layer's name."
    )


class OptimizerSection(Section):
    name: Literal["adamw", "lion"] = key("adamw", "The update: AdamW or Lion.")
    lr: PositiveFloat = key(1e-5, "Learning rate after the warm-up. LoRA wants about ten times that of a full run.")
    betas: Annotated[tuple[BelowOne, BelowOne], _LIST] = key(
        (0.9, 0.95), "Decay of the running means of AdamW and Lion (Lion's default: `[0.9, 0.99]`)."
    )
    eps: PositiveFloat = key(1e-8, "What AdamW adds to the root of the variance, so that it divides by more than zero.")
    weight_decay: AtLeastZero = key(0.0, "Weight decay. It applies to matrices only.")
    state_dtype: Literal["float32", "bfloat16", "int8"] = key(
        "float32", "How momentum and variance are kept. `int8` halves traffic and wear, `bfloat16` saves a third."
    )

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        if data.get("name") == "lion" and "betas" not in data:
            data["betas"] = [0.9, 0.99]  # its authors'
        return data


class LrSchedulerSection(Section):
    name: Literal["constant", "linear", "cosine", "wsd"] = key(
        "cosine", "`wsd` keeps the rate, then decays. A run at `constant` may be made longer if `warmup_steps` is set."
    )
    warmup_ratio: Share | None = key(None, "Share of the steps in which the rate rises: 0.03 unless `warmup_steps` is set.")
    warmup_steps: Count | None = key(None, "Steps in which the rate rises.")
    min_lr_ratio: Share = key(
        0.1, "Share of `optimizer.lr` that the rate falls towards: the step after the last would have it."
    )

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        if "warmup_ratio" not in data and data.get("warmup_steps") is None:
            data["warmup_ratio"] = 0.03
        return data


class EarlyStoppingSection(Section):
    patience: Positive = key(3, "Evaluations in a row without a better loss, after which the run ends.")
    min_delta: AtLeastZero = key(0.0, "By how much a loss must be lower to count as better for `patience`.")


class TrainSection(Section):
    epochs: Positive | None = key(None, "How often all rows are seen: 1 unless `max_steps` is set.")
    max_steps: Positive | None = key(None, "Steps of the run.")
    max_time: Time | None = key(None, "Stops before the step that would end later. The same command goes on.")
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = key(
        64, "Rows of one optimizer step. Weights and states cost the same traffic whatever it is."
    )
    micro_batch_size: AutoPositive = key("auto", "Rows computed at once. `auto`: the fastest size that fits.")
    sweep_tokens: AutoPositive = key("auto", "Most tokens that pass through the model and back at once. Results are the same.")
    head_chunk_tokens: AutoCount = key("auto", "Tokens whose logits are made at once. 0: a whole micro-batch.")
    head_chunk_vocab: AutoCount = key("auto", "Rows of a piece of embedding and head. 0: they are not cut.")
    threads: AutoThreads = key("auto", "Threads of torch on the CPU.")
    clip_grad_norm: PositiveFloat | None = key(1.0, "Exact clipping by the global norm. `null`: updates overlap backward.")
    router_aux_loss: PositiveFloat | None = key(
        None, "Coefficient of the loss that balances a mixture's experts, of the whole batch. `null`: none."
    )
    skip_nonfinite: Count = key(0, "Steps in a row with a NaN or Inf that may be skipped. 0: the first ends the run.")
    compile: bool = key(False, "Compiles blocks with torch.compile, once for all that are alike.")
    deterministic: bool = key(False, "A GPU repeats a run bit for bit, but slower; the CPU always does.")
    early_stopping: EarlyStoppingSection | None = key(None, "Ends the run by the loss of the first set that is evaluated.")
    nproc: Positive = key(1, "Processes on this box that train one model together, with the results of one.")
    parallel: Literal["auto", "ring", "replicas"] = key(
        "auto",
        "What several processes do: each computes some blocks (`ring`), or the whole model for some rows (`replicas`, of "
        "adapters). `auto`: replicas where `lanes` allows them, on the CPU.",
    )
    lanes: Annotated[Literal[1, 2, 4, 8, 16, 32, 64], Field(exclude_if=lambda value: value == 1)] = key(
        1,
        "Groups of an adapter's micro-batches that are summed apart. As many replicas, or a number that divides it, have the "
        "same results.",
    )
    peer_timeout: Time = key(60, "How long a process of several may give no sign of life before the others end.")

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        if "epochs" not in data and data.get("max_steps") is None:
            data["epochs"] = 1
        return data


class PrecisionSection(Section):
    compute: Literal["bfloat16", "float32"] = key("bfloat16", "What the model computes in.")
    grad_accum: Literal["float32", "bfloat16"] = key("float32", "What gradients of micro-batches are summed in.")


class MaxMemory(Section):
    gpu: Limit = key(_AUTO, "GPU memory that the run may take. `auto`: what is free.")
    cpu: Limit = key(_AUTO, "RAM that the whole process may take. `auto`: what is free, less a margin.")
    ssd: Limit = key(_AUTO, "Disk that the store may take.")


class IoSection(Section):
    backend: Literal["auto", "io_uring", "threads"] = key("auto", "What reads and writes the store.")
    queue_depth: AutoDepth = key("auto", "Requests in flight, each way.")
    block_size: AutoBlock = key("auto", "Bytes of one request.")


class OffloadSection(Section):
    strategy: Literal["auto", "none", "manual"] = key(
        "auto", "`none`: nothing on the ssd; `manual`: you name the tiers of weights and states."
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Where to compute.")
    dir: Folders = key((), "A folder on the fastest local drive, or several, which are striped.")
    max_memory: MaxMemory = MaxMemory()
    weights: AnyTier = key("auto", "Where they rest: on the GPU, in RAM or on the ssd. `auto`: the plan chooses.")
    gradients: AnyTier = key("auto", "Where they rest: on the GPU, in RAM or on the ssd. `auto`: the plan chooses.")
    optimizer_states: AnyTier = key(
        "auto", "Where they rest: on the GPU, in RAM or on the ssd. `auto`: the plan chooses. The bulk of the traffic."
    )
    activations: Literal["auto", "keep", "swap", "recompute"] = key(
        "auto", "Outputs of operators, or compiled blocks' graphs: kept on the GPU, swapped, or computed again."
    )
    boundaries: AnyTier = key("auto", "Where the stages' inputs wait for backward.")
    lookahead: AutoPositive = key("auto", "Stages fetched early.")
    defer_updates: AllOrNone = key("auto", "1: all updates run in the next forward, where clipping is off; 0: none.")
    norm_first: Literal["auto", "always", "never"] = key(
        "auto", "Clips by the norm of a first backward, so that updates run beside a second. Results are the same."
    )
    io: IoSection = IoSection()
    verify_reads: bool = key(True, "Compares what training reads with what was written.")
    wear: Literal["spare", "ignore"] = key("spare", "Whether small gains in speed may cost writes to the drives.")
    ssd_write_limit: Size | None = key(None, "Stops before the step that would write more than this, all of the run counted.")
    expandable_segments: bool = key(True, "Lets segments of torch's allocator grow on a GPU, unless PYTORCH_ALLOC_CONF is set.")
    measure: bool = key(
        True, "Measures a new machine, and a new recipe's layers, before planning. `false`: known or assumed rates."
    )


class CheckpointSection(Section):
    commit_every_steps: AutoPositive | None = key("auto", "Steps between saved states. `auto`: as often as it costs little.")
    resume: Text = key("auto", "`auto`: goes on where the run was stopped; `never`: starts over; or a store's folder.")


class SamplesSection(Section):
    prompts: Annotated[tuple[Text, ...], _FEW, AfterValidator(not_empty), AfterValidator(few)] = key(
        ..., "At most 16 texts to continue, with the likeliest token each time."
    )
    max_new_tokens: Positive = key(64, "Tokens after each prompt at most: so many passes over the weights.")
    chat: bool = key(False, "Puts each prompt into the chat template, as a user's message.")


class EvalSection(Section):
    every_steps: Positive | None = key(None, "Steps between evaluations. `null`: only where the run starts and ends.")
    at_start: bool = key(True, "Evaluates before the first step too.")
    keep_best: bool = key(False, "Keeps the weights of the first set's lowest loss in `output_dir/best`, as they computed.")
    samples: SamplesSection | None = key(None, "Shows what the model writes after fixed prompts at each evaluation.")


class ExportSection(Section):
    at_end: bool = key(True, "Writes the model, or the adapter, where the run ends.")
    dtype: Literal["bfloat16", "float32"] = key("bfloat16", "Type of the exported weights.")
    max_shard_size: Size = key(5_000_000_000, "Size of one exported file at most.")


class WandbSection(Section):
    project: Text | None = key(None, "Weights & Biases: the project.")
    name: Text | None = key(None, "Weights & Biases: the run's name.")
    mode: Literal["offline", "online"] = key(
        "offline", "`offline` keeps the figures here: upload them later with `wandb sync`."
    )


class MlflowSection(Section):
    tracking_uri: Text | None = key(None, "MLflow: the server (default: MLFLOW_TRACKING_URI, else a file in `output_dir`).")
    experiment: Text | None = key(None, "MLflow: the experiment.")
    name: Text | None = key(None, "MLflow: the run's name.")


class TrackioSection(Section):
    project: Text | None = key(None, "Trackio: the project.")
    name: Text | None = key(None, "Trackio: the run's name.")
    space_id: Text | None = key(None, "Trackio: the Space (default: TRACKIO_SPACE_ID, else this machine).")


LogBackend = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"]


class LoggingSection(Section):
    every_steps: Positive = key(1, "Steps between lines on the console and for other loggers; the JSON log has every step.")
    backends: Annotated[tuple[LogBackend, ...], _LIST] = key(
        ("console", "jsonl"), "Where figures go. All but the first two are extra packages."
    )
    wandb: WandbSection = WandbSection()
    mlflow: MlflowSection = MlflowSection()
    trackio: TrackioSection = TrackioSection()


class Recipe(Section):
    """Describes the run that the user asks for. Only `output_dir`, `model.name_or_path` and `dataset.train` have no default."""

    version: Literal[1] = key(1, "Version of the schema.")
    output_dir: Text = key(..., "Where the log, the export and, without `offload.dir`, the store go.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = key(
        42, "Decides the shuffling, dropout, held-back rows and what an adapter begins with. The same seed gives the same run."
    )
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    adapter: AdapterSection | None = key(
        None, "Trains a LoRA adapter, in the names of peft. `null`: every parameter is trained."
    )
    freeze: Annotated[tuple[Text, ...], _LIST] = key(
        (), "Names or patterns of parameters that are not trained: no states, no gradients, no writes."
    )
    dataset: DatasetSection
    optimizer: OptimizerSection = OptimizerSection()
    lr_scheduler: LrSchedulerSection = LrSchedulerSection(warmup_ratio=0.03)
    train: TrainSection = TrainSection(epochs=1)
    precision: PrecisionSection = PrecisionSection()
    offload: OffloadSection = OffloadSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()
    logging: LoggingSection = LoggingSection()

    def settings(self) -> dict[str, Any]:
        """Returns every key, dotted, with its value as JSON has it. A list of sections is one value, and so are patterns."""
        return dict(_flat(self, self.model_dump(mode="json"), ""))

    def offload_directories(self, environment: Mapping[str, str]) -> tuple[Path, ...]:
        """Tells where the store goes. Raises UsageError if a folder is a file or its home directory is unknown."""
        if self.offload.dir:
            return tuple(folder(name, key="offload.dir") for name in self.offload.dir)
        if named := environment.get("FUYOU_OFFLOAD_DIR"):
            return (folder(named, key="FUYOU_OFFLOAD_DIR"),)
        return (folder(Path(self.output_dir, "store"), key="output_dir"),)


def _flat(section: Section, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(inner := getattr(section, key, None), Section):
            yield from _flat(inner, value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# ---- described to editors, and as a page -----------------------------------------------------------------------------


def recipe_schema() -> dict[str, Any]:
    """Makes the schema, for editors."""
    schema = Recipe.model_json_schema()
    for section in (schema, *schema.get("$defs", {}).values()):
        for field in section.get("properties", {}).values():
            if isinstance(field.get("default"), dict) and "text" in field["default"]:  # a memory limit, as written
                field["default"] = field["default"]["text"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "fuyou recipe",
        "description": "A fine-tuning run, as `fuyou finetune` takes it.",
    }  # fmt: skip


# ---- the page --------------------------------------------------------------------------------------------------------


_HEAD = """# Keys of a recipe

Written by `fuyou schema --reference`. Sizes are written as `64GiB` or `1.5TB`, times as `8h` or `1h30m`. A key that is left out
has its default. Any key can be given on the command line: `fuyou plan recipe.yaml train.batch_size=32`.
"""
_TABLE = "| key | value | default | what it does |\n| --- | --- | --- | --- |"


def reference() -> str:
    """Returns the page: a section of keys after the other."""
    schema = recipe_schema()
    return "\n".join([_HEAD, *_section(schema, schema, "")]).rstrip("\n")


def _section(schema: dict[str, Any], section: dict[str, Any], path: str) -> Iterator[str]:
    """Yields the lines of a section's own keys, then those of the sections inside."""
    inside: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    rows = []
    for key, field in section["properties"].items():
        name = f"{path}.{key}" if path else key
        if (nested := _nested(schema, field)) is not None:
            inside.append((name, field, nested))
            if "$ref" in field:
                continue
        values = "section" if nested is not None and "array" not in _kinds(field) else _values(field)
        default = "required" if key in section.get("required", ()) else _default(field)
        rows.append(f"| `{key}` | {values} | {default} | {field['description']} |")
    if path:
        yield f"## {path}\n"
    yield from (_TABLE, *rows, "")
    for name, field, nested in inside:
        yield from _section(schema, nested, f"{name}[]" if "array" in _kinds(field) else name)


def _nested(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the section that a key holds, or each entry of its list."""
    for part in (field, field.get("items", {}), *field.get("anyOf", ())):
        if "$ref" in part:
            section: dict[str, Any] = schema["$defs"][part["$ref"].rpartition("/")[2]]
            return section
    return None


def _kinds(field: dict[str, Any]) -> list[str]:
    kinds = field.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _values(field: dict[str, Any]) -> str:
    """Says which values a key takes."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_values(part) for part in field["anyOf"]))
    if "enum" in field:
        return ", ".join(map(_code, field["enum"]))
    if "const" in field:
        return _code(field["const"])
    kinds = _kinds(field)
    if "pattern" in field:
        return "share, as `90%`" if "%" in field["pattern"] else "size" if "integer" in kinds else "time"
    if "array" in kinds:
        parts = field.get("prefixItems")
        if parts:
            return f"list of {len(parts)} numbers"
        each = _values(field.get("items", {}))
        return "list of " + {"text": "texts", "section": "entries"}.get(each, each)
    words = {"null": "`null`", "boolean": "`true`, `false`", "string": "text", "object": "mapping"}
    return next((words[kind] for kind in kinds if kind in words), None) or _number(field, kinds)


def _number(field: dict[str, Any], kinds: list[str]) -> str:
    name = "whole number" if "integer" in kinds else "number" if kinds else "section"
    # a bound of 2**24 and more says only that a number fits the machine
    low, above = field.get("minimum"), field.get("exclusiveMinimum")
    high, below = field.get("maximum"), field.get("exclusiveMaximum")
    bounds = [f"from {low:,}" if low is not None else "", f"above {above:,}" if above is not None else ""]
    bounds += [
        f"to {high:,}" if high is not None and high < 2**24 else "",
        f"below {below:,}" if below is not None and below < 2**24 else "",
    ]
    return " ".join(filter(None, (name, *bounds)))


def _default(field: dict[str, Any]) -> str:
    """Formats the default as a recipe has it."""
    value: Any = field.get("default", {} if "object" in _kinds(field) else None)
    is_size = isinstance(value, int) and "pattern" in field
    return _code(format_size(value) if is_size else value)


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"
