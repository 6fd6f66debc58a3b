"""Compares a recipe with what a saved run goes by: which keys have changed, from what to what, and which of them may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.json_files import one_line
from ...recipe.diagnostics import spelt
from ...recipe.load import as_override
from ...recipe.rules import REMOVED_KEYS
from .stored import Change

if TYPE_CHECKING:
    from ...recipe.schema import Recipe

# Keys that say nothing of a run's steps: where things are, and how fast they go. A run may change them without a word.
_OF_A_PLACE = ("version", "output_dir", "offload", "checkpoint.resume", "dataset.cache_dir", "dataset.num_workers")
# Keys that a run may go on with at another value; what is under the first of them changes its steps, so it has to be accepted.
RATES = ("optimizer.lr", "lr_scheduler", "train.max_steps", "train.epochs")
_FREE = (
    "train.max_time",
    "train.skip_nonfinite",
    "train.early_stopping",
    "eval",
    "dataset.eval",
    "checkpoint",
    "export",
    "logging",
)
# The keys that each fingerprint is of, and why a run keeps them.
_KEYS = {
    "optimizer": ("optimizer",),
    "schedule": RATES[1:],
    "clipping": ("train.clip_grad_norm",),
    "attention": ("model.attn_implementation",),
    "kernels": ("model.kernels",),
    "compile": ("train.compile",),
    "deterministic": ("train.deterministic",),
    "shuffle": ("dataset.shuffle",),
    "mixture": ("dataset.train",),
    "frozen": ("freeze",),
    "adapter": ("adapter",),
    "data": ("dataset", "tokenizer"),
    "device": ("offload.device",),
    "model": ("model.name_or_path", "model.revision"),
    "weights": ("model.name_or_path", "model.revision"),
}
_WHY = {
    "optimizer": "momentum and variance were made with it",
    "clipping": "all of a run's gradients are clipped alike",
    "shuffle": "the rows that are left depend on it",
    "mixture": "the rows that are left depend on it",
    "frozen": "only what is trained has states",
    "adapter": "what is saved has its shapes and scale",
    "model": "what is saved was trained from it",
    "weights": "what is saved was trained from it",
    "code": "what is saved was trained with it",
    **dict.fromkeys(("attention", "kernels", "compile", "deterministic", "device"), "it decides the bits of every step"),
}
_BY_CONTENT = ("mixture", "data", "device", "model", "weights")  # other keys may name the same
_MOST = 8  # keys that a message names


def settings_of(recipe: Recipe, *, device: str) -> dict[str, Any]:
    """Returns the keys of a recipe that a run goes by, each with its value as JSON has it. `device`: what `auto` stands for."""
    kept = {key: value for key, value in recipe.settings().items() if not _is_below(key, _OF_A_PLACE)}
    return {**kept, "offload.device": device}


def changed_keys(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, *, step: int) -> list[Change]:
    """Returns every key whose value is another one than `before`; none if what was is not known."""
    if before is None or now is None:
        return []
    kept = {key: value for key, value in before.items() if key not in REMOVED_KEYS}
    old, new = dict(_apart(kept)), dict(_apart(now))
    names = dict.fromkeys((*new, *old))
    pairs = [(name, old.get(name), new.get(name)) for name in names]
    return [Change(step=step, key=name, before=was, now=is_now) for name, was, is_now in pairs if was != is_now]


def _apart(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of each section of a list as keys of their own: dataset.train[0].path."""
    for key, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            for number, one in enumerate(value):
                yield from _apart({f"{key}[{number}].{name}": inner for name, inner in one.items()})
        else:
            yield key, value


def of_fingerprint(name: str, changes: Sequence[Change]) -> list[Change]:
    """Returns the changes of keys that a fingerprint is of."""
    return [one for one in changes if _is_below(one.key, _KEYS.get(name, ())) and not is_free(one)]


def may_change(name: str, changes: Sequence[Change]) -> bool:
    """Tells whether a run may go on with another fingerprint of this name, if `changes` are of it."""
    return name == "schedule" or (bool(changes) and all(map(is_rate, changes)))


def is_rate(change: Change) -> bool:
    """Tells whether a run goes on with another value of a key where that is accepted."""
    return _is_below(change.key, RATES)


def is_free(change: Change) -> bool:
    """Tells whether a run goes on with another value of a key unasked: none of its steps changes."""
    return _is_below(change.key, _FREE)


def refused_later(changes: Sequence[Change], told: Sequence[str]) -> list[Change]:
    """Returns the changes, beside the keys that are `told` already, that would be refused once the data is read."""
    names = [name for name in _KEYS if name not in _BY_CONTENT]
    found = {one.key: one for name in names for one in of_fingerprint(name, changes)}
    return [one for key, one in found.items() if key not in told]


def recorded(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Returns the changes that a run goes on with and remembers."""
    return tuple(one for one in changes if _is_below(one.key, (*RATES, *_FREE)))


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in names)


# ---- in words ----------------------------------------------------------------------------------------------------------


def in_words(changes: Sequence[Change]) -> str:
    """Says what each key was and is."""
    told = [f"{one_line(one.key)} was {spelt(one.before)}, is {spelt(one.now)}" for one in changes[:_MOST]]
    return "; ".join([*told, *([f"and {len(changes) - _MOST} keys more"] if len(changes) > _MOST else [])])


def put_back(changes: Sequence[Change]) -> str:
    """Returns what to write for a recipe to say again what it said."""
    return " ".join(as_override(one.key, one.before) for one in changes[:_MOST])


def why_kept(names: Sequence[str]) -> str:
    """Says why a run keeps what fingerprints of these names are of."""
    return "; ".join(dict.fromkeys(_WHY[name] for name in names if name in _WHY))
