#!/usr/bin/env python3
"""Counts the files that one `fuyou finetune` passes through before it computes, and how often a lower layer calls a higher one.

    python scripts/count_calls.py [--checkout DIR] [--climbs]
    needs no GPU; under a minute. The checkout's C extension must be built.

A tiny model is trained for three steps on the CPU under `sys.setprofile`, so what is counted is what ran, not what the source
may call. A file counts once a function of it has run: importing it alone does not count. A *climb* is a pair of functions of
which the first, in a lower layer, has called the second, in a higher one (a callback): those that end in cli/ are messages and
progress. Layers are those of the checkout's tests/unit/test_tidy.py. Compute begins with the first `Executor.step`. Only the
main thread is counted.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
COMPUTE = "Executor.step"
PACKAGE = "fuyou_cli"
Function = tuple[str, str]  # file below the package, qualified name


def layers(checkout: Path) -> dict[str, int]:
    """Returns the number of each folder's layer, 0 the lowest."""
    tree = ast.parse((checkout / "tests" / "unit" / "test_tidy.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LAYERS":
            return dict(ast.literal_eval(node.value))
    raise SystemExit("tests/unit/test_tidy.py of the checkout has no LAYERS")


class Profile:
    """Sees every call of the main thread, as `sys.setprofile` takes it."""

    def __init__(self, package: Path, layer_of: dict[str, int]) -> None:
        self._prefix, self._layer_of = f"{package}{os.sep}", layer_of
        self._known: dict[CodeType, Function | None] = {}
        self.files: dict[str, int] = {}  # calls of functions of each file
        self.climbs: Counter[tuple[Function, Function]] = Counter()
        self.before: dict[str, object] = {}  # what was counted when compute began

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or (function := self._function(frame.f_code)) is None:
            return
        if function[1] == COMPUTE and not self.before:
            self.before = self.counted()
        self.files[function[0]] = self.files.get(function[0], 0) + 1
        outer = frame.f_back
        while outer is not None and (caller := self._function(outer.f_code)) is None:
            outer = outer.f_back
        if outer is not None and caller is not None and self._layer(caller) < self._layer(function):
            self.climbs[caller, function] += 1

    def _function(self, code: CodeType) -> Function | None:
        """Returns None for other code, and for bodies of modules and classes, which run when they are imported."""
        if code not in self._known:
            ours = code.co_filename.startswith(self._prefix) and code.co_flags & inspect.CO_OPTIMIZED
            self._known[code] = (code.co_filename.removeprefix(self._prefix), code.co_qualname) if ours else None
        return self._known[code]

    def _layer(self, function: Function) -> int:
        return self._layer_of.get(Path(function[0]).parts[0], 0)

    def counted(self) -> dict[str, object]:
        return {
            "files": len(self.files), "calls": sum(self.files.values()),
            "climbs": len(self.climbs), "climbing calls": self.climbs.total(),
            "climbs to cli": sum(callee[0].startswith("cli/") for _, callee in self.climbs),
        }  # fmt: skip


def profiled(checkout: Path, recipe: Path, target: Path) -> None:
    """Runs the recipe in this process and writes what was counted."""
    from fuyou_cli.cli.app import main

    profile = Profile(checkout / PACKAGE, layers(checkout))
    sys.setprofile(profile)
    try:
        main(["finetune", str(recipe), "--assume-rates"])
    finally:
        sys.setprofile(None)
        climbs = [[*map(":".join, pair), count] for pair, count in profile.climbs.most_common()]
        target.write_text(json.dumps({"before": profile.before, "all": profile.counted(), "climbs": climbs}))


def recipe_in(folder: Path) -> Path:
    """Makes a model of a million parameters, a text and a recipe whose states rest on the drive."""
    sys.path.append(str(ROOT))  # works from a checkout that is not installed; the child's path names the checkout it counts
    from proof.materials import model_folder, own_text

    text = folder / "text.jsonl"
    text.write_text(own_text(48), encoding="utf-8")
    content = {
        "output_dir": str(folder / "out"),
        "model": {"name_or_path": str(model_folder(folder, "1m", text))},
        "dataset": {
            "train": [{"path": str(text), "format": "prompt_completion"}], "max_seq_len": 32, "overlong": "split",
            "cache_dir": str(folder / "rows"),
        },
        "train": {"max_steps": 3, "batch_size": 4, "micro_batch_size": 2, "threads": 1},
        "offload": {
            "device": "cpu", "max_memory": {"cpu": "4GiB"}, "weights": "ssd", "optimizer_states": "ssd",
            "dir": str(folder / "store"), "io": {"backend": "threads"},
        },
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return path


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--checkout", type=Path, default=ROOT, help="whose package runs (default: this one)")
    options.add_argument("--climbs", action="store_true", help="also list the climbs of the whole run")
    options.add_argument("--profiled", nargs=2, type=Path, help=argparse.SUPPRESS)  # recipe, result
    asked = options.parse_args()
    checkout = asked.checkout.resolve()
    if asked.profiled:
        profiled(checkout, *asked.profiled)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder, result = Path(scratch), Path(scratch) / "counted.json"
        recipe = recipe_in(folder)
        environment = os.environ | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--checkout", str(checkout)]
        ran = subprocess.run(
            [*command, "--profiled", str(recipe), str(result)], env=environment, capture_output=True, text=True, check=False
        )
        if ran.returncode or not result.exists():
            raise SystemExit(f"the run failed with code {ran.returncode}:\n{ran.stderr}")
        counted = json.loads(result.read_text())
    for when, key in (("before compute", "before"), ("whole run", "all")):
        print(f"{when}: " + ", ".join(f"{number:,} {name}" for name, number in counted[key].items()))
    for caller, callee, count in counted["climbs"] if asked.climbs else ():
        print(f"  {count:6,}  {caller} -> {callee}")


if __name__ == "__main__":
    main()
