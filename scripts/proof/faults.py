"""Makes every call of a run on its files fail in turn, and checks what becomes of the run.

For n = 1, 2, 3 and on, the n-th call that a kind of fault applies to fails, once or from then on, until a run meets no fault.
After each: the run ends in time; it ends well, with the right bytes, or with an error that says what, where and what to do, and
then the same command, undisturbed, ends with the right bytes. It leaves nothing open.

Three faults of one call are no reason to end: the kernel may interrupt a call, do a part of it, or ask for another try.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fuyou_cli.training.state import manifest as manifests

from .crashes import Ending, digests, ending, store_of
from .nursery import Ended
from .setting import Lost
from .shim import Call, Trace, namings
from .tiny_runs import ANY_LENGTH, Place

How = Literal["once", "from then on"]

ONCE: How = "once"
FROM_THEN_ON: How = "from then on"
_EVERYTHING = frozenset((
    "open", "create", "read", "write", "flush", "flush folder", "rename", "link", "unlink", "resize", "allocate", "mkdir",
))  # fmt: skip
# What shim_faults.c does each kind of fault to.
KINDS: dict[str, frozenset[str]] = {
    "eio": _EVERYTHING,
    "enospc": frozenset(("create", "write", "rename", "link", "resize", "allocate", "mkdir", "flush")),
    "erofs": _EVERYTHING - {"read", "open", "flush", "flush folder"},
    "eagain": frozenset(("read", "write", "flush", "allocate")),
    "eintr": frozenset(("read", "write", "flush", "allocate")),
    "short": frozenset(("read", "write")),
    "flip": frozenset(("read",)),
    "slow": _EVERYTHING,
    "clock": frozenset(),  # every reading of the wall clock is one of its points
}
SCENARIOS = ("load", "steps", "resume", "export")
_FOR_EVER = 10**9
_DAEMONS = ("store.bin", ".safetensors")  # ends of the names of files that the daemon alone reads by `pread`
# Python itself tries an interrupted call again, as often as it is: for ever would be no fault but a kernel's end.
_INTERRUPTIONS = 500
_PATIENCE = 600.0  # seconds: a run takes two, with every call slow four, on a busy machine many
_KEPT_MORE = 64 << 10  # KiB of memory at a run's end, beside an undisturbed one's
_STEPS = {"load": 1, "steps": 3, "resume": 3, "export": 2}
_PROBLEMS_KEPT = 12
_ERROR = re.compile(r"^(?P<what>(/[^\n]*: )?error(\[[^\]]*\])?: ?.+)", re.MULTILINE)  # of a recipe after its file's name
_HELP = re.compile(r"^  (help|note): .+", re.MULTILINE)
_PATH = re.compile(r"(^|[\s(:\"'])/\w")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Describes a command, what its folder holds before it, and what it leaves when undisturbed."""

    name: str
    recipe: Path
    words: tuple[str, ...]
    before: Path  # a copy of the folder
    result: Ending | tuple[tuple[str, str], ...]
    first: dict[str, int]  # kind -> the first call that is this scenario's
    kept_kib: int

    @property
    def folder(self) -> Path:
        return self.recipe.parent


@dataclass(kw_only=True, slots=True)
class Swept:
    """Counts points so far: those that ended well in spite of the fault, those with an error, and what was wrong."""

    points: int = 0
    survived: int = 0
    refused: int = 0
    unsummed: int = 0  # bits flipped in what nobody has a sum of: a checkpoint, a log
    problems: list[str] = field(default_factory=list)

    def as_values(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems[:_PROBLEMS_KEPT], "problems_count": len(self.problems)}


# ---- scenarios -------------------------------------------------------------------------------------------------------


def scenario(place: Place, name: str) -> Scenario:
    """Makes a scenario and runs it once undisturbed."""
    home = place.folder / "faults" / name
    shutil.rmtree(home, ignore_errors=True)
    changes: dict[str, Any] = {**ANY_LENGTH, "export.at_end": False}
    if name == "load" or place.is_adapter:  # the run reads the model's files to its end
        shutil.copytree(place.model, home / "model")
        changes["model.name_or_path"] = str(home / "model")
    words: tuple[str, ...] = ("finetune", str(home / "recipe.yaml"))
    recipe = place.recipe(f"faults/{name}", changes, steps=1 if name == "resume" else _STEPS[name])
    if name in ("resume", "export"):
        _undisturbed(place, words)
    if name == "export":
        words = ("export", str(store_of(recipe)), str(home / "out" / "model"), "--dtype", "float32")
    recipe = place.recipe(f"faults/{name}", changes, steps=_STEPS[name])
    before = place.folder / "faults-before" / name
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(home, before)
    trace = place.trace(home)
    end = _undisturbed(place, words, trace)
    calls = trace.calls()
    return Scenario(
        name=name, recipe=recipe, words=words, before=before, result=_result(name, recipe),
        first={kind: _first(calls, kind, loaded=name == "steps") for kind in KINDS}, kept_kib=_kept(end),
    )  # fmt: skip


def _undisturbed(place: Place, words: tuple[str, ...], trace: Trace | None = None) -> Ended:
    child = place.begin(*words, trace=trace)
    if not child.is_over(_PATIENCE):
        child.kill()
    end = child.wait()
    if end.code != 0:
        raise Lost(f"{words}: exit code {end.code}\n{end.text}")
    return end


def _first(calls: list[Call], kind: str, *, loaded: bool) -> int:
    """Returns the number of the first call to fail; with `loaded`, of those after step 0 was committed."""
    if not loaded:
        return 1
    _, (_, flush), *_ = namings(calls, manifests.NAME)  # the first says `loading`
    return 1 + sum(call.what in KINDS[kind] and call.begin < flush.end for call in calls)


def _result(name: str, recipe: Path) -> Ending | tuple[tuple[str, str], ...]:
    return digests(recipe.parent / "out" / "model") if name == "export" else ending(recipe)


def _is_right(found: Scenario) -> bool:
    try:
        return _result(found.name, found.recipe) == found.result
    except Lost:  # losses that cannot be read
        return False


# ---- one point -------------------------------------------------------------------------------------------------------


def _last(kind: str, how: How, number: int) -> int:
    if how == ONCE:
        return number
    return number + _INTERRUPTIONS if kind == "eintr" else _FOR_EVER


def struck(place: Place, found: Scenario, kind: str, how: How, number: int, swept: Swept) -> bool:
    """Makes one run with a fault, and one without if the fault ended it. Returns False if there was no such call."""
    shutil.rmtree(found.folder)
    shutil.copytree(found.before, found.folder)
    trace = place.trace(found.folder)
    child = place.begin(*found.words, trace=trace, fault=f"{number}:{_last(kind, how, number)}:{kind}")
    is_over = child.is_over(_PATIENCE)
    if not is_over:
        child.kill()
    end = child.wait()
    if is_over and not trace.faults:
        return False
    hit = [call for call in trace.calls() if call.fault]
    swept.points += 1
    swept.survived += end.code == 0
    swept.refused += end.code not in (0, -9)
    at = f"{found.name}, {kind} {how}, call {number}" + (f" ({hit[0].what} of {hit[0].file})" if hit else "")
    problems = list(_judged(found, kind, how, end, hit, is_over=is_over, swept=swept))
    if end.code != 0:
        problems += _after(place, found, swept, unsummed=_is_unsummed(kind, hit))
    swept.problems += [f"{at}: {problem}" for problem in problems]
    return True


def _judged(found: Scenario, kind: str, how: How, end: Ended, hit: list[Call], *, is_over: bool, swept: Swept) -> Iterator[str]:
    """Says what is wrong with how it ended."""
    if not is_over:
        yield f"not over after {_PATIENCE:g} s"
        return
    yield from (line for line in end.out.splitlines() if line.startswith("LEAKED"))
    if (kept := _kept(end)) > found.kept_kib + _KEPT_MORE:
        yield f"{kept} KiB of memory are left, {found.kept_kib} usually"
    if end.code != 0:
        if _may_not_end_it(kind, how, hit):
            yield f"ended the run: {_told(end)}"
        yield from _unnamed(end)
    elif not _is_right(found):
        if _is_unsummed(kind, hit):
            swept.unsummed += 1
        else:
            yield "ends well, with wrong bytes"


def _may_not_end_it(kind: str, how: How, hit: list[Call]) -> bool:
    """Tells whether the fault is no reason to end. A slow call has not failed, and a clock may be set. The kernel asks nobody
    for another try of a plain file's call; of the daemon's it may, if it does them directly."""
    if kind in ("slow", "clock"):
        return True
    daemons = all(call.what in ("read", "write") and call.file.endswith(_DAEMONS) for call in hit)
    return how == ONCE and (kind in ("eintr", "short") or (kind == "eagain" and daemons))


def _unnamed(end: Ended) -> Iterator[str]:
    """Says what is missing from the error."""
    if end.code not in (1, 2, 4):
        yield f"exit code {end.code}"
    said = _ERROR.search(end.err)
    if said is None or "Traceback" in end.err or "internal error" in end.err:
        yield f"no error that has a name: {_told(end)}"
        return
    if not _PATH.search(said["what"]):
        yield f"does not say where: {_told(end)}"
    if not _HELP.search(end.err):
        yield f"does not say what to do: {_told(end)}"


def _told(end: Ended) -> str:
    lines = [line for line in end.err.splitlines() if line.strip()]
    begun = next((number for number, line in enumerate(lines) if line.startswith(("error", "Traceback"))), -3)
    return " | ".join(lines[begun:][:4])[:600]


def _is_unsummed(kind: str, hit: list[Call]) -> bool:
    """Tells whether bits flipped in what nobody has a sum of."""
    return kind == "flip" and not any(call.file.endswith("store.bin") for call in hit)


def _after(place: Place, found: Scenario, swept: Swept, *, unsummed: bool) -> Iterator[str]:
    """Runs the same command undisturbed. It may refuse to go on with a checkpoint whose first read had a flipped bit."""
    child = place.begin(*found.words)
    if not child.is_over(_PATIENCE):
        child.kill()
    end = child.wait()
    if end.code != 0 and unsummed and "not what was read there before" in end.err:
        swept.unsummed += 1
    elif end.code != 0:
        yield f"the same command does not go on: exit code {end.code}: {_told(end)}"
    elif not _is_right(found):
        yield "the same command ends with wrong bytes"


def _kept(end: Ended) -> int:
    """Returns KiB of memory that a run's process had when it was over."""
    lines = [line for line in end.out.splitlines() if line.startswith("KEPT ")]
    return int(lines[-1].split()[1]) if lines else 0


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def sweep(place: Place, found: Scenario, kind: str, how: How, *, every: int, seed: int, most: int | None = None) -> Swept:
    """Tries every `every`-th point, from one drawn among the first so many, to the run without a fault; `most` at most."""
    swept = Swept()
    number = found.first[kind] + random.Random(f"{seed} {found.name} {kind} {how}").randrange(every)
    while (most is None or swept.points < most) and struck(place, found, kind, how, number, swept):
        number += every
    return swept
