"""Describes a machine that one does not have: shipped parts (`rtx4090,2xgen4,128GiB`), or a file.

Several cards (`4xrtx4090,...`) are one box for as many ranks (`described_box`), which share out everything else of it.

A file is YAML with the keys of `HardwareProfile`; sizes and rates may have units. `parts: rtx4090,2xgen4,128GiB` starts from
parts, and the file's other keys replace theirs. A profile that `fuyou bench` kept on another machine is such a file too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, inf, log
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf.errors import OmegaConfBaseException

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import WrongData, from_json
from fuyou_cli.core.paths import is_file, read_plain
from fuyou_cli.core.units import LARGEST_SIZE, GiB, gb, parse_size
from fuyou_cli.recipe.load import LoadedRecipe, yaml_to_data
from fuyou_cli.recipe.named import shipped_hardware
from fuyou_cli.recipe.schema import format_size
from fuyou_cli.spec.hardware import STORE_RATES, Bandwidth, Count, Drive, Flops, HardwareProfile, Number, Size, ThreadRates

from .profile import ASSUMED_GPU_PROCESS, ASSUMED_PROCESS, FILE_KEYS, GIVEN, wrong_figures

SYSTEM_MEMORY = 2 * GiB  # assumed for a described machine's other programs
LARGEST_FILE = 1 << 20
MOST_DRIVES, MOST_CARDS = 1024, 64
DEFAULT_HOST = "desktop"

_COUNTED = re.compile(r"^0*(\d{1,9})\d*x(.+)$")  # nine digits are enough: such a count is too large anyway
_UNSAID: dict[str, Any] = {  # keys that a file without parts may leave out: `_derived` completes them
    "device": "", "device_memory": 0, "h2d": 0.0, "d2h": 0.0, "disk_free": 0, "ram_available": 0, "process_bytes": 0,
    "measured": "described",
}  # fmt: skip
_FULL, _BOTH = "once it is full", "in one direction while it does both"
_LIMITS = (  # a rate, a second rate that it never exceeds on a drive, and when the first applies
    ("sustained_write", "store_write", _FULL),
    ("store_read_mixed", "store_read", _BOTH),
    ("store_write_mixed", "store_write", _BOTH),
    ("sustained_read_mixed", "store_read", _BOTH),
    ("sustained_write_mixed", "store_write_mixed", _FULL),
    ("sustained_write_mixed", "sustained_write", _BOTH),
)
Shipped = TypeVar("Shipped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    device_name: str
    device_memory: Size
    matmul_flops: Flops
    h2d: Bandwidth
    d2h: Bandwidth
    device_memory_rate: Bandwidth
    sources: tuple[str, ...]
    sustained_share: Number = 1.0  # of matmul_flops, if that is a data sheet's peak, which no block reaches
    memory_share: Number = 1.0  # of device_memory_rate, in the same way


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRates:
    """The rates of `count` drives together."""

    count: Count
    store_read: Bandwidth
    store_write: Bandwidth
    store_read_mixed: Bandwidth
    store_write_mixed: Bandwidth
    sustained_write: Bandwidth = 0.0
    sustained_read_mixed: Bandwidth = 0.0
    sustained_write_mixed: Bandwidth = 0.0
    burst_bytes: Size = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveKind:
    model: str
    capacity: Size
    rated_bytes: Size
    rates: tuple[DriveRates, ...]  # by ascending count
    sources: tuple[str, ...]
    most: Bandwidth = 0.0  # limit of any number of them, reading or writing; 0: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    device_name: str
    cores: Count
    matmul_flops: Flops
    adamw: ThreadRates
    sources: tuple[str, ...]
    full_slots: Count = 1  # cards at once that have a whole PCIe link; more of them share out as many


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A described box. `machine`: with one card at work; `lanes`: share of its PCIe lanes that a card has while all are."""

    machine: HardwareProfile
    cards: int = 1
    lanes: float = 1.0

    def of_rank(self, ranks: int) -> HardwareProfile:
        """Returns what one of several ranks has of the box, each of them with a card of its own."""
        part = self.machine.shared(ranks)
        return replace(part, h2d=part.h2d * self.lanes, d2h=part.d2h * self.lanes)


def described(text: str | Path) -> HardwareProfile:
    """Reads the description of a machine with one card, or none. Raises UsageError with every error in it."""
    box = described_box(text)
    if box.cards > 1:
        raise UsageError(f"{text} describes {box.cards} cards, and one is asked for", hint="name one card")
    return box.machine


def described_box(text: str | Path) -> Box:
    """Reads the description of a box: names of parts, or a file. Raises UsageError with every error in it."""
    path = Path(text)
    if isinstance(text, Path) or path.suffix in (".yaml", ".yml") or "/" in text or is_file(path):
        return _from_file(path)
    box = _composed(text)
    return replace(box, machine=_checked(box.machine, f"the machine {text}"))


def _composed(text: str) -> Box:
    gpus, drives, hosts = _shipped("gpus", Gpu), _shipped("drives", DriveKind), _shipped("hosts", Host)
    chosen: dict[str, list[Any]] = {"GPU": [], "drives": [], "RAM": [], "host": []}
    problems = []
    for word in filter(None, (part.strip() for part in re.split(r"[,+]", text))):
        counted = _COUNTED.match(word.lower())
        several = counted is not None and (counted[2] in drives or counted[2] in gpus)
        count, name = (int(counted[1]), counted[2]) if counted and several else (1, word.lower())
        if name in gpus and count:
            chosen["GPU"].append((count, gpus[name]))
        elif name in drives and count:
            chosen["drives"].append((name, count, drives[name]))
        elif name in hosts:
            chosen["host"].append(hosts[name])
        elif (size := _size(word)) is not None:
            chosen["RAM"].append(size)
        else:
            near = difflib.get_close_matches(name, [*gpus, *drives, *hosts], n=1)
            problems.append(f"{_shown(word)} is neither a part nor a size" + (f" (did you mean {near[0]}?)" if near else ""))
    problems += [f"more than {MOST_DRIVES:,} {name} drives" for name, count, _ in chosen["drives"] if count > MOST_DRIVES]
    problems += [f"more than {MOST_CARDS} cards" for count, _ in chosen["GPU"] if count > MOST_CARDS]
    problems += [f"more than {format_size(LARGEST_SIZE)} of RAM" for size in chosen["RAM"] if size > LARGEST_SIZE]
    problems += [f"more than one {'kind of ' * (what == 'GPU')}{what}" for what, parts in chosen.items() if len(parts) > 1]
    problems += [f"no {what}" for what in ("drives", "RAM") if not chosen[what]]
    if problems:
        raise UsageError(f"{_shown(text, 100)} does not describe a machine: {'; '.join(problems)}", hint=_offer())
    host = (chosen["host"] or [hosts[DEFAULT_HOST]])[0]
    (ram,), ((name, count, kind),) = chosen["RAM"], chosen["drives"]
    cards, gpu = next(iter(chosen["GPU"]), (1, None))
    machine = _assembled(gpu, name, count, kind, ram, host, text)
    return Box(machine=machine, cards=cards, lanes=min(1.0, host.full_slots / cards))


def _assembled(gpu: Gpu | None, name: str, count: int, kind: DriveKind, ram: int, host: Host, text: str) -> HardwareProfile:
    rates, note = _together(name, kind, count)
    drive = Drive(model=kind.model, capacity=kind.capacity, rated_bytes=kind.rated_bytes)
    return HardwareProfile(
        name=text,
        device="cuda" if gpu else "cpu",
        device_name=(gpu or host).device_name,
        cores=host.cores,
        device_memory=gpu.device_memory if gpu else 0,
        matmul_flops=gpu.matmul_flops * gpu.sustained_share if gpu else host.matmul_flops,
        adamw=host.adamw,
        h2d=gpu.h2d if gpu else 0.0,
        d2h=gpu.d2h if gpu else 0.0,
        device_memory_rate=gpu.device_memory_rate * gpu.memory_share if gpu else 0.0,
        drives=(drive,) * count,
        sources=(*(gpu.sources if gpu else ()), *(f"{source}{note}" for source in kind.sources), *host.sources),
        disk_free=kind.capacity * count,
        process_bytes=_process(gpu is not None),
        measured="described",
        **_memory(ram),
        **rates,
    )


def _memory(ram: int) -> dict[str, Any]:
    available = max(0, ram - SYSTEM_MEMORY)
    return {"ram_total": ram, "ram_available": available, "pinnable": ram, "pinnable_why": "described: all of RAM"}


def _process(on_gpu: bool) -> int:
    """Returns the assumed bytes of a process before its arena exists."""
    return ASSUMED_PROCESS + (ASSUMED_GPU_PROCESS if on_gpu else 0)


def _together(name: str, kind: DriveKind, count: int) -> tuple[dict[str, Any], str]:
    """Returns the rates of `count` drives together, and a note for the sources if the list has no such count."""
    below = max((rates for rates in kind.rates if rates.count <= count), key=lambda rates: rates.count, default=kind.rates[0])
    above = min((rates for rates in kind.rates if rates.count >= count), key=lambda rates: rates.count, default=None)
    region = {"burst_bytes": below.burst_bytes * count // below.count}
    if above is None:
        most = kind.most or inf
        grown = {key: min(most, getattr(below, key) * count / below.count) for key in STORE_RATES}
        each = f"{below.count} of them" if below.count > 1 else "one"
        limit = f", at most {gb(most)}/s" if kind.most else ""
        note = f"; {count} {name}: assumption, {count / below.count:g} times as fast as {each}{limit}"
        return grown | region, note
    if below.count == above.count:
        return {key: getattr(below, key) for key in STORE_RATES} | region, ""
    share = log(count / below.count) / log(above.count / below.count)
    between = {key: _between(getattr(below, key), getattr(above, key), share) for key in STORE_RATES}
    return between | region, f"; {count} {name}: interpolated between {below.count} and {above.count}"


def _between(low: float, high: float, share: float) -> float:
    """Interpolates on a straight line between logarithms: rates grow with a power of the count."""
    return exp(log(low) + (log(high) - log(low)) * share) if low > 0 and high > 0 else 0.0


def _size(word: str) -> int | None:
    try:
        return parse_size(word) if not word.isdecimal() else None  # 128 without a unit surely does not mean bytes
    except ValueError:
        return None


def _shown(text: str, most: int = 40) -> str:
    quoted = repr(text)
    return quoted if len(quoted) <= most else f"{quoted[: most - 3]}..."


def _shipped(name: str, kind: type[Shipped]) -> dict[str, Shipped]:
    """Reads one of the lists of parts that come with fuyou."""
    path = shipped_hardware().get(name)
    if path is None:
        raise UsageError(f"this installation has no list of {name}", hint="install fuyou again, or describe it in a file")
    try:
        return {str(key): from_json(kind, value, defaults=True) for key, value in _mapping(path).items()}
    except WrongData as error:
        raise _refused(path, error.problems) from None


def _offer() -> str:
    lists = {name: " ".join(_mapping(path)) for name, path in shipped_hardware().items()}
    lines = ["name its parts, such as rtx4090,2xgen4,128GiB, or a file of its figures. Shipped:"]
    lines += [f"    {name:<7} {names}" for name, names in sorted(lists.items())]
    return "\n".join([*lines, "    RAM     any size: 64GiB ... 768GiB"])


def _from_file(path: Path) -> Box:
    given = {key: value for key, value in _mapping(path).items() if key not in FILE_KEYS}
    parts = given.pop("parts", None)
    box = None if parts is None else _parts_in(path, parts)
    start = _UNSAID if box is None else asdict(box.machine)
    try:
        profile = from_json(HardwareProfile, {**start, "name": path.stem, **given}, defaults=True)
    except WrongData as error:
        raise _refused(path, error.problems) from None
    if start["device"] == "cuda" and profile.device == "cpu":
        raise _refused(path, ["device: cpu, but parts names a GPU: remove the GPU"])
    sources = profile.sources if "sources" in given else (f"{', '.join(given)}: {GIVEN}{path.name}", *profile.sources)
    profile = replace(profile, **_derived(profile, given, from_parts=parts is not None), sources=sources)
    machine = _checked(profile, str(path), *_unlike_drives(profile, given))
    lanes = 1.0 if box is None or "h2d" in given else box.lanes  # what a file says is of each card
    return Box(machine=machine, cards=1 if box is None else box.cards, lanes=lanes)


def _parts_in(path: Path, parts: object) -> Box:
    if not isinstance(parts, str):
        raise _refused(path, ["parts: expected names with commas, such as rtx4090,2xgen4,128GiB"])
    try:
        return _composed(parts)
    except UsageError as error:
        raise UsageError(f"{path}: parts: {error.message}", hint=error.hint) from None


def _derived(profile: HardwareProfile, given: Collection[str], *, from_parts: bool) -> dict[str, Any]:
    """Computes the missing figures from the given ones, and lowers the parts' rates that would exceed a given limit."""
    derived: dict[str, Any] = {}
    if not from_parts:
        on_gpu = profile.device == "cuda" if profile.device else profile.device_memory > 0
        derived |= {"device": "cuda" if on_gpu else "cpu", "process_bytes": _process(on_gpu)}
    if "ram_total" in given:
        derived |= _memory(profile.ram_total)
    if "drives" in given and profile.drives:
        derived["disk_free"] = sum(drive.capacity for drive in profile.drives)
    if from_parts:
        for rate, limit, _ in (*_LIMITS, ("sustained_read_mixed", "store_read_mixed", "")):  # each rate after its limit
            if rate not in given and getattr(profile, rate) and (limit in given or limit in derived):
                most = derived.get(limit, getattr(profile, limit))
                derived[rate] = min(most, derived.get(rate, getattr(profile, rate)))
    return {key: value for key, value in derived.items() if key not in given}


def _unlike_drives(profile: HardwareProfile, given: Collection[str]) -> list[str]:
    """Lists given figures that no drive can have. Measured figures are not checked: they may differ by their noise."""
    if profile.measured != "described":
        return []
    wrong = [
        f"{rate}: more than {limit}: no drive is faster {when}"
        for rate, limit, when in _LIMITS
        if rate in given and getattr(profile, rate) > getattr(profile, limit)
    ]
    capacities = [drive.capacity for drive in profile.drives]
    if all(capacities) and profile.disk_free > sum(capacities) > 0:
        wrong.append("disk_free: larger than its drives")
    return wrong


def _checked(profile: HardwareProfile, place: str, *problems: str) -> HardwareProfile:
    problems = (*wrong_figures(profile), *problems)
    if profile.ram_available > profile.ram_total:
        problems = (*problems, "ram_available: larger than ram_total")
    if problems:
        raise _refused(place, problems)
    return profile


def _mapping(path: Path) -> dict[Any, Any]:
    try:
        text = read_plain(path, limit=LARGEST_FILE + 1).decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the path
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        parts_meant = not is_file(path) and path not in shipped_hardware().values()
        hint = _offer() if parts_meant else None
        raise UsageError(f"cannot read the machine's description {path}: {why}", hint=hint) from None
    try:
        data = yaml_to_data(text) if len(text) <= LARGEST_FILE else None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise _refused(path, [f"not valid YAML: {' '.join(str(error).split())[:200]}"]) from None
    if not isinstance(data, dict):
        raise _refused(path, ["expected keys and values, such as `parts: rtx4090,2xgen4,128GiB`"])
    return data


def _refused(place: str | Path, problems: Sequence[str]) -> UsageError:
    listed = "\n".join(f"  {problem}" for problem in problems)
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    hint = "use the keys of `profile` in `fuyou bench --json`; write sizes as 64GiB, rates as 21GB/s or 162TFLOPS"
    return UsageError(f"{place} does not describe a machine, {count}:\n{listed}", hint=hint)


def on_described(loaded: LoadedRecipe, hardware: HardwareProfile) -> LoadedRecipe:
    """Returns the recipe with the described machine's device. Raises UsageError if the recipe names another one."""
    offload = loaded.recipe.offload
    if offload.device not in ("auto", hardware.device):
        raise UsageError(
            f"offload.device: {offload.device}, but the described machine computes on {hardware.device}",
            hint="add offload.device=auto, or describe a machine without a GPU",
        )
    adapted = offload.model_copy(update={"device": hardware.device})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"offload": adapted}))
