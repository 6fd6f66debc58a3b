"""Makes the places of the proofs' tiny runs: a model of a million parameters, recipes that differ by a few keys, and processes
with the shim in them.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from .both_sides import child_environment
from .materials import model_folder, own_text
from .nursery import Child, Nursery
from .shim import Trace, build, preloaded

STEPS = 60
_ROWS = 48
_MANIFEST_WRITTEN = ".manifest.new"  # before it is renamed
IN_RAM = {f"offload.{kind}": "cpu" for kind in ("weights", "optimizer_states", "gradients", "boundaries")}
UNCLIPPED = {"train.clip_grad_norm": None}
ANY_LENGTH = {"lr_scheduler.name": "constant", "lr_scheduler.warmup_steps": 0}  # a stopped run may be made longer
TWO_FOLDERS = {"offload.dir": ["{folder}/first", "{folder}/second"]}  # {folder}: the recipe's own
# Kinds of runs. An adapter is small: it rests in RAM with its states where a variant does not say otherwise, and commits write
# it. The model's weights are read from its own files, or, quantised, from the store.
_LORA = {"adapter.r": 4, "offload.optimizer_states": "auto", "offload.gradients": "auto", "checkpoint.commit_every_steps": 1}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": _LORA,
    "qlora": {**_LORA, "model.quantize": "nf4"},
    "int8": {"optimizer.state_dtype": "int8"},
    "moe": {},
    "moe-lora": {**_LORA, "adapter.experts": True},
}
_MIXTURES = ("moe", "moe-lora")  # they train another model
_ADAPTERS = "fuyou_cli.adapters"  # imports peft, which takes seconds and may not be installed


def ask_for_run(options: argparse.ArgumentParser, kinds: Collection[str] = RUNS) -> None:
    """Adds the argument that says which runs a proof disturbs or measures."""
    options.add_argument("--run", choices=[*kinds], default="full", help="what is trained, and how states and weights rest")


def named(text: str, run: str) -> str:
    """Returns a name that says which runs it is about, but for the usual ones."""
    return text if run == "full" else f"{text}-{run}"


def _model_of(folder: Path, run: str, text: Path) -> Path:
    """Returns the model that runs of a kind train, made the first time."""
    return model_folder(folder, "moe-tiny" if run in _MIXTURES else "1m", text)


def with_keys(content: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe with dotted keys replaced."""
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = content
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return content


class Place:
    """Holds a folder with a tiny model and a recipe, and a nursery whose children have the shim in them."""

    def __init__(
        self, folder: Path, nursery: Nursery, environment: Mapping[str, str], model: Path, text: Path, run: str = "full"
    ) -> None:
        self.folder, self.nursery, self.model, self.text = folder, nursery, model, text
        self.environment = dict(environment)
        self.run = RUNS[run]
        self.traces = 0

    def of(self, run: str) -> Place:
        """Returns the same place with runs of another kind."""
        model = _model_of(self.folder, run, self.text)
        return Place(self.folder, self.nursery, self.environment, model, self.text, run)

    @property
    def is_adapter(self) -> bool:
        """Tells whether its runs train an adapter alone."""
        return "adapter.r" in self.run

    def recipe(self, name: str, changes: Mapping[str, Any], *, steps: int = STEPS) -> Path:
        """Writes the recipe to a folder of its own, which `{folder}` in a list of folders stands for."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "output_dir": str(folder / "out"),
            "model": {"name_or_path": str(self.model)},
            "dataset": {
                "train": [{"path": str(self.text), "format": "prompt_completion"}], "max_seq_len": 32, "overlong": "split",
                "cache_dir": str(self.folder / "rows"),
            },
            "optimizer": {"lr": 1e-3},
            "train": {"max_steps": steps, "batch_size": 4, "micro_batch_size": 2, "threads": 1, "clip_grad_norm": 0.5},
            "offload": {
                "device": "cpu", "max_memory": {"cpu": "4GiB"}, "weights": "ssd", "optimizer_states": "ssd",
                "gradients": "ssd", "boundaries": "ssd", "io": {"backend": "threads"}, "measure": False,
            },
            "export": {"dtype": "float32"},
        }  # fmt: skip
        here = {
            key: [text.replace("{folder}", str(folder)) for text in value] if isinstance(value, list) else value
            for key, value in {**self.run, **changes}.items()
        }
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(with_keys(content, here)), encoding="utf-8")
        return path

    def trace(self, root: Path) -> Trace:
        self.traces += 1
        return Trace(self.folder / f"trace{self.traces % 4}", root)

    @property
    def manifests(self) -> Path:
        """Returns all that the last run wrote into manifests."""
        return self.folder / "manifests"

    def begin(self, *words: str | Path, trace: Trace | None = None, fault: str = "", kept: Path | None = None) -> Child:
        seen: dict[str, str] = {}
        if trace is not None:
            of = "" if kept is not None else _MANIFEST_WRITTEN
            seen = trace.environment(fault=fault, kept=kept or self.manifests, kept_of=of)
        return self.nursery.begin(
            [*map(str, words)], folder=self.folder, environment={**self.environment, **seen},
            package=_ADAPTERS if self.is_adapter else "",
        )  # fmt: skip


@contextmanager
def placed(folder: Path, *, under: Path | None = None, run: str = "full") -> Iterator[Place]:
    """Makes a place where tiny runs of a kind are killed. They tell what they leave open below `under`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.jsonl"
    if not text.exists():
        text.write_text(own_text(_ROWS), encoding="utf-8")
    model = _model_of(folder, run, text)
    environment = {**child_environment(), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    library = build(folder)
    with Nursery(folder=folder, environment=preloaded(environment, library), under=under, models=[(model, 2, 32)]) as nursery:
        yield Place(folder, nursery, environment, model, text, run)
