#!/usr/bin/env python3
"""Compares the daemon's I/O, through its public API, with fio's io_uring engine on the same file.

Both sides move the same bytes of the same written file with O_DIRECT, with equal block sizes and requests in flight. Both use
about as much memory in huge pages: where the host of a virtual machine caches the disk, eight hot MiB are written a tenth
faster than a hundred. Pairs alternate their order. The modes are reads, writes, and both at once. CPU is what the kernel
charges: for us the whole process with all its threads; for fio its own report of its I/O threads, without its start and without
making its data.

Bars: a median ratio of bytes/s of at least 0.95, and at most 1.2 times fio's CPU-seconds per GB. If other processes were busy,
the ratios are printed and not judged. This needs fio (apt-get install fio); without it our side runs alone. Exit codes: 0 every
bar holds, 1 one was missed, 3 none was missed but one was not shown (no fio, not quiet).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proof.verdicts import Row, at_least, at_most, commit, described, exit_code, in_words, missing, now, unless_noisy

from fuyou_cli.core.units import MiB, parse_size
from fuyou_cli.machine.measure.timing import BackgroundLoad
from fuyou_cli.swap.daemon import DaemonOptions, SwapDaemon
from fuyou_cli.swap.store import Arena, Store

SPAN = 16 * MiB  # three of them beside the 32 MiB that fio cycles through at the default depth
MODES = ("read", "write", "both")
OUTSTANDING = 3  # of our requests: one always waits behind the one under way
RATE_BAR, CPU_BAR = 0.95, 1.2
QUIET_CORES = 0.25  # used by others during a pair; some of it is the kernel working for us


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Holds bytes per second and CPU-seconds per GB of one run."""

    rate: float
    cpu: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Holds one run of each side, taken right after each other, and the cores that others used meanwhile."""

    mine: Sample
    theirs: Sample | None
    others: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), help="folder on the disk to measure (default: here)")
    parser.add_argument("--size", default="4GiB", help="of the file")
    parser.add_argument("--block", default="1MiB", help="bytes of one I/O")
    parser.add_argument("--depth", type=int, default=32, help="I/Os in flight per direction")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--backend", choices=("auto", "io_uring", "threads"), default="auto")
    parser.add_argument("--json", type=Path, help="append one line per mode")
    return parser.parse_args()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fill(daemon: SwapDaemon, arena: Arena, size: int) -> None:
    """Fills the arena, and through it the whole file, with random bytes: the extents are written and do not compress."""
    memory = np.frombuffer(arena.view(0, arena.size), np.uint64)
    memory[:] = np.random.default_rng(0).integers(0, 1 << 63, memory.size, dtype=np.uint64)
    for offset in range(0, size, SPAN):
        daemon.wait(daemon.write(0, offset, min(SPAN, size - offset)))


def spans(mode: str, size: int) -> Iterator[tuple[str, int, int]]:
    """Yields (operation, store offset, size) once over the file. For both at once, the first half is read while the second is
    written."""
    if mode != "both":
        for offset in range(0, size, SPAN):
            yield mode, offset, min(SPAN, size - offset)
        return
    half = size // 2 // SPAN * SPAN
    for offset in range(0, half, SPAN):
        yield "read", offset, SPAN
        yield "write", half + offset, SPAN


def ours(daemon: SwapDaemon, mode: str, size: int, arena_spans: int) -> Sample:
    """Moves the file through the daemon, with enough requests outstanding that it is never idle."""
    waiting: deque[int] = deque()
    moved = 0
    cpu, begin = cpu_seconds(), time.perf_counter()
    for turn, (operation, offset, length) in enumerate(spans(mode, size)):
        if len(waiting) == arena_spans:
            daemon.wait(waiting.popleft())
        submit = daemon.read if operation == "read" else daemon.write
        waiting.append(submit(turn % OUTSTANDING * SPAN, offset, length))
        moved += length
    while waiting:
        daemon.wait(waiting.popleft())
    seconds = time.perf_counter() - begin
    return Sample(rate=moved / seconds, cpu=(cpu_seconds() - cpu) / (moved / 1e9))


def fio(path: Path, mode: str, size: int, block: int, depth: int) -> Sample:
    """Moves the same bytes by fio: one job, or a reading and a writing one side by side."""
    common = [
        "fio", "--output-format=json", "--thread", "--ioengine=io_uring", "--direct=1", f"--bs={block}",
        f"--iodepth={depth}", f"--filename={path}", "--mem=malloc", "--scramble_buffers=0", "--iomem_align=2m",
    ]  # fmt: skip
    half = size // 2 // SPAN * SPAN
    jobs = {
        "read": ["--name=r", "--rw=read", f"--size={size}"],
        "write": ["--name=w", "--rw=write", "--overwrite=1", f"--size={size}"],
        "both": [
            "--name=r", "--rw=read", f"--size={half}", "--name=w", "--rw=write", "--overwrite=1", f"--offset={half}",
            f"--size={half}",
        ],
    }  # fmt: skip
    # fio's own memory in huge pages, as ours is: glibc advises what malloc maps.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    out = subprocess.run([*common, *jobs[mode]], capture_output=True, text=True, check=False, env=environment)
    if out.returncode:
        raise SystemExit(f"fio failed: {out.stderr or out.stdout}")
    reports = json.loads(out.stdout[out.stdout.index("{") :])["jobs"]
    moved = sum(report[way]["io_bytes"] for report in reports for way in ("read", "write"))
    milliseconds = max(report[way]["runtime"] for report in reports for way in ("read", "write"))
    cpu = sum((report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1000 for report in reports)
    return Sample(rate=moved / (milliseconds / 1000), cpu=cpu / (moved / 1e9))


def describe(name: str, samples: list[Sample]) -> str:
    rates = [sample.rate / 1e9 for sample in samples]
    return (
        f"  {name:6s} {statistics.median(rates):5.2f} GB/s ({min(rates):.2f} to {max(rates):.2f}), "
        f"{statistics.median(sample.cpu for sample in samples) * 1000:.1f} CPU-ms per GB"
    )


def take_pair(mode: str, daemon: SwapDaemon, path: Path, size: int, args: argparse.Namespace, turn: int) -> Pair:
    """Runs both sides once. The order alternates."""
    with_fio = shutil.which("fio") is not None
    taken: dict[str, Sample | None] = {"fuyou": None, "fio": None}
    others = BackgroundLoad()
    for side in ("fuyou", "fio") if turn % 2 else ("fio", "fuyou"):
        if side == "fuyou":
            taken[side] = ours(daemon, mode, size, OUTSTANDING)
        elif with_fio:
            taken[side] = fio(path, mode, size, parse_size(args.block), args.depth)
    mine = taken["fuyou"]
    assert mine is not None
    return Pair(mine=mine, theirs=taken["fio"], others=others.cores())


def compare(mode: str, daemon: SwapDaemon, path: Path, size: int, args: argparse.Namespace) -> list[Row]:
    """Measures and prints one mode, and judges its bars."""
    pairs = [take_pair(mode, daemon, path, size, args, turn) for turn in range(1 + args.pairs)][1:]  # the first warms up
    while sum(pair.others < QUIET_CORES for pair in pairs) < args.pairs and len(pairs) < 4 * args.pairs:
        pairs.append(take_pair(mode, daemon, path, size, args, len(pairs)))
    return judge(mode, pairs, args)


def judge(mode: str, pairs: list[Pair], args: argparse.Namespace) -> list[Row]:
    """Prints the quiet pairs if there are enough. Otherwise prints all of them and judges nothing."""
    quiet = [pair for pair in pairs if pair.others < QUIET_CORES]
    chosen = quiet if len(quiet) >= args.pairs else pairs
    note = "" if len(quiet) >= args.pairs else " (NOT QUIET: other processes were busy)"
    print(f"\n{mode}: {len(chosen)} of {len(pairs)} pairs, {args.block} blocks, {args.depth} in flight{note}")
    mine = [pair.mine for pair in chosen]
    theirs = [pair.theirs for pair in chosen if pair.theirs is not None]
    print(describe("fuyou", mine))
    if not theirs:
        print("  fio is not installed: our side alone")
        return [missing(f"{mode}: rate", f">= {RATE_BAR}", "no fio"), missing(f"{mode}: CPU", f"<= {CPU_BAR}", "no fio")]
    print(describe("fio", theirs))
    ratio = statistics.median(a.rate / b.rate for a, b in zip(mine, theirs, strict=True))
    cpu = statistics.median(a.cpu for a in mine) / statistics.median(b.cpu for b in theirs)
    noise = [{"noisy": len(quiet) < args.pairs}]
    rate_row = unless_noisy(at_least(f"{mode}: rate", ratio, RATE_BAR), noise)
    cpu_row = unless_noisy(at_most(f"{mode}: CPU", cpu, CPU_BAR), noise)
    print(f"  fuyou / fio: rate {ratio:.2f}x (bar {RATE_BAR}: {in_words(rate_row)})")
    print(f"  fuyou / fio: CPU  {cpu:.2f}x (bar {CPU_BAR}: {in_words(cpu_row)})")
    if args.json:
        line = dict(
            date=now(), commit=commit(), mode=mode, pairs=len(chosen), quiet=len(quiet), block=parse_size(args.block),
            depth=args.depth, rate_ratio=ratio, rate=rate_row.verdict, cpu_ratio=cpu, cpu=cpu_row.verdict,
        )  # fmt: skip
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return [rate_row, cpu_row]


def main() -> int:
    args = arguments()
    rows: list[Row] = []
    print(described())
    size = parse_size(args.size) // SPAN * SPAN
    block = parse_size(args.block)
    path = args.dir / "bench_io.bin"
    options = DaemonOptions(backend=args.backend, read_depth=args.depth, write_depth=args.depth, block_size=block)
    path.unlink(missing_ok=True)  # this script's own file, of an interrupted run
    try:
        with (
            Arena(OUTSTANDING * SPAN) as arena,
            Store.open([path], stripe=SPAN, size=size, create=True) as store,
            SwapDaemon(arena, store, options) as daemon,
        ):
            print(f"{daemon.backend}: {daemon.description}; direct I/O: {'yes' if store.direct else 'NO'}")
            fill(daemon, arena, size)
            store.sync()
            for mode in args.modes:
                rows += compare(mode, daemon, path, size, args)
    finally:
        path.unlink(missing_ok=True)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
