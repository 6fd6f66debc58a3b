#!/usr/bin/env python3
"""Shows that a long run does not grow: memory, open files and disk of thousands of tiny steps, each committed.

    python scripts/prove_steady.py --steps 2000 --work DIR
    a few minutes on two cores; to try the script itself: --steps 60 --every 5

The script looks at the run from outside every so many steps. Over the second half its memory stays within 2 % or 4 MiB. It has
as many open files, but for those that a commit opens for a moment. Over the whole run the store has the same files of the same
size, plus eight bytes a step for its loss.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from proof.setting import Lost, Setting, fresh, lost_row, parser, run_script
from proof.tiny_runs import Place, placed
from proof.verdicts import holds

from fuyou_cli.core.units import MiB
from fuyou_cli.training.state import manifest as manifests


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--every", type=int, default=100, help="steps from one look to the next")
    return options.parse_args()


def prove(setting: Setting, options: argparse.Namespace) -> int:
    def measured() -> dict[str, Any]:
        with placed(fresh(setting.work / "steady")) as place:
            found = samples(place, "run", steps=options.steps, every=options.every)
        return {"samples": [asdict(sample) for sample in found], "problems": growing(found)}

    result = setting.attempt(f"{options.steps} steps, every {options.every}", measured)
    what = f"{options.steps} steps: memory, open files, the store"
    settings = {"steps": options.steps, "every": options.every, "model": "1m"}
    if result.get("failed"):
        return setting.conclude("prove_steady", [lost_row(what, "flat", result)], settings)
    last, problems = result["samples"][-1], result["problems"]
    text = f"{last['rss'] / MiB:.1f} MiB, {last['descriptors']} open files, {len(last['files'])} files of {last['size']:,} B"
    row = holds(what, "flat", text, not problems, note="; ".join(problems), values=result)
    return setting.conclude("prove_steady", [row], settings)


# ---- looks at a run --------------------------------------------------------------------------------------------------


_LOSS = 8  # bytes a step: the store keeps every loss
_DIGITS = 4096  # bytes by which a manifest's numbers may grow
_MOMENTS = 4  # files that a commit has open for a moment
_RSS_SHARE, _RSS_BYTES = 0.02, 4 * MiB
_PATIENCE = 60.0  # seconds without a step


@dataclass(frozen=True, slots=True)
class Sample:
    """Describes a run after `step` steps."""

    step: int
    rss: int
    descriptors: int
    files: tuple[str, ...]  # of the store's folder, but those a commit is about to rename
    size: int  # of all of them


def samples(place: Place, name: str, *, steps: int, every: int) -> list[Sample]:
    """Takes one sample each `every` steps of a run of so many."""
    recipe = place.recipe(name, {"export.at_end": False}, steps=steps)
    child = place.begin("finetune", recipe)
    found: list[Sample] = []
    for step in _steps(recipe.parent / "out" / "log.jsonl", lambda: child.is_over(0.01)):
        if step >= every * (len(found) + 1) and (sample := _sample(child.pid, step, recipe.parent)) is not None:
            found.append(sample)
    end = child.wait()
    if end.code != 0:
        raise Lost(f"{recipe}: exit code {end.code}\n{end.text}")
    return found


def _steps(log: Path, is_over: Callable[[], bool]) -> Iterator[int]:
    """Yields the last step at every look, until the run is over."""
    at, last, seen = 0, 0, time.monotonic()
    while not is_over():
        content = log.read_bytes()[at:] if log.exists() else b""
        whole, end, _ = content.rpartition(b"\n")
        at += len(whole) + len(end)
        found = [json.loads(line) for line in whole.splitlines()]
        newest = max((record["step"] for record in found if record["event"] == "step"), default=last)
        if newest > last:
            last, seen = newest, time.monotonic()
            yield last
        elif time.monotonic() - seen > _PATIENCE:
            raise Lost(f"{log}: no step in {_PATIENCE:g} s after step {last}")


def _sample(pid: int, step: int, folder: Path) -> Sample | None:
    """Takes a sample. Returns None if the run is over by now."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
        descriptors = len([*Path(f"/proc/{pid}/fd").iterdir()])
    except OSError:
        return None
    (manifest,) = folder.rglob(manifests.NAME)
    kept = {path.name: path.stat().st_size for path in manifest.parent.iterdir() if path.is_file() and path.name[0] != "."}
    return Sample(step, pages * os.sysconf("SC_PAGE_SIZE"), descriptors, tuple(sorted(kept)), sum(kept.values()))


def growing(found: Sequence[Sample]) -> list[str]:
    """Returns what grows over the second half of the samples (files and their size: over all)."""
    half = found[len(found) // 2 :]
    if len(half) < 2:
        return [f"{len(found)} samples say nothing"]
    problems = []
    least, most = min(sample.rss for sample in half), max(sample.rss for sample in half)
    if most - least > max(_RSS_BYTES, _RSS_SHARE * least):
        problems.append(f"memory: {least:,} to {most:,} bytes")
    opened = [sample.descriptors for sample in half]
    if max(opened) - min(opened) > _MOMENTS:
        problems.append(f"open files: {min(opened)} to {max(opened)}")
    if len({sample.files for sample in found}) > 1:
        problems.append(f"files: {sorted(set(found[0].files) ^ set(found[-1].files))}")
    allowed = _LOSS * (found[-1].step - found[0].step) + _DIGITS
    if max(sample.size for sample in found) - min(sample.size for sample in found) > allowed:
        problems.append(f"size of the store: {found[0].size:,} to {found[-1].size:,} bytes, {allowed:,} more are losses'")
    return problems


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
