"""Parses and formats bytes, rates and times. No other place formats a size.

Memory is shown in binary units (GiB), traffic and drive wear in decimal units (GB, TB), as vendors rate them.
"""

from __future__ import annotations

import re

MiB, GiB = 1 << 20, 1 << 30
LARGEST_SIZE = 1 << 62  # bytes; anything above is a typo, and overflows the store's addresses
LONGEST_TIME = 3650 * 86400  # seconds; a run of more than ten years is a typo too
LARGEST_RATE = 1e21  # per second; no machine comes near it, and no result computed from it overflows

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMGTP]i?B|B)?\s*$")
_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMGTP]i?)?(B/s|FLOPS|FLOP/s)\s*$")
_TIME = re.compile(r"^\s*(?:(\d{1,9})d)?\s*(?:(\d{1,9})h)?\s*(?:(\d{1,9})m)?\s*(?:(\d{1,9})s)?\s*$")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FACTOR = {None: 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _FACTOR[f"{_letter}B"] = 1000**_power
    _FACTOR[f"{_letter}iB"] = 1024**_power
_FACTOR |= {"kB": _FACTOR["KB"], "kiB": _FACTOR["KiB"]}  # as `gb` writes it


def parse_size(text: str | int) -> int:
    """Parses "2GiB", "1.5TB", "4096" or a plain number into bytes. Raises ValueError that names the accepted forms."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError("a size must not be negative")
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 2GiB, 512MiB, 1.5TB or a number of bytes")
    try:
        return int(float(match[1]) * _FACTOR[match[2]])
    except OverflowError:
        raise ValueError("a size has too many digits") from None


def parse_rate(text: str | int | float, unit: str) -> float:
    """Parses "21GB/s" (if `unit` is B/s), "162TFLOPS" (if it is FLOP/s) or a plain number. Raises ValueError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text <= LARGEST_RATE:
            raise ValueError(f"a rate must be a number from 0 to {LARGEST_RATE:.0e}")
        return float(text)
    match = _RATE.match(text) if isinstance(text, str) else None
    if match is None or (match[3] == "B/s") != (unit == "B/s"):
        example = "21GB/s or 3.5GiB/s" if unit == "B/s" else "162TFLOPS"
        raise ValueError(f"{text!r} is not a rate in {unit}: write {example}, or a number")
    prefix = match[2] or ""
    rate = float(match[1]) * _FACTOR[f"{prefix}B"]
    if rate > LARGEST_RATE:
        raise ValueError(f"a rate must be at most {LARGEST_RATE:.0e} {unit}")
    return rate


def parse_time(text: str) -> int:
    """Parses "8h", "90m", "1h30m", "45s" or "2d" into seconds. Raises ValueError that names the accepted forms."""
    match = _TIME.match(text)
    if match is None or not any(match.groups()):
        raise ValueError(f"{text!r} is not a time: write 8h, 90m, 1h30m, 45s or 2d")
    return sum(int(number) * _SECONDS[unit] for number, unit in zip(match.groups(), "dhms", strict=True) if number)


def format_time(seconds: int) -> str:
    """Formats seconds so that `parse_time` reads them back: 5400 is "1h30m"."""
    parts, left = [], seconds
    for unit, size in _SECONDS.items():
        number, left = divmod(left, size)
        parts += [f"{number}{unit}"] if number else []
    return "".join(parts) or "0s"


def align_up(value: int, unit: int) -> int:
    """Rounds up to a multiple of `unit`."""
    return -(-value // unit) * unit


def gib(size: int | float) -> str:
    """Formats memory: "1.84 GiB", or "612 MiB" below one GiB."""
    if abs(size) >= GiB:
        return f"{size / GiB:.2f} GiB"
    return f"{size / MiB:.0f} MiB"


def gb(size: int | float) -> str:
    """Formats traffic and wear in decimal units: "28.6 GB", "1.49 TB", "512 MB"."""
    for factor, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(size) >= factor:
            return f"{size / factor:.3g} {name}" if abs(size) < 1000 * factor else f"{size / factor:,.0f} {name}"
    return f"{size:.0f} B"


def count(value: int | float) -> str:
    """Formats parameters: "1.10 B", "44.0 M"."""
    for factor, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {name}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Formats seconds: "850 ms", "12.3 s", "4m 05s", "3h 12m", "5d 19h"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {secs:02d}s"


def brief(seconds: float) -> str:
    """Formats a duration. For a tiny model's step it shows the first digits, not "0 ms"."""
    if 0 < seconds < 1e-5:
        return "< 0.01 ms"
    return f"{1000 * seconds:.2g} ms" if 0 < seconds < 0.01 else duration(seconds)


def in_steps(size: int, whole: int) -> int:
    """Rounds `size` down in steps of 1/128 to 1/256 of `whole`, so that similar sizes give the same result."""
    step = 1 << max(0, whole.bit_length() - 8)
    return size // step * step
