#!/usr/bin/env python3
"""A long run is as it was: memory, open files and disk of thousands of tiny steps, each of them committed.

    python scripts/prove_steady.py --steps 2000 --work DIR
    a few minutes on two cores; trying the script itself: --steps 60 --every 5

Looked at from outside every so many steps. Over the second half of the run its memory stays within 2 % or 4 MiB and its open
files are as many, but for those a commit has open for a moment; over all of it the store has the same files of the same size,
but for eight bytes a step, which are its loss.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import steady
from proof.crashes import Lost, placed
from proof.report import conclude, holds
from proof.runs import fresh
from proof.setting import Setting, parser, run_script

from fuyou_cli.core.units import MiB


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--every", type=int, default=100, help="steps from one look to the next")
    return options.parse_args()


def measured(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    try:
        with placed(fresh(setting.work / "steady")) as place:
            found = steady.samples(place, "run", steps=options.steps, every=options.every)
    except Lost as error:
        return {"failed": str(error)}
    return {"samples": [asdict(sample) for sample in found], "problems": steady.growing(found)}


def prove(setting: Setting, options: argparse.Namespace) -> int:
    result = setting.measure(f"{options.steps} steps, every {options.every}", lambda: measured(setting, options))
    what = f"{options.steps} steps: memory, open files, the store"
    if result.get("failed"):
        rows = [holds(what, "flat", "ended", False, note=str(result["failed"])[:2000])]
    else:
        last = result["samples"][-1]
        text = (
            f"{last['rss'] / MiB:.1f} MiB, {last['descriptors']} open files, {len(last['files'])} files of {last['size']:,} B"
        )
        problems = result["problems"]
        rows = [holds(what, "flat", text, not problems, note="; ".join(problems), values=result)]
    settings = {"steps": options.steps, "every": options.every, "model": "1m"}
    return conclude("prove_steady", rows, results=setting.results, settings=settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
