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
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from proof import flips
from proof.control_groups import LimitsUnavailable
from proof.crashes import compare, digests, finished, store_of
from proof.deepspeed_loop import fill
from proof.materials import model_folder
from proof.nursery import Ended
from proof.setting import Lost, Setting, fresh, parser, run_script
from proof.tiny_runs import ANY_LENGTH, IN_RAM, Place, placed
from proof.verdicts import Row, holds, missing

from fuyou_cli.training.state import manifest as manifests


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


# ---- both sides under one fault --------------------------------------------------------------------------------------


_LOOP = Path(__file__).with_name("deepspeed_loop.py")
STEPS, HALF = 6, 3
_PATIENCE = 600.0  # seconds: DeepSpeed compiles its operators where nobody did
_DISK = 64 << 20  # bytes of the disk that runs full
_SHOWN = 160  # characters of somebody's error


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds the outcome of one fault. `good`: nothing was lost, and nothing wrong was done without an error."""

    good: bool
    text: str
    values: dict[str, Any] = field(default_factory=dict)


# ---- a disk of its own -----------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Makes a file system of 64 MiB in a file. Raises LimitsUnavailable if this user may not mount one."""
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(_DISK)
    for command in (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(point)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise LimitsUnavailable(f"{command[0]}: {error}") from None
        if done.returncode != 0:
            raise LimitsUnavailable(f"{command[0]}: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False)
        image.unlink()


# ---- ours ------------------------------------------------------------------------------------------------------------


def our_resume(place: Place) -> Outcome:
    whole, broken = (place.recipe(name, ANY_LENGTH, steps=STEPS) for name in ("resume/whole", "resume/broken"))
    expected = finished(place, whole)
    finished(place, place.recipe("resume/broken", ANY_LENGTH, steps=HALF))
    found = finished(place, place.recipe("resume/broken", ANY_LENGTH, steps=STEPS))
    try:
        compare(found, expected, str(broken))
    except Lost as error:
        return Outcome(good=False, text=str(error))
    return Outcome(good=True, text="losses, states and export bitwise the same")


def our_full_disk(place: Place) -> Outcome:
    """Runs us on a disk that is full from the first step on."""
    name = "full"
    expected = finished(place, place.recipe(f"{name}/whole", ANY_LENGTH, steps=STEPS))
    with small_disk(place.folder / name) as disk:
        changes = {**ANY_LENGTH, "offload.dir": str(disk), "output_dir": str(disk / "out")}
        recipe = place.recipe(f"{name}/run", changes, steps=STEPS)
        child, begun = place.begin("finetune", recipe), time.monotonic()
        while not any(b'"loaded"' in log.read_bytes() for log in disk.rglob("log.jsonl")) and not child.is_over(0.005):
            if time.monotonic() - begun > _PATIENCE:
                child.kill()
        ballast = disk / "ballast"
        fill(ballast)
        end = child.wait()
        ballast.unlink()
        (store,) = {path.parent for path in disk.rglob(manifests.NAME)}
        again = place.begin("finetune", recipe).wait()
        if again.code != 0:
            return Outcome(good=False, text=f"does not go on: {_error(again.err)}")
        saved = manifests.read(store)
        assert saved is not None
        sums = tuple((stage.name, tensor, extent.sum) for stage in saved.stages for tensor, extent in stage.extents())
        same = sums == expected.sums and digests(disk / "out" / "model") == expected.export
    how = "ends well" if end.code == 0 else f"exit code {end.code}: {_error(end.err)}"
    text = f"{how}; with room again it ends {'bitwise the same' if same else 'with OTHER BYTES'}"
    return Outcome(good=same, text=text, values={"code": end.code, "error": _error(end.err)})


def our_sizes(place: Place, model: Path) -> Outcome:
    changes = {**ANY_LENGTH, "model.name_or_path": str(model)}
    ssd = finished(place, place.recipe(f"{model.name}/ssd", changes, steps=STEPS))
    ram = finished(place, place.recipe(f"{model.name}/ram", {**changes, **IN_RAM}, steps=STEPS))
    same = ssd.losses == ram.losses and ssd.export == ram.export
    return Outcome(good=same, text=f"{'bitwise' if same else 'NOT'} what everything in memory gives, losses and weights")


def our_same_twice(place: Place) -> Outcome:
    recipe = place.recipe("twice", ANY_LENGTH, steps=HALF)
    first = finished(place, recipe)
    again = finished(place, recipe)
    out = recipe.parent / "again"
    ends = [place.begin("export", store_of(recipe), out, "--dtype", "float32").wait() for _ in range(2)]
    good = again == first and all(end.code == 0 for end in ends) and digests(out)
    return Outcome(good=bool(good), text="saved and exported again, bitwise the same" if good else _error(ends[-1].err))


def our_flip(place: Place) -> Outcome:
    run = flips.stopped(place, "flip")
    try:
        flips.flip_bits(place, run, flips=1, seed=5, resumed_every=1)
    except Lost as error:
        return Outcome(good=False, text=str(error))
    return Outcome(good=True, text="named, gone back one step, ends bitwise the same")


def _error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("error")]
    return _without_folders(lines[-1] if lines else text.strip()[-_SHOWN:])[:_SHOWN]


def _without_folders(text: str) -> str:
    """Removes paths of this machine, which concern nobody."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)


# ---- theirs ----------------------------------------------------------------------------------------------------------


class Rival:
    """Runs DeepSpeed in a Python that has it. `operators`: where it keeps what it compiles."""

    def __init__(self, python: Path, folder: Path, operators: Path) -> None:
        self.python, self.folder, self.operators = python, folder, operators

    def run(self, name: str, model: Path, *words: str | Path, nvme: Path | None = None) -> tuple[Ended, list[dict[str, Any]]]:
        """Runs a process. Returns how it ended and what it printed. Checkpoints of a name are its own."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        out, swapped = folder / "told.jsonl", nvme or folder / "nvme"
        shutil.rmtree(swapped, ignore_errors=True)
        self.operators.mkdir(parents=True, exist_ok=True)
        command = [str(self.python), str(_LOOP), "--model", str(model), "--nvme", str(swapped)]
        command += ["--checkpoints", str(folder / "checkpoints"), "--out", str(out), *map(str, words)]
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(self.operators), "DS_ACCELERATOR": "cpu"}
        begun = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            end = Ended(code=done.returncode, out=done.stdout, err=done.stderr, seconds=time.monotonic() - begun)
        except subprocess.TimeoutExpired:
            end = Ended(code=-9, out="", err=f"not over after {_PATIENCE:g} s", seconds=_PATIENCE)
        (folder / "said.txt").write_text(end.text, encoding="utf-8")
        told = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
        return end, told


def losses_of(told: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in told if "step" in line}


def their_resume(rival: Rival, model: Path) -> Outcome:
    whole = losses_of(rival.run("whole", model, "--last", str(STEPS))[1])
    rival.run("resume", model, "--last", str(HALF), "--save", "half")
    end, told = rival.run("resume", model, "--first", str(HALF + 1), "--last", str(STEPS), "--load", "half")
    return _compared(whole, losses_of(told), end, told, range(HALF + 1, STEPS + 1))


def their_full_disk(rival: Rival, model: Path) -> Outcome:
    """Fills their disk after DeepSpeed has set itself up, before the first step."""
    whole = losses_of(rival.run("whole", model, "--last", str(STEPS))[1])
    with small_disk(rival.folder / "full") as disk:
        ballast = disk / "ballast"
        end, told = rival.run("full", model, "--last", str(STEPS), "--fill", ballast, nvme=disk / "nvme")
    found = _compared(whole, losses_of(told), end, told, range(1, STEPS + 1))
    # An error would be right; what is asked is that it is named for what it is, and that nothing wrong is computed.
    named = end.code != 0 and any(word in end.err for word in ("No space", "ENOSPC", "Errno 28"))
    done = len(losses_of(told))
    return Outcome(good=found.good or named, text=found.text if end.code == 0 else f"after {done} steps: {found.text}")


def their_odd_sizes(rival: Rival, model: Path) -> Outcome:
    return _beside_memory(rival, "odd", model)


def their_even_sizes(rival: Rival, model: Path) -> Outcome:
    """Runs the control: differences that do not come from the sizes."""
    return _beside_memory(rival, "even", model)


def _beside_memory(rival: Rival, name: str, model: Path) -> Outcome:
    memory = losses_of(rival.run(f"{name}-memory", model, "--last", str(STEPS), "--in-memory")[1])
    end, told = rival.run(name, model, "--last", str(STEPS))
    return _compared(memory, losses_of(told), end, told, range(1, STEPS + 1))


def their_same_twice(rival: Rival, model: Path) -> Outcome:
    end, told = rival.run("twice", model, "--last", "1", "--save", "tag", "--save-again")
    saved = sum("saved" in line for line in told)
    return Outcome(good=end.code == 0 and saved == 2, text="saved twice" if end.code == 0 else _their_error(end, told))


def their_flip(rival: Rival, model: Path) -> Outcome:
    """Flips one bit of the largest file of the optimizer's state in a checkpoint."""
    rival.run("flip", model, "--last", str(HALF), "--save", "half")
    words = ("--first", str(HALF + 1), "--last", str(STEPS), "--load", "half")
    before = losses_of(rival.run("flip", model, *words)[1])
    files = [path for path in (rival.folder / "flip" / "checkpoints").rglob("*") if path.is_file() and "swp" in path.name]
    if not files:
        return Outcome(good=False, text="its checkpoint has no swapped state")
    largest = max(files, key=lambda path: (path.stat().st_size, str(path)))
    content, draw = bytearray(largest.read_bytes()), random.Random(5)
    content[4 * draw.randrange(len(content) // 4) + 3] ^= 0x02  # an exponent, so that it matters
    largest.write_bytes(content)
    end, told = rival.run("flip", model, *words)
    if end.code != 0:
        return Outcome(good=True, text=_their_error(end, told))
    same = losses_of(told) == before
    return Outcome(good=False, text="not noticed" + ("" if same else ": other losses, exit code 0"))


def _compared(
    wanted: dict[int, float], found: dict[int, float], end: Ended, told: list[dict[str, Any]], steps: range
) -> Outcome:
    if end.code != 0:
        return Outcome(good=False, text=_their_error(end, told), values={"losses": found})
    apart = [step for step in steps if found.get(step) != wanted.get(step)]
    values = {"wanted": wanted, "found": found}
    if not apart:
        return Outcome(good=True, text="losses bitwise the same", values=values)
    step = apart[0]
    text = f"exit code 0, not a word; loss of step {step} is {found.get(step)}, {wanted.get(step)} is right"
    return Outcome(good=False, text=text, values=values)


def _their_error(end: Ended, told: list[dict[str, Any]]) -> str:
    said = next((str(line["error"]) for line in told if "error" in line), "")
    last = next((line.strip() for line in reversed(end.err.splitlines()) if line.strip()), "")
    return _without_folders(f"exit code {end.code}: {said or last}")[:_SHOWN]


SCENARIOS: dict[str, tuple[str, Callable[..., Outcome], Callable[[Rival, Path], Outcome]]] = {
    "resumed after half": ("the same losses", our_resume, their_resume),
    "disk full during a step": ("an error that says so", our_full_disk, their_full_disk),
    "even tensor sizes": ("what memory gives", our_sizes, their_even_sizes),
    "odd tensor sizes": ("what memory gives", our_sizes, their_odd_sizes),
    "the same state saved twice": ("saved", our_same_twice, their_same_twice),
    "a bit flipped in what is saved": ("found", our_flip, their_flip),
}
EVEN, ODD = "even tensor sizes", "odd tensor sizes"

if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
