"""Whose figures the rates of a described machine are: published as measured, a specification, an assumption, or written in
a file by whoever described it.

A profile's `sources` say so in words for people, one line each: "<part> <what>: <whose figure>". A line that a file adds is
"<key>: given in <file>"; one about a number of drives ("6 p5510: interpolated ...") is about every rate of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from fuyou_cli.spec.hardware import BURST_RATES, STORE_RATES, SUSTAINED_RATES, HardwareProfile

Origin = Literal["measured", "given", "specification", "assumption"]  # from the best to the least known

_GIVEN = "given in "
# What is said together: its name, the profile's keys, and the word by which a source names it.
_RATES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("compute", ("matmul_flops",), "compute"),
    ("compute of stages", ("stage_rates",), "compute"),
    ("store read, write", BURST_RATES[:2], "read (and|or) write"),
    ("store, both at once", BURST_RATES[2:], "while both"),
    ("store, sustained", SUSTAINED_RATES, "sustained"),
    ("AdamW, one thread", ("adamw",), "AdamW"),
    ("to GPU, back", ("h2d", "d2h"), "PCIe"),
)
_DRIVES = re.compile(r"^\d+ \S+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedBy:
    """Rates that one source speaks of. FLOPs per second where `flops`, else bytes."""

    what: str
    keys: tuple[str, ...]
    values: tuple[float, ...]
    flops: bool
    origin: Origin
    source: str


def given_in(name: str, keys: Collection[str]) -> tuple[str, ...]:
    """The source lines of a file that gives these keys."""
    rated = [key for _, together, _ in _RATES for key in together]
    return tuple(f"{key}: {_GIVEN}{name}" for key in rated if key in keys)


def origins_of(hardware: HardwareProfile) -> tuple[RatedBy, ...]:
    """Of every rate that is known, in a fixed order."""
    return tuple(_known(hardware))


def _known(hardware: HardwareProfile) -> Iterator[RatedBy]:
    for what, keys, word in _RATES:
        values = tuple(value for key in keys for value in _values(hardware, key))
        if not any(values) or (keys == SUSTAINED_RATES and not hardware.slows_down):
            continue
        said = _sources(hardware, keys, word)
        origin = max((_origin(text) for text in said), key=_ORDER.index)
        flops = keys[0] in ("matmul_flops", "stage_rates")
        yield RatedBy(what=what, keys=keys, values=values, flops=flops, origin=origin, source="; ".join(said))


def _values(hardware: HardwareProfile, key: str) -> tuple[float, ...]:
    if key == "adamw":
        return (hardware.adamw_bytes,)
    if key == "stage_rates":
        return tuple(rate.backward for rate in hardware.stage_rates)[:1]
    return (getattr(hardware, key),)


def _sources(hardware: HardwareProfile, keys: tuple[str, ...], word: str) -> list[str]:
    """What was said of these rates, the file's word before the part's."""
    parted = [source.partition(": ") for source in hardware.sources]
    given = [text for subject, _, text in parted if subject in keys]
    if len(given) == len(keys) and given:
        return list(dict.fromkeys(given))
    about = [text for subject, _, text in parted if text and re.search(rf"\b{word}\b", subject)]
    grown = [text for subject, _, text in parted if keys[0] in STORE_RATES and _DRIVES.match(subject)]
    if not about and not given:
        whole = [subject for subject, separator, _ in parted if not separator]  # of all: "fuyou bench, quick"
        about = whole[:1] or [f"{_GIVEN}{hardware.name}" if hardware.name else "nobody says"]
    return list(dict.fromkeys([*given, *about[:1], *grown]))


def _origin(text: str) -> Origin:
    if "assumption" in text or "interpolated" in text or text == "nobody says":
        return "assumption"
    if "specification" in text:
        return "specification"
    return "given" if text.startswith(_GIVEN) else "measured"


_ORDER: tuple[Origin, ...] = ("measured", "given", "specification", "assumption")
