#!/usr/bin/env python3
"""Shows what fuyou and DeepSpeed's NVMe offload do under the same faults, in one table.

    sudo python scripts/compare_faults.py --work DIR --deepspeed DIR/bin/python
    half an hour on two cores; root for the disk that runs full (a file system in a file)

`--deepspeed` is a Python that has DeepSpeed, torch and transformers. Its operators are compiled at first use (libaio's headers
are needed). Without it that half of the table says so. Each side is compared with itself, in five kinds of runs:

- a run that is stopped after half of its steps and continued
- a run whose disk is full from the first step on
- a run whose tensors have odd sizes, beside one with even sizes that shows which differences have another cause
- a run that saves the same state twice
- a run in whose saved state a bit has flipped

Asked: nothing is lost, nothing wrong is computed without an error, and an error says what it is. Models have a million
parameters. DeepSpeed runs on its CPU accelerator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import rivals
from proof.common_recipe import fresh
from proof.control_groups import LimitsUnavailable
from proof.materials import model_folder
from proof.rivals import Outcome, Rival
from proof.setting import Lost, Setting, parser, run_script
from proof.tiny_runs import Place, placed
from proof.verdicts import Row, holds, missing

SCENARIOS: dict[str, tuple[str, Callable[..., Outcome], Callable[[Rival, Path], Outcome]]] = {
    "resumed after half": ("the same losses", rivals.our_resume, rivals.their_resume),
    "disk full during a step": ("an error that says so", rivals.our_full_disk, rivals.their_full_disk),
    "even tensor sizes": ("what memory gives", rivals.our_sizes, rivals.their_even_sizes),
    "odd tensor sizes": ("what memory gives", rivals.our_sizes, rivals.their_odd_sizes),
    "the same state saved twice": ("saved", rivals.our_same_twice, rivals.their_same_twice),
    "a bit flipped in what is saved": ("found", rivals.our_flip, rivals.their_flip),
}
EVEN, ODD = "even tensor sizes", "odd tensor sizes"


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--deepspeed", type=Path, help="a Python that has DeepSpeed")
    options.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    return options.parse_args()


def ours(place: Place, name: str, model: Path) -> Row:
    asked, run, _ = SCENARIOS[name]
    try:
        outcome = run(place, model) if name in (EVEN, ODD) else run(place)
    except LimitsUnavailable as error:
        return missing(f"{name}: fuyou", asked, str(error))
    except Lost as error:
        return holds(f"{name}: fuyou", asked, "lost", False, note=str(error)[:2000])
    said = "held" if outcome.good else "NOT"
    return holds(f"{name}: fuyou", asked, said, outcome.good, note=outcome.text, values=outcome.values)


def theirs(rival: Rival | None, name: str, model: Path) -> Row:
    """Makes a row of the other side. It never judges us."""
    asked, _, run = SCENARIOS[name]
    if rival is None:
        return missing(f"{name}: DeepSpeed", asked, "no --deepspeed")
    try:
        outcome = run(rival, model)
    except LimitsUnavailable as error:
        return missing(f"{name}: DeepSpeed", asked, str(error))
    return Row(
        what=f"{name}: DeepSpeed", asked="-", measured="held" if outcome.good else "did not", verdict="theirs",
        note=outcome.text, values=outcome.values,
    )  # fmt: skip


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    work = fresh(setting.work / "rivals")
    rival = None
    if options.deepspeed:  # what it compiles is kept for another run
        rival = Rival(options.deepspeed.absolute(), work / "deepspeed", setting.work / "deepspeed-operators")
    with placed(work / "fuyou") as place:
        odd = model_folder(work / "fuyou", "odd", place.text)
        for name in options.scenarios:
            model = odd if name == ODD else place.model
            rows += [ours(place, name, model), theirs(rival, name, model)]
    held = {side: sum(row.measured == "held" for row in rows if row.what.endswith(side)) for side in ("fuyou", "DeepSpeed")}
    notes = [f"held: fuyou {held['fuyou']}, DeepSpeed {held['DeepSpeed']} of {len(options.scenarios)}"]
    return setting.conclude("compare_faults", rows, {"models": "1m, odd"}, notes)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
