#!/usr/bin/env python3
"""Flips bits: each one in a committed extent is found and named, and the run falls back to the state before.

    python scripts/prove_flips.py --flips 1000 --work DIR
    about ten minutes on two cores; the same command continues; to try the script itself: --flips 20
    other runs: --run lora, qlora, int8, moe or moe-lora

Tiny runs come to their end, one for each kind of store: in one folder, striped over two, and committed every second step. Then
the script flips one bit after another in an extent of the newest state, drawn by the seed. `fuyou verify` (the function behind
it) must name that tensor of that stage and nothing else. Every
`--resumed-every`-th time the run is started again. It must say what is damaged, fall back to the state before and end as it had
ended, to the last bit. If that state is damaged too, it must refuse and leave both as they are.

Bits of the newest manifest are flipped as well. A damaged manifest must never be used. The
one before it is, and a resumed run continues from there to the same end. A flipped bit in the manifest before harms nothing.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import flips
from proof.flips import STORES, Found, FoundManifests
from proof.setting import Setting, fresh, lost_row, parser, run_script
from proof.tiny_runs import Place, ask_for_run, named, placed
from proof.verdicts import Row, holds

AT_ONCE = 100  # flips that are kept together


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--flips", type=int, default=1000, help="in extents of all stores, and as many in manifests")
    options.add_argument("--resumed-every", type=int, default=20, help="flip: the run is started again")
    options.add_argument("--seed", type=int, default=1)
    ask_for_run(options)
    return options.parse_args()


def flipped(
    setting: Setting, options: argparse.Namespace, place: Place, kind: str, flipping: str, count: int
) -> dict[str, Any]:
    """Makes the flips in one store, some at a time. `flipping`: bits or manifests."""
    flip, none = {"bits": (flips.flip_bits, Found()), "manifests": (flips.flip_manifests, FoundManifests())}[flipping]
    store = cache(
        lambda: flips.stopped(place, f"{flipping}{[*STORES].index(kind)}", kind)
    )  # only where something is left to do
    what = named(f"{kind}, flips of {flipping}, resumed every {options.resumed_every}", options.run)

    def some(many: int, seed: int) -> Found | FoundManifests:
        return flip(place, store(), flips=many, seed=seed, resumed_every=options.resumed_every)

    return setting.in_parts(what, count, AT_ONCE, options.seed, some, none)


def shares(total: int, kinds: list[str]) -> dict[str, int]:
    """Divides the flips among the kinds."""
    return {kind: total // len(kinds) + (number < total % len(kinds)) for number, kind in enumerate(kinds)}


def judged(kind: str, result: dict[str, Any], asked: int, *, frozen: bool) -> Row:
    """Judges the flips of one kind of store. frozen: its states share weights that no update writes."""
    what, made = f"{kind}: bits flipped in extents, found and named", result["flips"]
    if result.get("failed"):
        return lost_row(what, str(asked), result)
    went_back, refused = result["went_back"], result["refused"]
    note = f"started again, {went_back} went back and ended bitwise the same, {refused} had nothing to go back to and said so"
    started = went_back if not frozen else went_back + refused
    return holds(what, str(asked), str(made), made == asked and started > 0, note=note, values=result)


def judged_manifests(kind: str, result: dict[str, Any], asked: int) -> Row:
    what, made = f"{kind}: bits flipped in a manifest, found", result["flips"]
    if result.get("failed"):
        return lost_row(what, str(asked), result)
    gone_on, older = result["gone_on"], result["older"]
    note = f"started again, {gone_on} went on from the one before, and {older} whose one before had the bit from the newest; "
    note += "all ended bitwise the same"
    return holds(what, str(asked), str(made), made == asked and gone_on > 0, note=note, values=result)


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows: list[Row] = []
    with placed(fresh(setting.work / "flips"), run=options.run) as place:
        frozen = place.is_adapter  # then two stages are trained, and no update waits for another
        for kind, count in shares(options.flips, [*STORES]).items():
            rows.append(judged(kind, flipped(setting, options, place, kind, "bits", count), count, frozen=frozen))
        for kind, count in shares(options.flips, [*STORES]).items():
            rows.append(judged_manifests(kind, flipped(setting, options, place, kind, "manifests", count), count))
    found = sum(int(str(row.values.get("flips", 0))) for row in rows)
    rows.append(holds("all of it", f"{2 * options.flips} found", str(found), found == 2 * options.flips))
    settings = {"flips": options.flips, "resumed_every": options.resumed_every, "seed": options.seed, "model": place.model.name}
    name = named(f"prove_flips-{options.seed}", options.run)
    return setting.conclude(name, rows, {**settings, "run": options.run})


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
