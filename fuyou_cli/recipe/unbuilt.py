"""Keys of the schema whose feature does not exist yet, in one table: building a feature deletes its row.

Such a key is an error that names it. It is never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..core.typed import show_value
from .marks import Path
from .view import Finding, Written


@dataclass(frozen=True, kw_only=True, slots=True)
class Unbuilt:
    """`path` with a value for which `asks` holds needs `feature`; `instead` says what works today."""

    path: str  # dotted; * is each entry of a list
    asks: Callable[[Any], bool]
    feature: str
    instead: str


def _set(value: Any) -> bool:
    return value is not None


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in values


def _any_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and any(item in values for item in value if isinstance(item, str))


def _other_than(*values: object) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in values


def _a_part(value: Any) -> bool:
    """A slice of a split, or a name that is no word: data files are told apart by the words in their names."""
    return isinstance(value, str) and not value.isalpha()


UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt(path="adapter", asks=_set, feature="LoRA and other adapters", instead="leave it null: full fine-tuning"),
    Unbuilt(path="freeze", asks=_other_than([]), feature="frozen parameters", instead="leave it out: everything is trained"),
    Unbuilt(path="eval", asks=_set, feature="evaluation during training", instead="leave the section out"),
    Unbuilt(path="dataset.eval", asks=_set, feature="evaluation during training", instead="leave it null"),
    Unbuilt(
        path="dataset.eval_fraction",
        asks=_other_than(0),
        feature="evaluation during training",
        instead="leave it 0",
    ),
    Unbuilt(path="dataset.train.*.name", asks=_set, feature="hub data sets with subsets", instead="use a local file"),
    Unbuilt(
        path="dataset.train.*.split",
        asks=_a_part,
        feature="a slice of a split",
        instead="write the split's name, and max_samples for a part of it",
    ),
    Unbuilt(
        path="dataset.train.*.weight",
        asks=_other_than(1),
        feature="weighted mixing of data sets",
        instead="leave it 1: entries are taken whole, one after the other",
    ),
    Unbuilt(
        path="dataset.train.*.format",
        asks=_one_of("sharegpt", "tokenized"),
        feature="this format",
        instead="use messages, alpaca, prompt_completion or text",
    ),
    Unbuilt(
        path="dataset.packing",
        asks=_one_of("isolated"),
        feature="packing that keeps documents apart",
        instead="use concat or false",
    ),
    Unbuilt(path="optimizer.name", asks=_other_than("adamw"), feature="this optimizer", instead="use adamw"),
    Unbuilt(
        path="optimizer.state_dtype",
        asks=_one_of("bfloat16", "int8"),
        feature="smaller optimizer states",
        instead="use float32",
    ),
    Unbuilt(path="train.compile", asks=_other_than(False), feature="compiled stages", instead="leave it false"),
    Unbuilt(path="train.early_stopping", asks=_set, feature="early stopping", instead="leave it null"),
    Unbuilt(
        path="precision.compute",
        asks=_one_of("float16"),
        feature="fp16 with loss scaling",
        instead="use bfloat16 or float32",
    ),
    Unbuilt(path="precision.master", asks=_one_of("bfloat16"), feature="a bf16 master copy", instead="leave it float32"),
    Unbuilt(
        path="precision.allow_tf32",
        asks=_other_than(False),
        feature="float32 products in TF32",
        instead="leave it false: float32 is computed in float32",
    ),
    *(
        Unbuilt(
            path=f"offload.{kind}",
            asks=_one_of("gpu"),
            feature=f"{kind.replace('_', ' ')} that rest on the GPU",
            instead="use auto, cpu or ssd",
        )
        for kind in ("gradients", "optimizer_states", "boundaries")
    ),
    Unbuilt(
        path="offload.activations",
        asks=_one_of("keep"),
        feature="activations kept on the GPU",
        instead="use auto, swap or recompute",
    ),
    Unbuilt(path="export.push_to_hub", asks=_set, feature="uploading", instead="upload the exported folder yourself"),
    Unbuilt(path="export.private", asks=_other_than(True), feature="uploading", instead="leave it out"),
    Unbuilt(
        path="logging.backends",
        asks=_any_of("tensorboard", "wandb"),
        feature="this logger",
        instead="use console and jsonl",
    ),
    Unbuilt(path="logging.wandb.project", asks=_set, feature="the wandb logger", instead="leave it null"),
    Unbuilt(path="logging.wandb.mode", asks=_other_than("online"), feature="the wandb logger", instead="leave it out"),
    Unbuilt(path="logging.wandb.name", asks=_set, feature="the wandb logger", instead="leave it null"),
)


def unbuilt_keys(written: Written) -> Iterator[Finding]:
    for row in UNBUILT:
        for path, value in written.matches(row.path):
            if row.asks(value):
                key = row.path.replace(".*", "")
                shown = key if isinstance(value, (list, dict)) else f"{key}: {show_value(value)}"
                yield Finding(
                    path=path, code="not-built", message=f"`{shown}` is not built yet: {row.feature}", help=row.instead
                )


def is_built(path: Path, value: object) -> bool:
    """Whether the key at `path` may have `value` today."""
    dotted = ".".join("*" if isinstance(part, int) else part for part in path)
    return not any(row.path == dotted and row.asks(value) for row in UNBUILT)
