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
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import steady
from proof.common_recipe import fresh
from proof.setting import Setting, lost_row, parser, run_script
from proof.tiny_runs import placed
from proof.verdicts import holds

from fuyou_cli.core.units import MiB


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--every", type=int, default=100, help="steps from one look to the next")
    return options.parse_args()


def prove(setting: Setting, options: argparse.Namespace) -> int:
    def measured() -> dict[str, Any]:
        with placed(fresh(setting.work / "steady")) as place:
            found = steady.samples(place, "run", steps=options.steps, every=options.every)
        return {"samples": [asdict(sample) for sample in found], "problems": steady.growing(found)}

    result = setting.attempt(f"{options.steps} steps, every {options.every}", measured)
    what = f"{options.steps} steps: memory, open files, the store"
    settings = {"steps": options.steps, "every": options.every, "model": "1m"}
    if result.get("failed"):
        return setting.conclude("prove_steady", [lost_row(what, "flat", result)], settings)
    last, problems = result["samples"][-1], result["problems"]
    text = f"{last['rss'] / MiB:.1f} MiB, {last['descriptors']} open files, {len(last['files'])} files of {last['size']:,} B"
    row = holds(what, "flat", text, not problems, note="; ".join(problems), values=result)
    return setting.conclude("prove_steady", [row], settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
