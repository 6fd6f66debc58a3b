"""A machine one does not have: composed of shipped parts (`rtx4090,2xgen4,128GiB`), or written down in a file.

A file is YAML with the keys of `HardwareProfile`; sizes and rates may have units. `parts: rtx4090,2xgen4,128GiB` starts from
parts, and its other keys replace what they say. A profile that `fuyou bench` kept on another machine is such a file too.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields, replace
from math import exp, inf, log
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf.errors import OmegaConfBaseException

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.plain_files import read_plain
from fuyou_cli.core.units import LARGEST_SIZE, GiB, gb, parse_size
from fuyou_cli.recipe.fields import format_size
from fuyou_cli.recipe.load import LoadedRecipe, yaml_to_data
from fuyou_cli.recipe.shipped import shipped_hardware
from fuyou_cli.spec.hardware import STORE_RATES, Drive, HardwareProfile, wrong_rates

from .origins import given_in
from .typed_data import Reading, shown

SYSTEM_MEMORY = 2 * GiB  # that a described machine's other programs are taken to hold
LARGEST_FILE = 1 << 20
MOST_DRIVES = 1024
DEFAULT_HOST = "desktop"

_COUNTED = re.compile(r"^(\d+)x(.+)$")
_OPTIONAL = (  # of a file without parts: `_defaults`
    "device", "device_memory", "h2d", "d2h", "disk_free", "measured", "ram_available", "process_bytes",
)  # fmt: skip
_WRITES = (("store_write", "sustained_write"), ("store_write_mixed", "sustained_write_mixed"))  # at first, and when full
_MIXED = (  # while reading and writing, and while doing that alone
    ("store_read_mixed", "store_read"),
    ("store_write_mixed", "store_write"),
    ("sustained_read_mixed", "store_read"),
    ("sustained_write_mixed", "sustained_write"),
)
_FOLLOW = (
    ("sustained_write", "store_write"),
    ("store_read_mixed", "store_read"),
    ("store_write_mixed", "store_write"),
    ("sustained_read_mixed", "store_read_mixed"),
    ("sustained_write_mixed", "store_write_mixed"),
    ("sustained_write_mixed", "sustained_write"),
)
Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    device_name: str
    device_memory: int
    matmul_flops: float
    h2d: float
    d2h: float
    sources: tuple[str, ...]
    sustained_share: float = 1.0  # of matmul_flops where that is a data sheet's peak, which no block reaches


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRates:
    """Of `count` drives together."""

    count: int
    store_read: float
    store_write: float
    store_read_mixed: float
    store_write_mixed: float
    sustained_write: float = 0.0
    sustained_read_mixed: float = 0.0
    sustained_write_mixed: float = 0.0
    burst_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveKind:
    model: str
    capacity: int
    rated_bytes: int
    rates: tuple[DriveRates, ...]  # by ascending count
    sources: tuple[str, ...]
    most: float = 0.0  # bytes per second that any number of them reads or writes; 0: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    device_name: str
    cores: int
    matmul_flops: float
    adamw: tuple[tuple[int, float], ...]
    sources: tuple[str, ...]


def profile_from(text: str | Path, *, process_bytes: tuple[int, int]) -> HardwareProfile:
    """The machine of a description: names of parts, or a file. `process_bytes`: what a process is taken to hold before its
    arena exists on device cpu, and with a GPU. Raises UsageError with everything that is wrong."""
    path = Path(text)
    if isinstance(text, Path) or path.suffix in (".yaml", ".yml") or "/" in text or _is_file(path):
        return _from_file(path, process_bytes)
    return _checked(HardwareProfile(**_composed(text, process_bytes), name=text), f"the machine {text}")


# ---- parts -----------------------------------------------------------------------------------------------------------


def _composed(text: str, process_bytes: tuple[int, int]) -> dict[str, Any]:
    gpus, drives, hosts = _shipped("gpus", Gpu), _shipped("drives", DriveKind), _shipped("hosts", Host)
    chosen: dict[str, list[Any]] = {"GPU": [], "drives": [], "RAM": [], "host": []}
    problems = []
    for word in filter(None, (part.strip() for part in re.split(r"[,+]", text))):
        counted = _COUNTED.match(word.lower())
        count, name = (_count(counted[1]), counted[2]) if counted and counted[2] in drives else (1, word.lower())
        if name in gpus:
            chosen["GPU"].append(gpus[name])
        elif name in drives and count:
            chosen["drives"].append((name, count, drives[name]))
        elif name in hosts:
            chosen["host"].append(hosts[name])
        elif (size := _size(word)) is not None:
            chosen["RAM"].append(size)
        else:
            near = difflib.get_close_matches(name, [*gpus, *drives, *hosts], n=1)
            problems.append(f"{shown(word)} is neither a part nor a size" + (f" (did you mean {near[0]}?)" if near else ""))
    problems += [f"more {name} drives than {MOST_DRIVES:,}" for name, count, _ in chosen["drives"] if count > MOST_DRIVES]
    problems += [f"more RAM than {format_size(LARGEST_SIZE)}" for size in chosen["RAM"] if size > LARGEST_SIZE]
    problems += [f"several of {what}, one is wanted" for what, found in chosen.items() if len(found) > 1]
    problems += [f"no {what}" for what in ("drives", "RAM") if not chosen[what]]
    if problems:
        raise UsageError(f"no machine is described by {shown(text, 100)}: {'; '.join(problems)}", hint=_offer())
    host = (chosen["host"] or [hosts[DEFAULT_HOST]])[0]
    return _assembled(next(iter(chosen["GPU"]), None), chosen["drives"][0], chosen["RAM"][0], host, process_bytes)


def _assembled(
    gpu: Gpu | None, drives: tuple[str, int, DriveKind], ram: int, host: Host, process_bytes: tuple[int, int]
) -> dict[str, Any]:
    name, count, kind = drives
    rates, note = _together(name, kind, count)
    drive = Drive(model=kind.model, capacity=kind.capacity, rated_bytes=kind.rated_bytes)
    return {
        "device": "cuda" if gpu else "cpu",
        "device_name": (gpu or host).device_name,
        "cores": host.cores,
        "device_memory": gpu.device_memory if gpu else 0,
        "matmul_flops": gpu.matmul_flops * gpu.sustained_share if gpu else host.matmul_flops,
        "adamw": host.adamw,
        "h2d": gpu.h2d if gpu else 0.0,
        "d2h": gpu.d2h if gpu else 0.0,
        "drives": (drive,) * count,
        "sources": (*(gpu.sources if gpu else ()), *kind.sources, *note, *host.sources),
        **rates,
        **_described_memory(ram, process_bytes[gpu is not None]),
        "disk_free": kind.capacity * count,
        "measured": "described",
    }


def _described_memory(ram: int, process_bytes: int) -> dict[str, Any]:
    return {
        "ram_total": ram,
        "ram_available": max(0, ram - SYSTEM_MEMORY),
        "process_bytes": process_bytes,
        "pinnable": ram,
        "pinnable_why": "described: all of RAM",
    }


def _together(name: str, kind: DriveKind, count: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What `count` drives give together, and where it is not what the list says, that."""
    below = max((rates for rates in kind.rates if rates.count <= count), key=lambda rates: rates.count, default=kind.rates[0])
    above = min((rates for rates in kind.rates if rates.count >= count), key=lambda rates: rates.count, default=None)
    region = below.burst_bytes * count // below.count
    if above is None:
        most = kind.most or inf
        grown = {key: min(most, getattr(below, key) * count / below.count) for key in STORE_RATES}
        each = f"{below.count} of them" if below.count > 1 else "one"
        limit = f", at most {gb(most)}/s" if kind.most else ""
        note = f"{count} {name}: assumption, {count / below.count:g} times as fast as {each}{limit}"
        return {**grown, "burst_bytes": region}, (note,)
    if below.count == above.count:
        return {**{key: getattr(below, key) for key in STORE_RATES}, "burst_bytes": region}, ()
    share = log(count / below.count) / log(above.count / below.count)
    between = {key: _between(getattr(below, key), getattr(above, key), share) for key in STORE_RATES}
    return {**between, "burst_bytes": region}, (f"{count} {name}: interpolated between {below.count} and {above.count}",)


def _between(low: float, high: float, share: float) -> float:
    """On a straight line of logarithms: rates grow with a power of the count."""
    return exp(log(low) + (log(high) - log(low)) * share) if low > 0 and high > 0 else 0.0


def _count(digits: str) -> int:
    """The first digits of too many are too many."""
    return int(digits.lstrip("0")[:9] or "0")


def _size(word: str) -> int | None:
    try:
        return parse_size(word) if not word.isdecimal() else None  # 128 bytes of RAM were surely not meant
    except ValueError:
        return None


def _shipped(name: str, kind: type[Part]) -> dict[str, Part]:
    """One of the lists of parts that come with fuyou."""
    path = shipped_hardware().get(name)
    if path is None:
        raise UsageError(f"this installation has no list of {name}", hint="install fuyou again, or describe it in a file")
    reading = Reading(written=True)
    parts = {str(key): reading.made(kind, value, str(key)) for key, value in _mapping(path).items()}
    _refuse(path, reading.problems)
    return parts


def _offer() -> str:
    lists = {name: " ".join(_mapping(path)) for name, path in shipped_hardware().items()}
    lines = ["name its parts, such as rtx4090,2xgen4,128GiB, or a file of its figures. Shipped:"]
    lines += [f"    {name:<7} {names}" for name, names in sorted(lists.items())]
    return "\n".join([*lines, "    RAM     any size: 64GiB ... 768GiB"])


# ---- a file ----------------------------------------------------------------------------------------------------------


def _from_file(path: Path, process_bytes: tuple[int, int]) -> HardwareProfile:
    data = dict(_mapping(path))
    data.pop("schema_version", None)  # of a kept profile; its keys are checked one by one
    parts = data.pop("parts", None)
    if parts is not None and not isinstance(parts, str):
        _refuse(path, ["parts: names with commas are wanted, such as rtx4090,2xgen4,128GiB"])
    reading = Reading(written=True)
    try:
        start = _composed(parts, process_bytes) if parts is not None else {}
    except UsageError as error:
        raise UsageError(f"{path}: parts: {error.message}", hint=error.hint) from None
    optional = {field.name for field in fields(HardwareProfile)} if parts is not None else _OPTIONAL
    given = reading.fields_of(HardwareProfile, data, optional=optional)
    if start.get("device") == "cuda" and given.get("device") == "cpu":
        reading.problems.append("device: cpu, but parts names a GPU: leave that out")
    _refuse(path, reading.problems)
    if parts is None:
        start = _defaults(given, process_bytes)
    else:
        start |= _fitting(start, given)
    if "sources" not in given:
        start["sources"] = (*given_in(path.name, given), *start.get("sources", ()))
    profile = HardwareProfile(**{"name": path.stem, **start, **given})
    return _checked(profile, str(path), *_unlike_drives(profile, given))


def _fitting(start: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What of the parts has to follow what a file says instead of them: memory, the room on its drives, and how fast these are
    when they are full, which is no faster than at first."""
    changed = _described_memory(given["ram_total"], start["process_bytes"]) if "ram_total" in given else {}
    if given.get("drives"):
        changed["disk_free"] = sum(drive.capacity for drive in given["drives"])
    for rate, limit in _FOLLOW:  # each after what limits it
        if rate not in given and start[rate] and (limit in given or limit in changed):
            changed[rate] = min(changed.get(rate, start[rate]), given.get(limit, changed.get(limit, 0)))
    return changed


def _unlike_drives(profile: HardwareProfile, given: dict[str, Any]) -> list[str]:
    """What no drive does, of figures that somebody wrote down. Measured ones differ by as much as measurements do."""
    if profile.measured != "described":
        return []
    pairs = [(first, full) for first, full in _WRITES if full in given and given[full] > getattr(profile, first)]
    wrong = [f"{full}: more than {first}: no drive is faster once it is full" for first, full in pairs]
    mixed = [(both, alone) for both, alone in _MIXED if both in given and given[both] > getattr(profile, alone)]
    wrong += [f"{both}: more than {alone}: no drive is faster in one direction while it does both" for both, alone in mixed]
    capacities = [drive.capacity for drive in profile.drives]
    if all(capacities) and profile.disk_free > sum(capacities) > 0:
        wrong.append("disk_free: more than its drives hold")
    return wrong


def _defaults(given: dict[str, Any], process_bytes: tuple[int, int]) -> dict[str, Any]:
    """What a file without parts may leave out."""
    on_gpu = given.get("device", "cuda" if given.get("device_memory") else "cpu") == "cuda"
    capacity = sum(drive.capacity for drive in given.get("drives", ()))
    return {
        "device": "cuda" if on_gpu else "cpu",
        "device_memory": 0,
        "h2d": 0.0,
        "d2h": 0.0,
        "disk_free": capacity,
        "measured": "described",
        **_described_memory(given.get("ram_total", 0), process_bytes[on_gpu]),
    }


def _checked(profile: HardwareProfile, place: str, *others: str) -> HardwareProfile:
    """What no type says, and `others` that were found. Raises UsageError."""
    wrong = [*wrong_rates(profile), *others]
    if profile.ram_available > profile.ram_total:
        wrong.append("ram_available: more than ram_total")
    _refuse(place, wrong)
    return profile


def _mapping(path: Path) -> dict[Any, Any]:
    try:
        text = read_plain(path, limit=LARGEST_FILE + 1).decode()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot read the machine's description {path}: {why}", hint=_help(path)) from None
    data = None
    try:
        data = yaml_to_data(text) if len(text) <= LARGEST_FILE else None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        _refuse(path, [f"not readable as YAML: {' '.join(str(error).split())[:200]}"])
    if not isinstance(data, dict):
        _refuse(path, ["keys and values are wanted, such as `parts: rtx4090,2xgen4,128GiB`"])
    return dict(data or {})


def _help(path: Path) -> str | None:
    """A missing file may have been meant as parts."""
    return _offer() if not _is_file(path) and path not in shipped_hardware().values() else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no file has so long a name
        return False


def _refuse(place: str | Path, problems: list[str]) -> None:
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        hint = "the keys are those of `profile` in `fuyou bench --json`; sizes as 64GiB, rates as 21GB/s or 162TFLOPS"
        raise UsageError(f"{place} does not describe a machine, {count}:\n{listed}", hint=hint)


def on_described(loaded: LoadedRecipe, hardware: HardwareProfile) -> LoadedRecipe:
    """The recipe with the described machine's device. Raises UsageError where it pins another one."""
    offload = loaded.recipe.offload
    if offload.device not in ("auto", hardware.device):
        raise UsageError(
            f"offload.device: {offload.device}, but the described machine computes on {hardware.device}",
            hint="add offload.device=auto, or describe a machine without a GPU",
        )
    there = offload.model_copy(update={"device": hardware.device})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"offload": there}))
