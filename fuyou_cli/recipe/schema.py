"""Defines `Recipe`: the whole schema, its types, ranges and defaults.

Rules between keys are in `rules`; keys whose feature does not exist yet are in `unbuilt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from fuyou_cli.core.paths import folder

from .fields import (
    AutoBlock,
    AutoCount,
    AutoDepth,
    AutoPositive,
    AutoShare,
    AutoThreads,
    Folders,
    Limit,
    MemoryLimit,
    ModuleNames,
    Section,
    Size,
    Time,
    few,
    not_empty,
    of_patterns,
    without_null,
)

Text = Annotated[str, Field(min_length=1), AfterValidator(without_null)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
AnyTier = Literal["auto", "gpu", "cpu", "ssd"]

_AUTO = MemoryLimit(text="auto")
_FEW = Field(strict=False, json_schema_extra={"minItems": 1, "maxItems": 16})  # `not_empty` and `few`, for editors


class ModelSection(Section):
    name_or_path: Text
    revision: Text | None = None
    attn_implementation: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    kernels: Literal["torch", "liger"] = "torch"  # of norms and gated products
    trust_remote_code: bool = False
    quantize: Literal["none", "nf4", "int8", "mxfp4", "fp8"] = "none"  # how frozen weights of linear layers in blocks rest
    double_quant: bool = False  # of nf4: the maxima of its blocks in eight bits

    @property
    def quantisation(self) -> Literal["nf4", "nf4_double", "int8", "mxfp4", "fp8"] | None:
        """Returns the format in which weights rest; None: in the compute dtype."""
        if self.quantize == "none":
            return None
        return "nf4_double" if self.double_quant and self.quantize == "nf4" else self.quantize


class TokenizerSection(Section):
    name_or_path: Text | None = None
    chat_template: Text | None = None
    pad_token: Text | None = None


class DatasetEntry(Section):
    path: Text  # a file, folder or glob, or a data set of the hub: owner/name
    name: Text | None = None  # its subset
    revision: Text | None = None
    split: Text = "train"  # or a part of it: train[:10%]
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized", "input_output"] = (
        "auto"  # auto: the columns of the first row decide
    )
    columns: dict[str, str] = Field(default_factory=dict)
    weight: PositiveFloat | None = None  # share of the rows among all entries' weights; null: entries are used completely
    max_samples: Positive | None = None


class DatasetSection(Section):
    train: Annotated[tuple[DatasetEntry, ...], Field(strict=False), AfterValidator(not_empty)]
    eval: Annotated[tuple[DatasetEntry, ...], Field(strict=False)] = ()  # each is a set with a loss of its own
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the samples of train: held back, a set of its own
    max_seq_len: Annotated[int, Field(ge=2, le=2**24)] = 4096
    overlong: Literal["truncate", "drop", "split", "error"] = "truncate"
    packing: Literal[False, "concat", "isolated"] = False
    loss_on: Literal["auto", "all", "assistant", "last_assistant", "completion"] = "auto"
    shuffle: bool = True
    streaming: bool = False  # tokenised while the run trains
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 4
    cache_dir: Text | None = None

    @property
    def weights(self) -> tuple[float, ...]:
        """Returns the weights of a mixture; nothing if entries are used completely, one after the other."""
        weights = tuple(entry.weight for entry in self.train if entry.weight is not None)
        return weights if len(weights) > 1 else ()


class AdapterSection(Section):
    """Asks for LoRA. Names and meanings are peft's."""

    type: Literal["lora"] = "lora"
    start: Annotated[Text | None, Field(alias="from", exclude_if=lambda value: value is None)] = (
        None  # a saved adapter's folder
    )
    r: Positive = 8
    lora_alpha: Positive = 8
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: ModuleNames = "all-linear"  # or names (of modules or ends of them), or one regular expression
    use_rslora: bool = False  # scaled by lora_alpha / sqrt(r), not lora_alpha / r
    use_dora: bool = False
    experts: Annotated[bool, Field(exclude_if=lambda value: not value)] = False  # true: those of a mixture have LoRA too
    modules_to_save: Annotated[tuple[Text, ...], Field(strict=False), AfterValidator(of_patterns)] = ()  # trained in full
    rank_pattern: Annotated[dict[str, Positive], AfterValidator(of_patterns)] = Field(default_factory=dict)
    alpha_pattern: Annotated[dict[str, Positive], AfterValidator(of_patterns)] = Field(default_factory=dict)


class OptimizerSection(Section):
    name: Literal["adamw", "lion", "sgd"] = "adamw"
    lr: PositiveFloat = 1e-5
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)] = (
        0.9,
        0.95,
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of sgd
    eps: PositiveFloat = 1e-8  # of adamw
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        if data.get("name") == "lion" and "betas" not in data:
            data["betas"] = [0.9, 0.99]  # its authors'
        return data


class LrSchedulerSection(Section):
    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_ratio: Share | None = None  # 0.03 unless one of the two is written
    warmup_steps: Count | None = None
    min_lr_ratio: Share = 0.1

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        if "warmup_ratio" not in data and data.get("warmup_steps") is None:
            data["warmup_ratio"] = 0.03
        return data


class EarlyStoppingSection(Section):
    patience: Positive = 3  # evaluations in a row that are no better than the best before
    min_delta: Annotated[float, Field(ge=0)] = 0.0  # by which a loss has to be lower to be better for `patience`


class TrainSection(Section):
    epochs: Positive | None = None  # 1 unless it or max_steps is written
    max_steps: Positive | None = None
    max_time: Time | None = None  # seconds of one process
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 64
    micro_batch_size: AutoPositive = "auto"
    sweep_tokens: AutoPositive = "auto"  # most tokens of a pass forward and back; results are the same
    head_chunk_tokens: AutoCount = "auto"  # 0: a whole micro-batch at once
    head_chunk_vocab: AutoCount = "auto"  # rows of embedding and head; 0: not cut along the vocabulary
    threads: AutoThreads = "auto"
    clip_grad_norm: PositiveFloat | None = 1.0
    router_aux_loss: PositiveFloat | None = None  # coefficient of the loss that balances a mixture's experts; null: without
    skip_nonfinite: Count = 0  # steps in a row
    compile: bool = False
    deterministic: bool = False  # true: a GPU repeats a run bit for bit, but slower; the CPU always does
    early_stopping: EarlyStoppingSection | None = None  # by the loss of the first set of dataset.eval, or the rows held back

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        if "epochs" not in data and data.get("max_steps") is None:
            data["epochs"] = 1
        return data


class PrecisionSection(Section):
    compute: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    master: Literal["float32", "bfloat16"] = "float32"
    grad_accum: Literal["float32", "bfloat16"] = "float32"
    allow_tf32: bool = False


class MaxMemory(Section):
    gpu: Limit = _AUTO
    cpu: Limit = _AUTO
    ssd: Limit = _AUTO


class IoSection(Section):
    backend: Literal["auto", "io_uring", "threads"] = "auto"
    queue_depth: AutoDepth = "auto"
    block_size: AutoBlock = "auto"


class OffloadSection(Section):
    strategy: Literal["auto", "none", "manual"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dir: Folders = ()  # empty: see directories()
    max_memory: MaxMemory = MaxMemory()
    weights: AnyTier = "auto"
    gradients: AnyTier = "auto"
    optimizer_states: AnyTier = "auto"
    activations: Literal["auto", "keep", "swap", "recompute"] = "auto"
    boundaries: AnyTier = "auto"
    lookahead: AutoPositive = "auto"
    defer_updates: AutoShare = "auto"
    norm_first: Literal["auto", "always", "never"] = "auto"  # a backward more for clipping, beside whose second updates run
    io: IoSection = IoSection()
    verify_reads: bool = True  # compares what training reads with what was written
    wear: Literal["spare", "balanced", "ignore"] = "spare"  # whether small gains in speed may cost writes
    ssd_write_limit: Size | None = None
    expandable_segments: bool = True  # for torch's allocator on a GPU, unless PYTORCH_ALLOC_CONF is set
    measure: bool = True  # measures a new machine and new layers before planning


class CheckpointSection(Section):
    # auto: as often as it costs little; null: when a run begins, stops and ends
    commit_every_steps: AutoPositive | None = "auto"
    resume: Text = "auto"  # auto | never | a path


class SamplesSection(Section):
    prompts: Annotated[tuple[Text, ...], _FEW, AfterValidator(not_empty), AfterValidator(few)]
    max_new_tokens: Positive = 64  # after each; so many passes over the weights for all prompts together
    chat: bool = False  # a prompt is a user's message, put into the chat template


class EvalSection(Section):
    every_steps: Positive | None = None  # null: where the run starts and ends
    at_start: bool = True
    keep_best: bool = False  # the weights of the lowest loss so far of the first set are kept in output_dir/best
    samples: SamplesSection | None = None  # what the model writes after fixed prompts, at each evaluation


class ExportSection(Section):
    at_end: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_shard_size: Size = 5_000_000_000
    push_to_hub: Text | None = None
    private: bool = True


class WandbSection(Section):
    project: Text | None = None
    name: Text | None = None
    mode: Literal["offline", "online"] = "offline"  # offline: upload later with `wandb sync`


class MlflowSection(Section):
    tracking_uri: Text | None = None  # null: MLFLOW_TRACKING_URI, else a file in output_dir
    experiment: Text | None = None
    name: Text | None = None


class TrackioSection(Section):
    project: Text | None = None
    name: Text | None = None
    space_id: Text | None = None  # null: TRACKIO_SPACE_ID, else this machine


LogBackend = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"]


class LoggingSection(Section):
    every_steps: Positive = 1  # on the console and for other loggers; the jsonl has every step
    backends: Annotated[tuple[LogBackend, ...], Field(strict=False)] = ("console", "jsonl")
    wandb: WandbSection = WandbSection()
    mlflow: MlflowSection = MlflowSection()
    trackio: TrackioSection = TrackioSection()


class Recipe(Section):
    """Describes the run that the user asks for. Only `output_dir`, `model.name_or_path` and `dataset.train` have no default."""

    version: Literal[1] = 1
    output_dir: Text
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    adapter: AdapterSection | None = None  # null: full fine-tuning
    freeze: Annotated[tuple[Text, ...], Field(strict=False)] = ()
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
