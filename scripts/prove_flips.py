#!/usr/bin/env python3
"""Flipped bits: each one in a committed extent is found and named, and the run goes back behind it.

    python scripts/prove_flips.py --flips 1000 --work DIR
    about ten minutes on two cores; trying the script itself: --flips 20

A tiny run is stopped; then one bit after another is flipped in an extent of its newest state, drawn by the seed. `fuyou
verify` (the function behind it) must name that tensor of that stage and nothing else. Every `--resumed-every`-th time the run
is started again: it must say what is damaged, go back to the state before and end as it had ended, to the last bit; and where a
bit of that state is flipped too, refuse and leave both as they are. Bits of the newest manifest are flipped as well: it must
never be taken for one, and the one before it is.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import flips
from proof.crashes import Lost, placed
from proof.report import conclude, holds
from proof.runs import fresh
from proof.setting import Setting, parser, run_script


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--flips", type=int, default=1000, help="in extents, and as many in a manifest")
    options.add_argument("--resumed-every", type=int, default=20, help="flip: the run is started again")
    options.add_argument("--seed", type=int, default=1)
    return options.parse_args()


def measured(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    try:
        with placed(fresh(setting.work / "flips")) as place:
            run = flips.stopped(place)
            found = flips.flip_bits(place, run, flips=options.flips, seed=options.seed, resumed_every=options.resumed_every)
            return {**asdict(found), "manifests": flips.flip_manifests(run, flips=options.flips, seed=options.seed)}
    except Lost as error:
        return {"failed": str(error)}


def prove(setting: Setting, options: argparse.Namespace) -> int:
    key = f"{options.flips} flips, resumed every {options.resumed_every}, seed {options.seed}"
    result = setting.measure(key, lambda: measured(setting, options))
    if result.get("failed"):
        rows = [holds("flips", "all found", "not", False, note=str(result["failed"])[:2000])]
    else:
        asked, made = str(options.flips), result["flips"]
        again = f"{result['went_back']} went back and ended bitwise the same, {result['refused']} had nothing to go back to"
        rows = [
            holds("bits flipped in extents, found and named", asked, str(made), made == options.flips, values=result),
            holds("runs started again after that", "> 0", again, min(result["went_back"], result["refused"]) > 0),
            holds(
                "bits flipped in the newest manifest, found", asked, str(result["manifests"]),
                result["manifests"] == options.flips,
            ),
        ]  # fmt: skip
    settings = {"flips": options.flips, "resumed_every": options.resumed_every, "seed": options.seed, "model": "1m"}
    return conclude(f"prove_flips-{options.seed}", rows, results=setting.results, settings=settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
