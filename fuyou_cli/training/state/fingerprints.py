"""Computes digests of what a resumed run must agree on, and names the libraries that computed the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...checkpoint.files import own_code, read_json
from ...spec.model import ModelSpec

if TYPE_CHECKING:
    from ...recipe.schema import Recipe


def of(
    recipe: Recipe, model_dir: Path, model: ModelSpec, *, device: str, weights_mark: str, data: str, total_steps: int
) -> dict[str, str]:
    """Returns digests by name; `resume` has a phrase for each. `weights_mark` and `data` are digests already."""
    config = read_json(model_dir / "config.json")  # the raw file, because libraries add their defaults
    described: dict[str, Any] = {
        "model": [
            _shapes(recipe, model),
            {key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"},
        ],
        "attention": recipe.model.attn_implementation,
        "optimizer": {**recipe.optimizer.model_dump(mode="json"), "momentum": 0.9},  # a key of earlier builds: digests stay
        "schedule": [recipe.lr_scheduler.model_dump(mode="json"), _schedule_length(recipe, total_steps)],
        "clipping": recipe.train.clip_grad_norm,
        "shuffle": recipe.dataset.shuffle,
        "device": device,
    }
    if recipe.train.deterministic and device != "cpu":
        described["deterministic"] = True
    if recipe.train.compile:
        described["compile"] = True
    if recipe.dataset.weights:
        described["mixture"] = recipe.dataset.weights
    if recipe.adapter is not None:
        described["adapter"] = recipe.adapter.model_dump(mode="json")
    elif frozen := sorted({tensor.name for stage in model.stages for tensor in stage.tensors if tensor.frozen}):
        described["frozen"] = frozen
    if recipe.model.trust_remote_code and "auto_map" in config:
        described["code"] = own_code(model_dir)
    digests = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in described.items()
    }
    return {**digests, "weights": weights_mark, "data": data}


def _shapes(recipe: Recipe, model: ModelSpec) -> list[Any]:
    """Returns what a configuration's digest says of the stages. An adapter changes names and sizes, and has its own digest."""
    if recipe.adapter is not None:
        return [stage.name for stage in model.stages]
    return [[s.name, s.params, [[t.name, list(t.shape)] for t in s.tensors]] for s in model.stages]


def _schedule_length(recipe: Recipe, total_steps: int) -> int | None:
    """Returns the number of steps if a step's learning rate depends on it. A run with a constant rate may be made longer."""
    schedule = recipe.lr_scheduler
    return None if schedule.name == "constant" and not schedule.warmup_ratio else total_steps


def versions(recipe: Recipe) -> dict[str, str]:
    """Returns the versions of the libraries that compute a run's steps, by name."""
    names = ("torch", "transformers") if recipe.adapter is None else ("torch", "transformers", "peft")
    return {"fuyou": __version__, **{name: _installed(name) for name in names}}


@cache  # every commit asks, and finding it takes 10 ms
def _installed(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def change_of(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Says which versions differ from those in a manifest, and what that means. Empty if none differ."""
    changed = [f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if not changed:
        return ""
    return f"{'; '.join(changed)}: results from here on may differ in their last bits from those of an uninterrupted run"
