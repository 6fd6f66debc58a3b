"""What gpu_check asks of a machine, stage by stage, most valuable first. Each runs in a process of its own (`stage_main`)."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proof.both_sides import FUYOU, child_environment, fuyou_on
from proof.verdicts import ROOT, at_least, at_most, holds, missing, reported

from fuyou_cli.core.units import GiB, MiB, gib, parse_size
from fuyou_cli.machine.profile import core_count

from .card_runs import STACK_LINES, Case, Place, deepspeed, end_of, end_with_stacks, finetune, in_memory, settled, write_recipe
from .pinning import pin
from .record import Record

SAME_LOSS = 2e-3  # relative, of the first step: the same rows and weights, bf16 on both sides
TO_END = 4.0  # seconds before its limit at which a stage ends what it runs
HANGS = 40  # seconds after which a test on a GPU has failed, and the others go on
WORKERS = 4  # processes that share the tests, each with a context of its own
WARM_UP = 2  # steps: the second runs the first update that was deferred


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes of everything: those of a GPU worth looking at, or toys for the emulated one."""

    length: int
    micro: int | None
    blocks: tuple[tuple[str, str, int], ...]  # shapes of Llama-8B's layers, in words, and the disk that a run of it takes
    small: str  # shape of 1 B
    steps: int
    few: int  # rows of a step: 8k tokens
    many: int  # 32k tokens
    gpu: str  # offload.max_memory.gpu of the machines that people have
    pinned: tuple[int, ...]
    text_rows: int
    fixed: tuple[tuple[str, object], ...] = ()  # of the recipe's offload section


# A checkpoint of 2 bytes a parameter, a store of 24 (two extents), and what else is written.
BLOCKS = (("llama8b-8", "eight layers", 56 * 10**9), ("llama8b-4", "four layers (no disk for eight)", 33 * 10**9))
FULL = Scale(
    length=2048, micro=None, blocks=BLOCKS, small="1.1b", steps=5, few=4, many=16, gpu="24GB", pinned=(8 * GiB, 64 * GiB),
    text_rows=6000,
)  # fmt: skip
# The search looks at every plan of a small model, which takes longer than to run it: little is left to it. Nor is the machine
# measured for a toy, which takes longer than all its stages: stage bench shows that it can be.
TOY = Scale(
    length=64, micro=2, blocks=(("1m", "a toy", 0),), small="1m", steps=4, few=2, many=4, gpu="1GB", pinned=(8 * MiB, 64 * MiB),
    text_rows=400, fixed=(("lookahead", 2), ("defer_updates", 0), ("activations", "recompute"), ("measure", False)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Of the process of one stage."""

    work: Path
    device: str
    record: Record
    until: float = math.inf  # of the monotonic clock: runs are ended then, so that what they did is kept

    @property
    def scale(self) -> Scale:
        return FULL if self.device == "cuda" else TOY

    @property
    def place(self) -> Place:
        scale = self.scale
        return Place(
            work=self.work, device=self.device, length=scale.length, text_rows=scale.text_rows, until=self.until,
            micro=scale.micro,
            fixed=dict(scale.fixed),
        )  # fmt: skip

    @property
    def block(self) -> tuple[str, str]:
        """The shape that runs are of, and its words: the first that the disk has room for, and then always that one."""
        blocks = self.scale.blocks
        made = [block for block in blocks if (self.work / "models" / block[0]).exists()]
        free = shutil.disk_usage(self.work).free
        fitting = [block for block in blocks if block[2] <= free]
        return (made or fitting or blocks[-1:])[0][:2]

    def ours(self, what: str, case: Case, **named: Any) -> dict[str, Any] | None:
        """A run of our side, kept; None, with a line that says why, where it did not do its steps."""
        result = finetune(self.place, case, **named)
        self.record.keep(what, result)
        if result.get("failed"):
            self.record.add(holds(f"{what}: runs", "ends well", "no", False, note=str(result["failed"])))
            if len(result["steps"]) > WARM_UP:
                _speed(self, what, result)
            return None
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    name: str
    what: str
    limit: float  # seconds
    run: Callable[[Context], None]


# ---- the machine -----------------------------------------------------------------------------------------------------


def doctor(context: Context) -> None:
    done = _command(context, [*FUYOU, "doctor", "--json", "--dir", str(context.work)])
    found = json.loads(done.stdout) if done.stdout.startswith(("{", "[")) else done.stdout + done.stderr
    context.record.keep("doctor", found)
    context.record.add(holds("doctor", "exit code 0", str(done.returncode), done.returncode == 0, note=_problems(found)))


def _problems(found: Any) -> str:
    checks = found.get("checks", []) if isinstance(found, dict) else []
    return "; ".join(f"{one['name']}: {one['found']}" for one in checks if one["status"] == "problem")


def pinning(context: Context) -> None:
    for size in context.scale.pinned:
        context.record.add(pin(size, context.device))


def bench(context: Context) -> None:
    _bench(context, Case(shape=context.block[0], rows=context.scale.many, steps=1))


def _bench(context: Context, case: Case) -> None:
    """Measures the machine for this case's recipe. Runs after it are planned with these rates."""
    done = _command(context, [*fuyou_on(context.device), "bench", str(write_recipe(context.place, case)), "--quick", "--json"])
    if done.returncode != 0:
        context.record.add(holds("bench", "exit code 0", str(done.returncode), False, note=done.stderr[-2000:]))
        return
    found = json.loads(done.stdout)
    context.record.keep("bench", found)
    for rate in found.get("rates", []):
        context.record.add(reported(str(rate.get("name", "?")), f"{rate.get('value', 0):.4g} {rate.get('unit', '')}"))
    context.record.add(holds("bench", "exit code 0", "0", True))


def _command(context: Context, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    everything = child_environment() | context.place.environment | environment
    return subprocess.run(command, env=everything, capture_output=True, text=True, check=False, cwd=ROOT)


# ---- the tests -------------------------------------------------------------------------------------------------------


def tests(context: Context) -> None:
    _tests(context, "gpu tests", _files_for_gpu())


def tests_blocking(context: Context) -> None:
    """The same with every launch waited for: what fails only without it is a race. The emulated device always waits: there
    one file of tests tries the stage."""
    files = _files_for_gpu() if context.device == "cuda" else [f for f in _files_for_gpu() if f.endswith("test_devices.py")]
    _tests(context, "gpu tests, blocking launches", files, CUDA_LAUNCH_BLOCKING="1")


def _files_for_gpu() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py")) if _of_gpu(path)]


def _tests(context: Context, what: str, files: Sequence[str], **environment: str) -> None:
    chosen = ["-m", "gpu"] if context.device == "cuda" else ["-m", "not gpu and not slow", "-k", "emulated"]
    output = context.work / "tests.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *chosen, *files]
    if context.device == "cuda":  # the limit is a signal: it tells the stacks of all threads
        command += [f"--timeout={HANGS}", *(["-n", str(WORKERS)] if core_count() >= 2 * WORKERS else [])]
    everything = child_environment() | environment
    with (
        output.open("wb") as file,
        subprocess.Popen(command, env=everything, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT) as child,
    ):
        try:
            code = child.wait(max(1.0, context.until - time.monotonic()) if context.until < math.inf else None)
            how = ""
        except subprocess.TimeoutExpired:
            end_with_stacks(child)
            code, how = child.returncode, "ended by the stage's limit"
    counts, failed = counted(output.read_text(errors="replace"))
    context.record.keep(what, {"exit": code, **counts, "failed": failed, "end": end_of(output, STACK_LINES)})
    text = ", ".join(f"{number} {name}" for name, number in counts.items())
    note = "; ".join(filter(None, (how, *failed))) or ("" if code == 0 else end_of(output))
    context.record.add(holds(what, "all pass", text or "none ran", code == 0 and counts.get("passed", 0) > 0, note=note))


def _of_gpu(path: Path) -> bool:
    return re.search(r"\bmark\.gpu\b", path.read_text(encoding="utf-8")) is not None


def counted(output: str) -> tuple[dict[str, int], list[str]]:
    """Of what `pytest -v` wrote, in one process or several, which need not have come to its end: how many tests passed, failed
    and were skipped; the names of those that failed, and of any that had begun."""
    alone = r"^(\S+::.*?)(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*| Fatal Python error.*| *)$"
    found = {name: verdict for name, verdict in re.findall(alone, output, flags=re.MULTILINE)}
    for verdict, name in re.findall(r"^\[gw\d+\] \[ *\d+%\] (\w+) (\S+::.*?)(?: Fatal.*| *)$", output, flags=re.MULTILINE):
        found[name] = verdict
    verdicts = Counter(found.values())
    bad = [(name.partition("::")[2], verdict) for name, verdict in found.items() if verdict not in ("PASSED", "SKIPPED")]
    failed = [name if verdict else f"{name} did not end" for name, verdict in bad]
    counts = {"passed": verdicts["PASSED"], "failed": len(failed), "skipped": verdicts["SKIPPED"]}
    return (counts, failed) if found else ({}, [])


# ---- runs ------------------------------------------------------------------------------------------------------------


def few_tokens(context: Context) -> None:
    _beside_memory(context, context.scale.few)


def many_tokens(context: Context) -> None:
    _beside_memory(context, context.scale.many)


def _beside_memory(context: Context, rows: int, *, gpu: str | None = None) -> None:
    """Predicted beside measured beside plain PyTorch with everything on the GPU, and the same losses."""
    shape, layers = context.block
    case = Case(shape=shape, rows=rows, steps=context.scale.steps, gpu=gpu)
    what = f"{layers}, {rows * context.scale.length:,} tokens a step" + (f", max_memory.gpu {gpu}" if gpu else "")
    if (ours := context.ours(what, case)) is None:
        return
    _speed(context, what, ours)
    if gpu:
        _gpu_peak(context, what, ours)
    theirs = in_memory(context.place, case, micro=_micro(ours, context))
    context.record.keep(f"{what}, in memory", theirs)
    asked = f"<= {SAME_LOSS:g}"
    if theirs.get("failed"):
        why = "too large for this GPU's memory" if theirs["too_large"] else str(theirs["failed"])
        context.record.add(missing(f"{what}: first loss beside plain PyTorch, relative difference", asked, why))
        return
    seconds = [settled(side, WARM_UP) for side in (ours, theirs)]
    context.record.add(
        reported(
            f"{what}: speed, ours / plain PyTorch",
            f"{seconds[1] / seconds[0]:.3f}",
            note=f"{seconds[0]:.3f} and {seconds[1]:.3f} s a step",
        )
    )
    losses = [[step["loss"] for step in side["steps"]] for side in (ours, theirs)]
    apart = [abs(our / their - 1) for our, their in zip(*losses, strict=True)]
    note = f"all steps: {', '.join(f'{one:.1e}' for one in apart)}"
    context.record.add(at_most(f"{what}: first loss, relative difference", apart[0], SAME_LOSS, note=note))


def _speed(context: Context, what: str, ours: dict[str, Any]) -> None:
    seconds, predicted = settled(ours, WARM_UP), float(ours["plan"].get("predicted_step_seconds", 0.0))
    tokens = ours["steps"][-1]["batch_tokens"]
    stalls = sorted(ours["steps"][-1]["stalls"].items(), key=lambda one: -one[1])[:3]
    waits = ", ".join(f"{cause} {waited:.2f}" for cause, waited in stalls)
    written = settled(ours, WARM_UP, "written_bytes")
    note = f"{tokens / seconds:,.0f} tokens/s; {written / 1e9:.2f} GB written; last step's waits, s: {waits or 'none'}"
    context.record.add(reported(f"{what}: step, s", f"{seconds:.3f}", note=note))
    if predicted:
        note = f"predicted {predicted:.3f} s"
        context.record.add(reported(f"{what}: step, measured / predicted", f"{seconds / predicted:.3f}", note=note))


def _micro(ours: dict[str, Any], context: Context) -> int:
    return int(ours["plan"].get("numerics", {}).get("micro_batch_size", context.scale.micro or 1))


def small_memory(context: Context) -> None:
    """As on a card of 24 GB: what the run takes of the device stays below that."""
    _beside_memory(context, context.scale.many, gpu=context.scale.gpu)


def compiled(context: Context) -> None:
    """The same with compiled blocks, whose rates are measured first, but not for a toy (see TOY)."""
    scale, (shape, layers) = context.scale, context.block
    case = Case(shape=shape, rows=scale.many, steps=scale.steps, gpu=scale.gpu, compiled=True)
    what = f"{layers}, {scale.many * scale.length:,} tokens a step, max_memory.gpu {scale.gpu}, compiled"
    if context.scale is FULL:
        _bench(context, case)
    if ours := context.ours(what, case):
        _speed(context, what, ours)
        _gpu_peak(context, what, ours)


def _gpu_peak(context: Context, what: str, ours: dict[str, Any]) -> None:
    limit = parse_size(context.scale.gpu)
    peak = next((line["measured"] for line in ours["compared"] if line["what"] == "peak GPU memory"), None)
    if peak is not None:
        context.record.add(at_most(f"{what}: peak GPU memory, GiB", peak / GiB, limit / GiB))
    elif context.device == "cuda":
        why = "the run was ended before it compared itself with its plan"
        context.record.add(missing(f"{what}: peak GPU memory, GiB", f"<= {gib(limit)}", why))


def segments(context: Context) -> None:
    """The allocator's two ways, expandable segments and not: what of them is faster, and what takes more."""
    scale = context.scale
    for expandable in (True, False):
        case = Case(
            shape=context.block[0],
            rows=scale.few,
            steps=scale.steps,
            gpu=scale.gpu,
            offload={"expandable_segments": expandable},
        )
        how = "expandable" if expandable else "fixed"
        what = f"{how} segments, {scale.few * scale.length:,} tokens, max_memory.gpu {scale.gpu}"
        if ours := context.ours(what, case):
            _speed(context, what, ours)
            _gpu_peak(context, what, ours)


def on_ssd(context: Context) -> None:
    """1 B with weights, gradients and states on the ssd, with and without clipping. Without, beside DeepSpeed's NVMe offload on
    that disk, where it is installed."""
    for clip in (1.0, None):
        case = Case(shape=context.scale.small, rows=context.scale.few, steps=context.scale.steps, clip=clip, on_ssd=True)
        what = f"{case.shape} on ssd, clipping {'off' if clip is None else 'on'}"
        if ours := context.ours(what, case):
            _speed(context, what, ours)
    if ours and context.device == "cuda" and find_spec("deepspeed") is not None:
        _beside_deepspeed(context, f"{what}: speed, ours / DeepSpeed", case, ours)


def _beside_deepspeed(context: Context, what: str, case: Case, ours: dict[str, Any]) -> None:
    theirs = deepspeed(context.place, case)
    context.record.keep(what, theirs)
    if theirs.get("failed"):
        context.record.add(reported(what, "DeepSpeed failed", note=str(theirs["failed"])))
        return
    seconds = [settled(side, WARM_UP) for side in (ours, theirs)]
    note = f"{seconds[0]:.3f} and {seconds[1]:.3f} s a step"
    context.record.add(reported(what, f"{seconds[1] / seconds[0]:.2f}", note=note))


def profile(context: Context) -> None:
    scale, out, trace = context.scale, context.work / "busy.json", context.work / "trace.json.gz"
    out.unlink(missing_ok=True)
    trace.unlink(missing_ok=True)
    first, last = WARM_UP + 1, WARM_UP + 2
    script = ROOT / "scripts" / "gpu" / "profiled.py"
    words = [sys.executable, str(script), "--device", context.device, "--first", str(first), "--last", str(last)]
    shape, layers = context.block
    case = Case(shape=shape, rows=scale.many, steps=last, gpu=scale.gpu)
    what = f"{layers}, {scale.many * scale.length:,} tokens, max_memory.gpu {scale.gpu}, profiled"
    if context.ours(what, case, words=(*words, "--out", str(out), "--trace", str(trace)), saves=5.0) is None:
        return
    found = json.loads(out.read_text(encoding="utf-8"))
    context.record.keep("gaps", found)
    note = f"copies {found['copies']:.1%}; {found['events']} events in {found['seconds']:.2f} s of {found['steps']} steps; "
    note += f"the trace's clock is set by {found['clock']}"
    context.record.add(at_least(f"{what}: events seen", found["events"], 1))
    context.record.add(reported(f"{what}: compute busy", f"{found['busy']:.1%}", note=note))
    for one in found["longest"]:
        context.record.add(reported(f"{one['name'][:60]}, ms", f"{one['milliseconds']:.2f}", note=f"{one['times']} times"))
    for one in found["idle"]:
        next_one = one["name"][:60] or "the last step's end"
        text = f"{one['times']} gaps"
        context.record.add(reported(f"idle before {next_one}, ms", f"{one['milliseconds']:.2f}", note=text))
    for number, gap in enumerate(found["gaps"], start=1):
        where = " < ".join(gap["stack"][:4]) or "unknown"
        text = f"at {gap['at']:.3f} s, after {gap['after'][:60] or '-'}; host ({gap['seen']}): {where}"
        context.record.add(reported(f"gap {number}, ms", f"{gap['milliseconds']:.2f}", note=text))


STAGES = (
    Stage(name="doctor", what="what works here", limit=40, run=doctor),
    Stage(name="pinning", what="host memory registered with the driver", limit=75, run=pinning),
    Stage(name="tests", what="the gpu tests", limit=100, run=tests),
    Stage(name="bench", what="the machine's rates", limit=90, run=bench),
    Stage(name="8k", what="eight layers of Llama-8B, 8k tokens", limit=110, run=few_tokens),
    Stage(name="32k", what="eight layers of Llama-8B, 32k tokens", limit=110, run=many_tokens),
    Stage(name="24gb", what="the same in 24 GB of GPU memory", limit=80, run=small_memory),
    Stage(name="compiled", what="the same with compiled blocks", limit=150, run=compiled),
    Stage(name="profile", what="busy share and gaps", limit=70, run=profile),
    Stage(name="ssd", what="1 B on the ssd", limit=240, run=on_ssd),
    Stage(name="blocking", what="the gpu tests, blocking launches", limit=100, run=tests_blocking),
    Stage(name="segments", what="both ways of the allocator", limit=90, run=segments),
)


def stage_main(name: str, *, work: Path, device: str, limit: float) -> None:
    """What the process of a stage does: what it found so far is always in its record. It has `limit` seconds."""
    (stage,) = [stage for stage in STAGES if stage.name == name]
    record = Record(work / "records" / f"{name}.json")
    stage.run(Context(work=work, device=device, record=record, until=time.monotonic() + limit - TO_END))
