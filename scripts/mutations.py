#!/usr/bin/env python3
"""Breaks the program in sixty places, one after the other, and runs the tests that ought to notice.

    python scripts/mutations.py [--checkout DIR] [--room ROOM] [--out FILE]
    no GPU, no drives; about half an hour on two cores

Each mutation replaces a text of the package that occurs once, in a copy of the checkout, and runs the test files named with it
until one fails. A text that is gone is reported: the code was written anew, and the mutation has to be. A test file that is
gone is replaced by its folder. The script ends with 1 if a mutation survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("fuyou_cli", "tests", "scripts", "recipes", "native", "pyproject.toml", "README.md", "ARCHITECTURE.md")
LIMIT = 900  # seconds of the tests of one mutation
HANGS = 90  # seconds of one test: mutated code may wait for ever


class Mutation(NamedTuple):
    old: str
    new: str
    tests: str  # files below tests/, with spaces between


PLANNER = (
    Mutation(
        "whole = 3 * stage.forward_flops - stage.frozen_flops",
        "whole = 4 * stage.forward_flops - stage.frozen_flops",
        "planner/test_costs.py planner/test_compared.py",
    ),
    Mutation("return max(tile, rows + tile // 2) / rows if rows else 1.0", "return 1.0", "planner/test_costs.py"),
    Mutation("return turn + 1 if self.is_named(generation) else turn", "return turn + 1", "planner/test_commit_interval.py"),
    Mutation(
        "return generation == self.base or self.is_written(generation)",
        "return self.is_written(generation)",
        "planner/test_commit_interval.py",
    ),
    Mutation(
        "if self._reached[generation] < self._owners:",
        "if self._reached[generation] <= self._owners:",
        "planner/test_simulated.py planner/test_commit_interval.py engine/test_device_copies.py e2e/test_saved_state.py",
    ),
    Mutation(
        "slots = min(lookahead + 2, on_ssd + 1) if on_ssd else 0",
        "slots = 1 if on_ssd else 0",
        "planner/test_place.py planner/test_simulated.py",
    ),
    Mutation(
        "if not kept.sealed or kept.write is not None:",
        "if not kept.sealed:",
        "engine/test_device_copies.py engine/test_equal_bits.py",
    ),
    Mutation(
        "boundaries = [shared.boundary_size(index, kept) for",
        "boundaries = [shared.boundary_size(index, kept) // 2 for",
        "planner/test_place.py planner/test_memory.py",
    ),
    Mutation(
        "included = piece / (rated or self.numerics.tokens)",
        "included = 0 * piece / (rated or self.numerics.tokens)",
        "planner/test_costs.py",
    ),
    Mutation(
        "UPDATE_PRIORITY = 1 << 16",
        "UPDATE_PRIORITY = -1",
        "engine/test_prefetch.py engine/test_device_copies.py planner/test_simulated.py",
    ),
)
ENGINE = (
    Mutation(
        "if index not in self.touched:\n                self.flat[spec.offset : end].zero_()",
        "if False:\n                pass",
        "engine/test_squares.py",
    ),
    Mutation(
        "if index in self.touched:\n            add_in_pieces(target, gradient)",
        "if index in self.touched:\n            target.copy_(gradient)",
        "engine/test_squares.py engine/test_exact.py",
    ),
    Mutation(
        "return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]",
        "return nn.functional.pad(labels, (0, 1), value=0)[:, 1:]",
        "engine/test_vocabulary.py engine/test_exact.py",
    ),
    Mutation(
        "total.mul_(maximum.sub_(higher).exp_())",
        "total.mul_(maximum.sub_(higher))",
        "engine/test_cutting.py engine/test_vocabulary.py",
    ),
    Mutation(".masked_fill_((targets == IGNORED).unsqueeze(-1), 0.0)", "", "engine/test_cutting.py engine/test_vocabulary.py"),
    Mutation(
        "decay = weight_decay if tensor.decay else 0.0",
        "decay = weight_decay",
        "engine/test_exact.py engine/test_families_stages.py",
    ),
    Mutation(
        "gradient_scale=scalars.gradient_scale,",
        "gradient_scale=1.0,",
        "engine/test_exact.py engine/test_equal_bits.py engine/test_update_times.py",
    ),
    Mutation(
        "if not math.isfinite(value):\n            not_finite =",
        "if math.isnan(value):\n            not_finite =",
        "engine/test_squares.py",
    ),
    Mutation(
        "return Route.of(chosen, experts, self._routing.compared(key, chosen))",
        "return Route.of(chosen, experts)",
        "engine/test_routing.py",
    ),
    Mutation(
        "places = ((ids >= rows[0]) & (ids < rows[1])).nonzero().view(-1)",
        "places = ((ids >= rows[0]) & (ids <= rows[1])).nonzero().view(-1)",
        "engine/test_vocabulary.py engine/test_cutting.py",
    ),
)
DATA = (
    Mutation("return bool((mask[1:] & LABEL).any())", "return bool((mask & LABEL).any())", "data/test_batches.py"),
    Mutation("filled = 0\n                cut |= begun", "filled = 0\n                cut = False", "data/test_batches.py"),
    Mutation("mask[[0, *ends[:-1]]] = BEGINS", "mask[[*ends[:-1]]] = BEGINS", "data/test_batches.py"),
    Mutation(
        "order = sorted(range(len(lengths)), key=lambda number: -lengths[number])",
        "order = list(range(len(lengths)))",
        "data/test_batches.py data/test_golden.py",
    ),
    Mutation(
        "return min(align_up(tokens, numerics.width_step), numerics.widest)",
        "return align_up(tokens, numerics.width_step)",
        "data/test_batches.py",
    ),
    Mutation(
        "epoch, begin = divmod(position + len(chosen), self._rows)",
        "epoch, begin = 0, (position + len(chosen)) % self._rows",
        "data/test_sampler.py",
    ),
    Mutation(
        "np.array([seed % (1 << 64), epoch], np.uint64), np.array([0, 0, part, entry], np.uint64)",
        "np.array([seed % (1 << 64), epoch], np.uint64), np.array([0, 0, part, 0], np.uint64)",
        "data/test_sampler.py",
    ),
    Mutation(
        "return [dealt[begin:end] or [[]] for begin, end in pairwise(ends)]",
        "return [dealt[begin:end] for begin, end in pairwise(ends)]",
        "data/test_batches.py",
    ),
    Mutation("merged[-1] = merged[-1][0], max(end, merged[-1][1])", "merged[-1] = merged[-1][0], end", "data/test_masks.py"),
    Mutation('counts.lost += size - max_seq_len if overlong == "truncate" else 0', "counts.lost += 0", "data/test_batches.py"),
)
STATE = (
    Mutation(
        "self._flush()\n            self._name(manifest)",
        "self._name(manifest)\n            self._flush()",
        "e2e/test_every_step_committed.py",
    ),
    Mutation(
        "if self._complete == self.standing.step and self._is_news():",
        "if self._complete <= self.standing.step and self._is_news():",
        "e2e/test_saved_state.py e2e/test_every_step_committed.py",
    ),
    Mutation(
        'is_sealed = content.pop("digest", None) == _digest(body)',
        'is_sealed = content.pop("digest", None) is not None',
        "hostile/test_own_files.py hostile/test_stores.py e2e/test_foreign_state.py",
    ),
    Mutation(
        "self.residency.commits.base = saved.step",
        "self.residency.commits.base = 0",
        "e2e/test_going_back.py",
    ),
    Mutation("restore_generators(saved.random, self.device.torch_device)", "pass", "e2e/test_going_back.py"),
    Mutation("held = min(first, os.fstat(file.fileno()).st_size // _LOSS.size)", "held = first", "unit/test_losses.py"),
    Mutation(
        "if saved.step > total_steps:",
        "if saved.step >= total_steps + 2:",
        "e2e/test_changes.py e2e/test_going_back.py e2e/test_stopping.py",
    ),
    Mutation(
        "is_older = older is not None and older.run == manifest.run and",
        "is_older = older is not None and",
        "hostile/test_stores.py",
    ),
    Mutation(
        "manifests.write(self.folder, manifest, keep=last is not None and not amends, amends=amends)",
        "manifests.write(self.folder, manifest, keep=False, amends=amends)",
        "e2e/test_going_back.py e2e/test_saved_state.py",
    ),
    Mutation(
        "self.skipped += skipped",
        "self.skipped += 0",
        "e2e/test_numbers.py engine/test_numerics_errors.py e2e/test_saved_state.py",
    ),
)
RECIPE_AND_CLI = (
    Mutation("if train.epochs is not None and train.max_steps is not None:", "if False:", "recipe/test_rules.py"),
    Mutation('if micro != "auto" and batch % micro:', "if False:", "recipe/test_rules.py"),
    Mutation(
        "return max(divisor for pair in small for divisor in",
        "return min(divisor for pair in small for divisor in",
        "recipe/test_rules.py",
    ),
    Mutation("if recipe.dataset.streaming and recipe.train.max_steps is None:", "if False:", "recipe/test_rules.py"),
    Mutation("if len(raw) > MAX_BYTES:", "if len(raw) > 100 * MAX_BYTES:", "hostile/test_json_files.py"),
    Mutation("if references > _MOST_REFERENCES:", "if False:", "recipe/test_errors.py"),
    Mutation(
        "(diagnostic.place.file != name, diagnostic.place.line, diagnostic.place.column)",
        "(False, 0, 0)",
        "recipe/test_errors.py",
    ),
    Mutation(
        "if samples is not None and samples.max_new_tokens >= recipe.dataset.max_seq_len:", "if False:", "recipe/test_rules.py"
    ),
    Mutation(
        'if len(text) > MOST_DIGITS:\n        raise ValueError(f"a number has {len(text):,} digits")',
        "if False:\n        raise ValueError()",
        "hostile/test_json_files.py",
    ),
    Mutation('return sum(map(text.count, ",[{")) > MOST_VALUES', "return False", "hostile/test_json_files.py"),
)
CHECKPOINT_AND_SWAP = (
    Mutation("if len(name) > NAME_LIMIT:", "if False:", "checkpoint/test_files.py"),
    Mutation(
        "if groups[-1] and size + tensor.nbytes > max_shard_size:",
        "if groups[-1] and size > max_shard_size:",
        "checkpoint/test_writer.py",
    ),
    Mutation("too_large = part.isinf()", "too_large = part.isnan()", "checkpoint/test_reader.py"),
    Mutation(
        'if needed > available:\n        raise OutOfSpaceError(\n            f"{target}: the model takes',
        'if False:\n        raise OutOfSpaceError(\n            f"{target}: the model takes',
        "checkpoint/test_writer.py",
    ),
    Mutation("return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank", "return alpha / rank", "adapters"),
    Mutation(
        "return merged_piece * (self.magnitude / norms)[self._outputs(first, len(piece))]",
        "return merged_piece * self.magnitude[self._outputs(first, len(piece))]",
        "adapters",
    ),
    Mutation(
        "rows = self.a[:, begin:end].T @ self.b.T if self.transposed else",
        "rows = self.a[:, begin:end].T @ self.b.T if False else",
        "adapters",
    ),
    Mutation(
        'place = _at(target[first * NF4_BLOCK // 2 :], "uint8_t[]")',
        'place = _at(target[first * NF4_BLOCK // 4 :], "uint8_t[]")',
        "swap/test_quantised.py",
    ),
    Mutation("requests: int = 4096", "requests: int = 16", "swap/test_daemon.py"),
    Mutation('"lion": lib.FY_LION', '"lion": lib.FY_ADAMW', "swap/test_kernels.py"),
)
ROOMS = {
    "planner": PLANNER,
    "engine": ENGINE,
    "data": DATA,
    "state": STATE,
    "recipe": RECIPE_AND_CLI,
    "checkpoint": CHECKPOINT_AND_SWAP,
}


def file_with(package: Path, text: str) -> Path | None:
    """Returns the only file of the package that has the text, once."""
    files = [path for path in sorted(package.rglob("*.py")) if text in path.read_text(encoding="utf-8")]
    return files[0] if len(files) == 1 and files[0].read_text(encoding="utf-8").count(text) == 1 else None


def judged(copy: Path, mutation: Mutation) -> tuple[str, float]:
    """Runs the tests of one mutation in the copy: "caught", "survived", or "gone"."""
    path = file_with(copy / "fuyou_cli", mutation.old)
    if path is None:
        return "gone", 0.0
    begin, before = time.monotonic(), path.read_text(encoding="utf-8")
    named = [copy / "tests" / name for name in mutation.tests.split()]
    tests = sorted({str(test if test.exists() else test.parent) for test in named})
    ends = ["-o", f"faulthandler_timeout={HANGS}", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *ends, *tests]
    path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        ended = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, timeout=LIMIT
        )
        outcome = {0: "survived", 1: "caught", 2: "caught"}.get(ended.returncode, f"pytest ended with {ended.returncode}")
    except subprocess.TimeoutExpired:
        outcome = "caught"  # it hangs
    finally:
        path.write_text(before, encoding="utf-8")
    return outcome, time.monotonic() - begin


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--checkout", type=Path, default=ROOT, help="whose package and tests (default: this one)")
    options.add_argument("--room", choices=sorted(ROOMS))
    options.add_argument("--out", type=Path, help="a JSON file for the outcomes")
    asked = options.parse_args()
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fuyou-mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = asked.checkout / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        for room, mutations in ROOMS.items():
            for number, mutation in enumerate(mutations if asked.room in (None, room) else (), start=1):
                outcome, seconds = judged(copy, mutation)
                outcomes[f"{room} {number}"] = outcome
                print(f"{room:10} {number:2}  {outcome:9} {seconds:5.0f} s  {mutation.old.splitlines()[0][:80]}", flush=True)
    counts = {outcome: list(outcomes.values()).count(outcome) for outcome in sorted(set(outcomes.values()))}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if asked.out:
        asked.out.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return int(any(outcome != "caught" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
