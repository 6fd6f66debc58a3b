#!/usr/bin/env python3
"""Compares our AdamW with torch's fused AdamW and DeepSpeed's CPU Adam, and int8 states with float32 states.

Three comparisons run in one process. All sides use memory advised to huge pages. Samples are interleaved (A B C, A B C, ...):

    float32   one AdamW step of float32 weights and gradients, 28 bytes per parameter on every side
    one pass  bfloat16 weights, remainder, bfloat16 gradients and moments in one pass (26 bytes per parameter), beside
              torch's upcast of the gradients + fused step on float32 masters + copy back to bfloat16 weights
    int8 states  the same pass with int8 momentum and variance (14 bytes per parameter) beside float32 ones (26): on as many
              parameters as above, and on 262,144 a thread, which may stay in the last-level cache

A sample is quiet if other processes used less than 0.15 cores during it. Medians are over quiet samples if there are at least
three. Otherwise they are over all samples, and nothing is judged. Bars: 0.95 of the others' rate in float32, 1.3 times torch's
in one pass, 1.33 times that of float32 states.

--peers DIR: where DeepSpeed's operators were built (DIR/.bench/torch_ext); without DeepSpeed that side is not shown. Exit
codes: 0 every bar holds, 1 one was missed, 3 none was missed but one was not shown (no DeepSpeed, not quiet).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proof.verdicts import Row, at_least, commit, described, exit_code, in_words, missing, now, unless_noisy

from fuyou_cli.machine.measure.timing import BackgroundLoad

QUIET_CORES = 0.15
ENOUGH = 3  # quiet samples of a side, for its median to mean something
FLOAT32_BAR, ONE_PASS_BAR, INT8_BAR = 0.95, 1.3, 1 / 0.75
IN_CACHE = 262_144  # parameters of a thread
SAMPLE_SECONDS = 0.15
UNIT = 65536  # threads take multiples of it: tiles of int8 states
Step = Callable[[], None]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--params", type=int, default=50_003_968)
    parser.add_argument("--good", type=int, default=9, help="quiet samples wanted of each side")
    parser.add_argument("--max-seconds", type=float, default=120, help="per thread count and comparison")
    parser.add_argument("--peers", type=Path, help="folder with .bench/torch_ext, where DeepSpeed's operators are")
    parser.add_argument("--json", type=Path, help="append one line per result")
    return parser.parse_args()


class Memory:
    """Gives out tensors from one huge-page arena, beginning at its start."""

    def __init__(self, size: int) -> None:
        from fuyou_cli.swap.store import Arena

        self.arena, self.used = Arena(size), 0

    def tensor(self, count: int, dtype: object, scale: float) -> object:
        import torch

        size = count * torch.empty(0, dtype=dtype).element_size()
        flat = torch.frombuffer(self.arena.view(self.used, size), dtype=dtype)
        self.used += -(-size // (2 << 20)) * (2 << 20)
        flat.zero_()
        if scale:
            flat.copy_(torch.randn(count) * scale)
        return flat


def bytes_of(tensor: object) -> memoryview:
    import torch

    return memoryview(tensor.view(torch.uint8).numpy())


def our_step(
    threads: int, params: int, tensors: dict[str, object], weights: str, gradients: str, states: str = "float32"
) -> Step:
    """Runs one step over `threads` parts of the arrays, each on its own thread of this process. The caller's thread takes the
    first part, as with OpenMP on the other sides."""
    from fuyou_cli.spec.model import STATE_NAMES, StateLayout
    from fuyou_cli.swap import kernels
    from fuyou_cli.swap.native import Segment, Update

    layout = StateLayout(weights=weights, dtype=states)

    def part(name: str, tensor: object, first: int, count: int) -> memoryview:
        size = partial(layout.size, name) if name in STATE_NAMES else tensor.element_size().__mul__
        return bytes_of(tensor)[size(first) : size(first) + size(count)]

    pool = ThreadPoolExecutor(max(1, threads - 1))
    share = -(-params // threads // UNIT) * UNIT
    jobs = []
    for first in range(0, params, share):
        count = min(share, params - first)
        update = Update(
            params=count, weights_dtype=weights, gradients_dtype=gradients, weights=0, lr=1e-4, beta1=0.9, beta2=0.999,
            epsilon=1e-8, step=1, segments=(Segment(first=0, count=count, weight_decay=0.01),), states_dtype=states,
        )  # fmt: skip
        views = {name: part(name, tensor, first, count) for name, tensor in tensors.items()}
        jobs.append((update, views))
    steps = iter(range(1, 1 << 62))

    def step() -> None:
        number = next(steps)
        (first, first_views), *others = [(replace(update, step=number), views) for update, views in jobs]
        waited = [pool.submit(kernels.adamw, update, **views) for update, views in others]
        if kernels.adamw(first, **first_views) + sum(future.result() for future in waited):
            raise SystemExit("the benchmark's own weights went to infinity")

    return step


def peer_optimizer(kind: str, parameter: object) -> object:
    import torch

    if kind == "torch fused":
        return torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.01, adamw_mode=True)


def move_state(memory: Memory, optimizer: object, parameter: object) -> None:
    """Moves the optimizer's moments, which its first step makes, into huge pages as well."""
    state = optimizer.state[parameter]
    for name in ("exp_avg", "exp_avg_sq"):
        moved = memory.tensor(parameter.numel(), state[name].dtype, 0)
        moved.copy_(state[name])
        state[name] = moved


def float32_sides(threads: int, params: int, peers: list[str]) -> tuple[Memory, dict[str, Step]]:
    import torch

    memory = Memory((len(peers) + 1) * 4 * (4 * params + (2 << 20)))
    f32 = torch.float32
    tensors = {
        "weights": memory.tensor(params, f32, 0.01),
        "gradients": memory.tensor(params, f32, 0.001),
        "momentum": memory.tensor(params, f32, 0),
        "variance": memory.tensor(params, f32, 0),
    }
    sides = {"fuyou": our_step(threads, params, tensors, "float32", "float32")}
    for kind in peers:
        parameter = torch.nn.Parameter(memory.tensor(params, f32, 0.01))
        parameter.grad = memory.tensor(params, f32, 0.001)
        optimizer = peer_optimizer(kind, parameter)
        optimizer.step()
        move_state(memory, optimizer, parameter)
        sides[kind] = optimizer.step
    return memory, sides


def one_pass_sides(threads: int, params: int) -> tuple[Memory, dict[str, Step]]:
    import torch

    memory = Memory(14 * params + 22 * params + 16 * (2 << 20))
    f32, bf16 = torch.float32, torch.bfloat16
    tensors = {
        "weights": memory.tensor(params, bf16, 0.01),
        "remainder": memory.tensor(params, torch.int16, 0),
        "gradients": memory.tensor(params, bf16, 0.001),
        "momentum": memory.tensor(params, f32, 0),
        "variance": memory.tensor(params, f32, 0),
    }
    sides = {"fuyou": our_step(threads, params, tensors, "bfloat16", "bfloat16")}
    weights, gradients = memory.tensor(params, bf16, 0.01), memory.tensor(params, bf16, 0.001)
    master = torch.nn.Parameter(memory.tensor(params, f32, 0.01))
    master.grad = memory.tensor(params, f32, 0)
    optimizer = peer_optimizer("torch fused", master)
    optimizer.step()
    move_state(memory, optimizer, master)

    def step() -> None:
        master.grad.copy_(gradients)
        optimizer.step()
        with torch.no_grad():
            weights.copy_(master)

    sides["torch upcast + fused + copy back"] = step
    return memory, sides


def int8_sides(threads: int, params: int) -> tuple[Memory, dict[str, Step]]:
    import torch

    from fuyou_cli.spec.model import StateLayout

    memory, sides = Memory(24 * params + 32 * (2 << 20)), {}
    for name, states in (("fuyou", "int8"), ("float32 states", "float32")):
        layout = StateLayout(weights="bfloat16", dtype=states)
        tensors = {
            "weights": memory.tensor(params, torch.bfloat16, 0.01),
            "remainder": memory.tensor(params, torch.int16, 0),
            "gradients": memory.tensor(params, torch.bfloat16, 0.001),
            "momentum": memory.tensor(layout.size("momentum", params), torch.uint8, 0),
            "variance": memory.tensor(layout.size("variance", params), torch.uint8, 0),
        }
        sides[name] = our_step(threads, params, tensors, "bfloat16", "bfloat16", states)
    return memory, sides


def sample(step: Step) -> tuple[float, float]:
    """Returns seconds per step, and the cores that other processes used meanwhile."""
    others, begin, steps = BackgroundLoad(), time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - begin < SAMPLE_SECONDS:
        step()
        steps += 1
    return (time.perf_counter() - begin) / steps, others.cores()


def measure(sides: dict[str, Step], good: int, max_seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Takes rounds of one sample per side until each side has `good` quiet ones or time is up."""
    for step in sides.values():
        step()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    end = time.perf_counter() + max_seconds
    while time.perf_counter() < end and any(len(quiet_of(taken)) < good for taken in samples.values()):
        for name, step in sides.items():
            samples[name].append(sample(step))
    return samples


def quiet_of(samples: list[tuple[float, float]]) -> list[float]:
    return [seconds for seconds, others in samples if others < QUIET_CORES]


def report(title: str, threads: int, params: int, sizes: dict[str, int], bar: float, args: argparse.Namespace) -> list[Row]:
    """Measures and prints one comparison, with a row per other side."""
    import torch

    torch.set_num_threads(threads)
    if title == "one pass":
        memory, sides = one_pass_sides(threads, params)
    elif title.startswith("int8"):
        memory, sides = int8_sides(threads, params)
    else:
        memory, sides = float32_sides(threads, params, [name for name in sizes if name != "fuyou"])
    samples = measure(sides, args.good, args.max_seconds)
    print(f"\n{title}, {threads} thread{'s' if threads > 1 else ''}, {params / 1e6:.3g} M parameters")
    rates = print_sides(samples, params, sizes)
    rows = []
    for name in [name for name in samples if name != "fuyou"]:
        row = judge(name, rates, samples, bar)
        rows.append(row)
        if args.json:
            line = dict(comparison=title, threads=threads, params=params, peer=name, rates=rates, bar=bar, **row.values)
            line |= dict(date=now(), commit=commit(), verdict=row.verdict)
            with args.json.open("a") as file:
                file.write(json.dumps(line) + "\n")
    del sides
    _ = memory  # views end with the function; the arena goes with the process
    return rows


def print_sides(samples: dict[str, list[tuple[float, float]]], params: int, sizes: dict[str, int]) -> dict[str, float]:
    """Prints a line per side. Returns parameters per second by side."""
    rates = {}
    for name, taken in samples.items():
        quiet = quiet_of(taken)
        chosen = quiet if len(quiet) >= ENOUGH else [seconds for seconds, _ in taken]
        rates[name] = params / statistics.median(chosen)
        low, high = params / max(chosen), params / min(chosen)
        size = sizes[name]
        gigabytes = f"{rates[name] * size / 1e9:6.1f} GB/s at {size} B" if size else " " * 18
        note = "" if len(quiet) >= ENOUGH else "  NOT QUIET: other processes were busy"
        print(
            f"  {name:34s} {rates[name] / 1e9:5.2f} Gparam/s ({low / 1e9:.2f} to {high / 1e9:.2f})  {gigabytes}"
            f"  {len(quiet)} of {len(taken)} samples quiet{note}"
        )
    return rates


def judge(peer: str, rates: dict[str, float], samples: dict[str, list[tuple[float, float]]], bar: float) -> Row:
    """Prints our rate over the other side's. Judges the bar only if both sides were quiet."""
    ratio = rates["fuyou"] / rates[peer]
    noisy = any(len(quiet_of(samples[side])) < ENOUGH for side in ("fuyou", peer))
    row = unless_noisy(at_least(f"fuyou / {peer}", ratio, bar, values={"ratio": ratio}), [{"noisy": noisy}])
    print(f"  {row.what}: {ratio:.2f}x (bar {bar:.3g}: {in_words(row)})")
    return row


def main() -> int:
    args = arguments()
    if args.peers:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(args.peers / ".bench" / "torch_ext"))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from importlib.util import find_spec

    from fuyou_cli.swap import kernels

    print(described())
    print(kernels.build_info())
    peers = ["torch fused"]
    rows: list[Row] = []
    if find_spec("deepspeed"):
        peers.append("DeepSpeed CPU Adam")
    else:
        print("DeepSpeed is not installed: compared with torch alone")
        rows.append(missing("fuyou / DeepSpeed CPU Adam", f">= {FLOAT32_BAR}", "not installed"))
    params = args.params // UNIT * UNIT
    for threads in args.threads:
        rows += report("float32", threads, params, dict.fromkeys(["fuyou", *peers], 28), FLOAT32_BAR, args)
        sizes = {"fuyou": 26, "torch upcast + fused + copy back": 0}
        rows += report("one pass", threads, params, sizes, ONE_PASS_BAR, args)
        sizes = {"fuyou": 14, "float32 states": 26}
        rows += report("int8 states", threads, params, sizes, INT8_BAR, args)
        rows += report("int8 states in cache", threads, threads * IN_CACHE, sizes, INT8_BAR, args)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
