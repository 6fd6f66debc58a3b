"""The disk that power cuts are replayed on: a writer that flushes all it must loses nothing, and one flush less is noticed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from proof.disk_model import Left, rebuild
from proof.shim import Call, Trace, build, namings, preloaded

CUTS, STATES, PAGE = 150, 8, 4096
# Every state goes to one of two places of a file; then a small file says which is the newest. argv[2]: what is left out.
WRITER = f"""
import os, sys
root, without = sys.argv[1:]

def flush(path, what, flags=os.O_RDONLY):
    if what != without:
        descriptor = os.open(path, flags)
        os.fsync(descriptor)
        os.close(descriptor)

os.makedirs(f"{{root}}/run")
flush(root, "name of the folder")
store = os.open(f"{{root}}/run/store.bin", os.O_RDWR | os.O_CREAT)
os.posix_fallocate(store, 0, {2 * PAGE})
for state in range(1, {STATES}):
    os.pwrite(store, bytes([state]) * {PAGE}, state % 2 * {PAGE})
    flush(f"{{root}}/run/store.bin", "data", os.O_RDWR)
    new = os.open(f"{{root}}/run/.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(new, f"{{state:04d}}".encode() * 512)
    os.close(new)
    flush(f"{{root}}/run/.new", "manifest", os.O_RDWR)
    if state > 1:
        os.link(f"{{root}}/run/manifest.json", f"{{root}}/run/.before")
        os.rename(f"{{root}}/run/.before", f"{{root}}/run/before")
    os.rename(f"{{root}}/run/.new", f"{{root}}/run/manifest.json")
    flush(f"{{root}}/run", "names")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim"))


def _log(folder: Path, library: Path, without: str) -> tuple[list[Call], Path]:
    root, kept = folder / "disk", folder / "written"
    root.mkdir()
    trace = Trace(folder / "trace", root, capacity=1 << 12)
    environment = preloaded({"PATH": "", **trace.environment(kept=kept)}, library)
    subprocess.run([sys.executable, "-S", "-c", WRITER, str(root), without], env=environment, check=True)
    return sorted(trace.calls(), key=lambda call: call.begin), kept


def _lost(folder: Path, calls: list[Call], kept: Path) -> tuple[list[str], Left]:
    """Returns what is wrong on the disks that are left, and what was done to them."""
    problems, total, ends = [], Left(), [flush.end for _, flush in namings(calls, "manifest.json")]
    draw = random.Random(1)
    for number in range(CUTS):
        root = folder / f"cut{number}"
        root.mkdir()
        at = draw.randint(1, max(call.end for call in calls))
        left = rebuild(root, calls, kept, at=at, draw=draw)
        total.torn += left.torn
        total.missing += left.missing
        total.written += left.written
        total.names_missing += left.names_missing
        problems += _problems(root / "run", sum(end <= at for end in ends))
    return problems, total


def _problems(run: Path, least: int) -> list[str]:
    if not (run / "manifest.json").exists():
        return [f"state {least} is gone"] if least else []
    text = (run / "manifest.json").read_bytes()
    if not text[:4].isdigit() or text != text[:4] * 512:
        return ["the manifest is damaged"]
    state = int(text[:4])
    place = state % 2 * PAGE
    whole = (run / "store.bin").read_bytes()[place : place + PAGE] == bytes([state]) * PAGE
    return [f"state {state}, not {least}"] * (state < least) + [f"state {state} is not whole"] * (not whole)


def test_who_flushes_everything_loses_nothing(tmp_path: Path, library: Path) -> None:
    calls, kept = _log(tmp_path, library, "")
    problems, left = _lost(tmp_path, calls, kept)
    assert problems == []
    assert min(left.torn, left.missing, left.written, left.names_missing) > 0


@pytest.mark.parametrize("without", ["data", "manifest", "name of the folder"])
def test_a_flush_left_out_is_noticed(without: str, tmp_path: Path, library: Path) -> None:
    problems, _ = _lost(tmp_path, *_log(tmp_path, library, without))
    assert problems


def test_a_name_that_was_never_flushed_may_go(tmp_path: Path, library: Path) -> None:
    """Nobody was promised any state, and after some cuts there is none."""
    calls, kept = _log(tmp_path, library, "names")
    assert list(namings(calls, "manifest.json")) == []
    at = max(call.end for call in calls)
    found = set()
    for number in range(40):
        root = tmp_path / f"cut{number}"
        root.mkdir()
        rebuild(root, calls, kept, at=at, draw=random.Random(number))
        found.add((root / "run" / "manifest.json").exists())
    assert found == {True, False}


def test_what_was_there_before_stays(tmp_path: Path, library: Path) -> None:
    """The log of a second process, on what the first left."""
    calls, kept = _log(tmp_path, library, "")
    base, root = tmp_path / "disk", tmp_path / "again"
    root.mkdir()
    trace = Trace(tmp_path / "second", base, capacity=1 << 10)
    program = f"import os; f = os.open('{base}/run/store.bin', os.O_RDWR); os.pwrite(f, b'x' * {PAGE}, {PAGE}); os.fsync(f)"
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", str(base), str(copy)], check=True)
    environment = preloaded({"PATH": "", **trace.environment(kept=tmp_path / "more")}, library)
    subprocess.run([sys.executable, "-S", "-c", program], env=environment, check=True)
    more = trace.calls()
    rebuild(root, more, tmp_path / "more", at=max(call.end for call in more), draw=random.Random(1), base=copy)
    state = (copy / "run" / "store.bin").read_bytes()
    assert (root / "run" / "store.bin").read_bytes() == state[:PAGE] + b"x" * PAGE
    assert (root / "run" / "manifest.json").read_bytes() == (copy / "run" / "manifest.json").read_bytes()
    assert calls and kept.exists()
