"""Holds what all recipes of the proofs have in common, and the folders that their runs write to."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .setting import RunFailed

SEED = 42
MARK = ".fuyou-proof"  # in every folder that these scripts may remove


def recipe_in(
    out: Path, model: Path, cache: Path, case: Any, length: int, *, entry: Mapping[str, object], commit_every: int | str | None,
    train: Mapping[str, object], **sections: Mapping[str, object],
) -> Path:  # fmt: skip
    """Writes the recipe of a case (its rows, steps and clipping) to `out`."""
    dataset = {"train": [dict(entry)], "max_seq_len": length, "packing": "concat", "loss_on": "all", "cache_dir": str(cache)}
    recipe = {
        "version": 1,
        "output_dir": str(out),
        "seed": SEED,
        "model": {"name_or_path": str(model)},
        "dataset": dataset,
        "optimizer": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.01},
        "lr_scheduler": {"name": "constant", "warmup_steps": 0},
        "train": {"max_steps": case.steps, "batch_size": case.rows, "clip_grad_norm": case.clip, **train},
        "checkpoint": {"resume": "never", "commit_every_steps": commit_every},
        **sections,
    }
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def fresh(folder: Path) -> Path:
    """Returns the folder, empty but for our mark. Raises RunFailed for one that these scripts did not make: --work may be
    anybody's."""
    mark = folder / MARK
    if folder.exists():
        if not mark.is_file():
            raise RunFailed(f"{folder} exists and was not made by these scripts: move it away, or give another --work")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    mark.touch()
    return folder
