"""Makes the scripts' common arguments into a setting: where a script works, on what, and where it keeps its progress."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.units import parse_size

from .control_groups import LimitsUnavailable
from .materials import model_folder, text_file
from .verdicts import Progress, Row, conclude, holds, plain_parser

NO_PEERS = ["compares with nobody: --peers has nothing to add here"]
SHAPES = ("1m", "20m", "50m", "125m", "350m", "1.1b", "moe-tiny", "moe-120m", "moe-8", "moe")


class RunFailed(Exception):
    """Says that a run did not end well, although the proof needs it. The text has the end of its output."""


class Lost(Exception):
    """Says that a proof has failed: what is left of a run is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Says where a script works, and on what."""

    work: Path
    shape: str
    micro: int
    text: Path
    entry: dict[str, object]  # of the recipe's dataset.train
    text_name: str
    progress: Progress
    results: Path

    def model(self, shape: str | None = None) -> Path:
        return model_folder(self.work, shape or self.shape, self.text)

    def described(self) -> dict[str, object]:
        """Says for the results what, without where."""
        return {"shape": self.shape, "micro": self.micro, "text": self.text_name}

    def measure(self, key: str, once: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measures now, or takes what is kept from before, with this text only."""
        return self.progress.measure(f"{key}, {self.text_name}", once)

    def attempt(self, key: str, once: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Does the same for something that may raise Lost: then `failed` says what was lost."""

        def unless_lost() -> dict[str, Any]:
            try:
                return once()
            except Lost as error:
                return {"failed": str(error)}

        return self.measure(key, unless_lost)

    def in_parts(
        self, what: str, total: int, at_once: int, seed: int, some: Callable[[int, int], Any], zero: Any, longest: str = ""
    ) -> dict[str, Any]:
        """Does `total` of something, some at a time with a seed each, and keeps every part. Returns the sums of the parts'
        values (dataclasses; `zero` is that of no part), the largest of `longest`, and `failed` if a part has lost something."""
        summed: dict[str, Any] = asdict(zero)
        for number, begin in enumerate(range(0, total, at_once)):
            count, own = min(at_once, total - begin), 1000 * seed + number
            result = self.attempt(f"{what}, {count} of them, seed {own}", partial(_as_values, some, count, own))
            if result.get("failed"):
                return {**summed, "failed": result["failed"]}
            most = max(summed.get(longest, 0), result.get(longest, 0))
            summed = {name: most if name == longest else value + result[name] for name, value in summed.items()}
        return summed

    def conclude(self, name: str, rows: Sequence[Row], settings: dict[str, object], notes: Sequence[str] = ()) -> int:
        return conclude(name, rows, results=self.results, settings=settings, notes=notes)


def _as_values(some: Callable[[int, int], Any], count: int, seed: int) -> dict[str, Any]:
    return asdict(some(count, seed))


def lost_row(what: str, asked: str, result: dict[str, Any]) -> Row:
    """Makes the line of something that has `failed`."""
    return holds(what, asked, "lost", False, note=str(result["failed"])[:2000], values=result)


def parser(description: str) -> argparse.ArgumentParser:
    made = plain_parser(description)
    made.add_argument("--work", type=Path, help="folder for models, stores, progress (1.1b: 40 GB; default: temporary)")
    made.add_argument("--shape", choices=SHAPES, default="1.1b", help="of the model; smaller ones try the script")
    made.add_argument("--micro", type=int, default=4, help="rows computed at once where a step has 16")
    made.add_argument("--data", type=Path, help="text to train on, e.g. GSM8K's train.jsonl (default: made here)")
    made.add_argument("--peers", type=Path, help="folder of the reference loops (ds_train.py ...)")
    made.add_argument("--state", type=Path, help="progress file; a rerun skips what is in it (default: in --work)")
    return made


def run_script(options: argparse.Namespace, prove: Callable[[Setting, argparse.Namespace], int]) -> int:
    """Calls `prove(setting, options)` with everything set up. Errors for people end the script with their message."""
    try:
        with _setting(options) as setting:
            return prove(setting, options)
    except (FuyouError, RunFailed, LimitsUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept with --work or --state", file=sys.stderr)
        return 130


@contextmanager
def _setting(options: argparse.Namespace) -> Iterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="fuyou-proof-") as scratch:
        work = (options.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        state = options.state or work / f"{Path(sys.argv[0]).stem}.jsonl"
        text, entry, name = text_file(work, options.data)
        yield Setting(
            work=work,
            shape=options.shape,
            micro=options.micro,
            text=text,
            entry=entry,
            text_name=name,
            progress=Progress(state),
            results=options.results,
        )


def spread_evenly(draw: random.Random, count: int, *columns: Sequence[Any]) -> list[list[Any]]:
    """Draws `count` values of each column in random order, each about equally often."""
    found = [[values[place % len(values)] for place in range(count)] for values in columns]
    for values in found:
        draw.shuffle(values)
    return found


def size(text: str) -> int:
    """Reads a size for argparse."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# ---- recipes and folders of runs -------------------------------------------------------------------------------------


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
