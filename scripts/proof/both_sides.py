"""Makes one run of either side, in its own process and under the limits asked for, as plain data to keep."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.units import gib
from fuyou_cli.machine.measure.timing import BackgroundLoad
from fuyou_cli.training.run_log import read_log

from . import watch
from .control_groups import DiskRates, Group, LimitsUnavailable, device_of, group
from .materials import LENGTH
from .setting import SEED, RunFailed, Setting, fresh, recipe_in
from .shim import build, preloaded
from .verdicts import ROOT, say
from .watch import Pace

THREADS = 2
FUYOU = (sys.executable, "-m", "fuyou_cli")


def fuyou_on(device: str) -> tuple[str, ...]:
    """Returns the command, which knows the emulated device only where tests register it."""
    return (sys.executable, str(ROOT / "tests" / "emulated.py")) if device == "emulated" else FUYOU


def _fuyou_for(overrides: Sequence[str]) -> tuple[str, ...]:
    return fuyou_on("emulated" if "offload.device=emulated" in overrides else "")


NOISE_CORES = 0.4  # used by others over a run: more and its times mean little (the kernel's own I/O work is in it)
MOVED = 0.08  # by how much the machine's own speed may change from a bench to the run that is planned with it
TRIES = 3  # until a bench and its run found the same machine
BENCHES = 5  # until one is quiet
BENCHED_SECONDS = 40.0  # at the end of a bench: the recipe's own block and head
LAST_LINES = 12  # of a failed command's output that are kept
RANK = 8  # of adapters, on every linear layer
_ADAPTER = (f"adapter.r={RANK}", "train.head_chunk_tokens=256")  # in a small group the head binds
KEYS: dict[str, tuple[str, ...]] = {  # of a recipe, for each kind of runs: of any model, so a mixture is a shape
    "full": (),
    "lora": _ADAPTER,
    "qlora": (*_ADAPTER, "model.quantize=nf4"),
    "int8": ("optimizer.state_dtype=int8",),
}
STEP_FIELDS = (
    "step", "loss", "grad_norm", "seconds", "batch_tokens", "ram_peak", "read_bytes", "written_bytes",
    "update_cpu_seconds", "io_cpu_seconds", "stalls", "busy",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Describes one run of our side."""

    shape: str
    budget: int
    steps: int
    rows: int = 16  # per step, of 512 tokens
    micro: int | None = 4  # None: chosen by the planner
    clip: float | None = None
    all_on_ssd: bool = False
    compute: str = "bfloat16"
    profiled: bool = False  # `fuyou bench RECIPE` first, under the same limits, and a plan from what it found
    overrides: tuple[str, ...] = ()  # key=value, over the recipe
    plan: str = ""  # a candidate as JSON, which is run instead of the plan that is best
    checkout: str = ""  # folder of another checkout whose C extension is built; "": this one runs
    profiles: Mapping[str, str] = field(default_factory=dict)  # files that the run finds, as `kept_profiles` gives them
    commit_every: int | str | None = "auto"  # steps, as in a recipe; None: where the run begins and ends
    late_flush: bool = False  # every flush takes 20 ms more
    export: bool = False
    limit: int | None = None  # of the memory group; None: no limit
    throttle: tuple[int, int] | None = None  # bytes/s read, written
    watch_memory: bool = False
    watch_counters: bool = False
    turn: int = 0
    warm_up: int = 1  # steps that do not count
    timed: bool = False  # others must leave the processor alone
    paced: bool = False  # the machine's own speed is looked at meanwhile

    @property
    def key(self) -> str:
        """Returns everything that shapes the measurement: what another script or part may take over."""
        words = [f"fuyou {self.shape}", f"{self.rows}x{LENGTH} by {self.micro or 'auto'}", f"{self.steps} steps"]
        words += [gib(self.budget)]
        words += [f"clip {self.clip:g}" if self.clip is not None else "no clipping"]
        words += ["all on ssd"] if self.all_on_ssd else []
        words += [self.compute] if self.compute != "bfloat16" else []
        words += ["profiled"] if self.profiled else []
        words += ["on a measured machine"] if self.profiles else []
        words += [*self.overrides]
        words += [f"plan {hashlib.sha256(self.plan.encode()).hexdigest()[:8]}"] if self.plan else []
        words += [f"inside {gib(self.limit)}"] if self.limit is not None else []
        words += [f"disk {self.throttle[0] / 1e9:g}+{self.throttle[1] / 1e9:g} GB/s"] if self.throttle else []
        words += [f"by {self.checkout}"] if self.checkout else []
        words += [f"commits {self.commit_every or 'never'}"]
        words += ["flushes 20 ms late"] if self.late_flush else []
        words += ["exported"] if self.export else []
        words += [f"watched {'m' * self.watch_memory}{'c' * self.watch_counters}"]
        return ", ".join([*words, f"turn {self.turn}"])


# ---- our side ------------------------------------------------------------------------------------------------------


def write_recipe(setting: Setting, case: Case) -> Path:
    """Writes the recipe of a case into a fresh output folder; what an earlier run left there is removed."""
    out = fresh(setting.work / "run")
    fresh(setting.work / "store")
    placement = {key: "ssd" for key in ("weights", "gradients", "optimizer_states", "boundaries") if case.all_on_ssd}
    # A run watched for memory tokenises inside its own limit; the others share their rows with the other side.
    rows = out / "data" if case.watch_memory else setting.work / "rows"
    offload = {
        "device": "cpu", "dir": str(setting.work / "store"), "max_memory": {"cpu": f"{case.budget}B"}, **placement,
        "measure": False,  # a case that is to be measured asks for it (`profiled`), under the limits of its run
    }  # fmt: skip
    return recipe_in(
        out, setting.model(case.shape), rows, case, LENGTH, entry=setting.entry, commit_every=case.commit_every,
        train={"micro_batch_size": case.micro or "auto", "threads": THREADS}, precision={"compute": case.compute},
        offload=offload, export={"at_end": case.export},
    )  # fmt: skip


def end_of(output: Path, lines: int = LAST_LINES) -> str:
    """Returns the end of what a command wrote."""
    return "\n".join(output.read_text(errors="replace").strip().splitlines()[-lines:])


def our_run(setting: Setting, case: Case) -> dict[str, Any]:
    """Runs the case through `fuyou finetune`, and keeps it under its key. Raises RunFailed unless memory is watched: then a
    failure is a result."""
    result = setting.measure(case.key, lambda: _our_run(setting, case))
    if result.get("failed") and not case.watch_memory:
        raise RunFailed(f"{case.key}: {result['failed']}")
    return result


def _our_run(setting: Setting, case: Case) -> dict[str, Any]:
    """Runs once more if the machine was faster or slower than the plan's rates say: such a run tells nothing of the plan. Work
    that has nothing to do with either tells whether it was."""
    if not case.paced:
        return _one_run(setting, case)
    with Pace() as pace:
        for _ in range(TRIES):
            result = _one_run(setting, case, pace)
            if not case.profiled:
                return result
            result["moved"] = abs(result["machine"] - 1) > MOVED
            if not result["moved"] or result.get("failed"):
                break
            say(f"{case.key}: the machine itself ran at {result['machine']:.2f} of its speed during the bench: once more")
    result["noisy"] = result["noisy"] or result["moved"]
    return result


def _one_run(setting: Setting, case: Case, pace: Pace | None = None) -> dict[str, Any]:
    """Makes one run. `pace`: the result also says how fast the machine was in the steps that count, over its speed in the
    bench."""
    recipe = write_recipe(setting, case)
    log, output = setting.work / "run" / "log.jsonl", setting.work / "run.txt"
    command, others = _command(setting, case, recipe), BackgroundLoad()
    with limited(setting.work, memory=case.limit, throttle=case.throttle, wanted=case.watch_memory) as (held, why):
        environment = profile(setting, recipe, held, case) if case.profiled else _own_cache(setting, case.profiles)
        environment |= _late_flushes(setting.work) if case.late_flush else {}
        environment |= {"PYTHONPATH": case.checkout} if case.checkout else {}
        benched = time.monotonic()
        with output.open("wb") as file, started(command, held, file, **environment) as child:
            seen = watch.follow(
                child, log=log, group=held, memory=case.watch_memory, counters=case.watch_counters, steps=case.steps
            )
        kills = held.kills() if held is not None else 0
        with_files = held.peak_with_files() if held is not None else 0
    cores = others.cores()
    promised, steps, end = _told(log)
    result: dict[str, Any] = {
        "exit": child.returncode,
        "warm_up": case.warm_up,
        "killed": kills,
        "seconds": round(seen.seconds, 2),
        "enforced": held is not None,
        "not_enforced_because": why,
        "plan": promised,
        "steps": steps,
        "peak": asdict(seen.peak),
        "peak_by_phase": seen.phases,
        "samples": seen.samples,
        "peak_with_files": with_files,
        "counters": seen.counters,
        "kernel_whole": [after - before for before, after in zip(seen.before, seen.after, strict=True)],
        "daemon_whole": [end["read_bytes"], end["written_bytes"]] if end else None,
        "saved": end["saved_bytes"] if end else 0,
        "exported_parameters": exported_parameters(setting.work / "run" / "model") if case.export else None,
        "others_cores": cores,
    }
    if child.returncode != 0 or len(steps) != case.steps:
        result["failed"] = f"exit code {child.returncode}, {len(steps)} steps, {kills} killed:\n{end_of(output)}"
    result["noisy"] = case.timed and cores > NOISE_CORES
    if pace is not None:
        during_bench = pace.speed(benched - BENCHED_SECONDS, benched)
        result["speed"] = pace.speed(*_counted(seen.ends, case.warm_up)) if len(seen.ends) > case.warm_up else 0.0
        result["machine"] = round(result["speed"] / during_bench, 3) if during_bench else 0.0
    fresh(setting.work / "store")  # tens of GB
    return result


def _command(setting: Setting, case: Case, recipe: Path) -> list[str]:
    """Returns the command that runs the case, and writes the candidate that it is to run."""
    words = ["finetune", str(recipe), *case.overrides]
    if not case.plan:
        return [*_fuyou_for(case.overrides), *words]
    candidate = setting.work / "run" / "candidate.json"
    candidate.write_text(case.plan, encoding="utf-8")
    return [sys.executable, str(ROOT / "scripts" / "proof" / "forced_plan.py"), str(candidate), *words]


def _told(log: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Returns what a log says of the plan, of each step, and of the end; nothing of what the run did not come to."""
    records = read_log(log) if log.exists() else []
    plans = [record for record in records if record["event"] == "plan"]
    ends = [record for record in records if record["event"] == "end"]
    steps = [{name: record.get(name) for name in STEP_FIELDS} for record in records if record["event"] == "step"]
    promised = {name: value for name, value in plans[0].items() if name != "event"} if plans else {}
    return promised, steps, ends[-1] if ends else {}


def _late_flushes(work: Path) -> dict[str, str]:
    """Returns the environment of a run whose flushes take 20 ms longer."""
    seen = {"FUYOU_SHIM_ROOT": str(work), "FUYOU_SHIM_FAULT": f"1:{1 << 30}:late"}
    return preloaded(seen, build(work))


def _counted(ends: list[float], warm_up: int) -> tuple[float, float]:
    """Returns the time from the end of the warm-up's last step to the end of the run's last one."""
    return ends[warm_up - 1] if warm_up else 0.0, ends[-1]


def _own_cache(setting: Setting, profiles: Mapping[str, str]) -> dict[str, str]:
    """Gives a run its own cache, so that it uses the given profiles, finds none of the machine's, and leaves none there from
    under limits."""
    folder = fresh(setting.work / "profiles")
    for name, text in profiles.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return {"XDG_CACHE_HOME": str(folder)}


def on_measured_machine(setting: Setting, case: Case) -> Case:
    """Returns the case on this machine as `fuyou bench RECIPE` measures it, once for all runs with these limits: what a user
    has whose first command measured the machine."""

    def once() -> dict[str, Any]:
        recipe = write_recipe(setting, case)
        with limited(setting.work, memory=case.limit, throttle=case.throttle) as (held, _):
            return {"profiles": kept_profiles(profile(setting, recipe, held, case))}

    limits = f"disk {case.throttle}" if case.throttle else "no limits"
    inside = [f"inside {gib(case.limit)}"] if case.limit is not None else []
    what = ", ".join([case.shape, f"{case.rows}x{LENGTH} by {case.micro}", *case.overrides, gib(case.budget), *inside, limits])
    found = setting.measure(f"machine as measured for {what}", once)
    return replace(case, profiles=found["profiles"])


def kept_profiles(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what `profile` left, for later runs: a plan is made for the update threads that a machine was measured with."""
    folder = Path(environment["XDG_CACHE_HOME"])
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.json")}


def profile(setting: Setting, recipe: Path, held: Group | None, case: Case) -> dict[str, str]:
    """Runs `fuyou bench RECIPE` inside the group, with the case's keys. Returns the environment of those who are to find its
    profile. Nothing is taken from the machine's own profiles, or left there. Raises RunFailed, also if others keep the
    processor busy: beside a second process with as many threads a block was measured at a tenth of its rate."""
    bench = [*_fuyou_for(case.overrides), "bench", str(recipe), *case.overrides]
    for _ in range(BENCHES):
        environment, others = _own_cache(setting, {}), BackgroundLoad()
        with (setting.work / "bench.txt").open("wb") as file, started(bench, held, file, **environment) as child:
            if child.wait() != 0:
                raise RunFailed(f"fuyou bench failed, see {file.name}")
        if (cores := others.cores()) <= NOISE_CORES:
            return environment
        say(f"others used {cores:.1f} cores beside fuyou bench: once more")
    raise RunFailed(f"others used {cores:.1f} cores beside fuyou bench, {BENCHES} times: rates mean little")


@contextmanager
def limited(
    work: Path, *, memory: int | None, throttle: tuple[int, int] | None, wanted: bool = False
) -> Iterator[tuple[Group | None, str]]:
    """Returns a group with these limits, or None and why not. A disk that cannot be held is an error: figures would not mean
    what they say. `wanted`: make a group even without limits, to count its memory."""
    held, why = None, ""
    with ExitStack() as stack:
        if memory is not None or throttle is not None or wanted:
            try:
                rates = None
                if throttle is not None:
                    rates = DiskRates(device=device_of(work), read=throttle[0], write=throttle[1])
                held = stack.enter_context(group(memory=memory, disk=rates))
            except LimitsUnavailable as error:
                if throttle is not None:
                    raise
                why = str(error)
        yield held, why


@contextmanager
def started(command: list[str], held: Group | None, output: BinaryIO, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a child inside the group from before its first instruction. It is killed if the script ends early."""
    child = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=child_environment() | environment,
        preexec_fn=held.enter if held is not None else None,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def child_environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "120"}


def exported_parameters(folder: Path) -> int:
    """Counts the parameters of an exported model by its safetensors headers; 0 if there is none."""
    from fuyou_cli.checkpoint.files import open_checkpoint

    try:
        return sum(entry.numel for entry in open_checkpoint(folder).entries.values())
    except FuyouError:
        return 0


# ---- the other side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class InMemory:
    """Describes one run of plain PyTorch with everything in memory."""

    shape: str
    rows: int  # per step, of 512 tokens
    micro: int
    steps: int  # the first is the warm-up
    turn: int
    clip: float | None = None
    compute_alone: bool = False
    checkpointing: bool = True
    length: int = LENGTH
    rank: int = 0  # of an adapter by peft, which alone is trained; 0: everything is
    experts: str = ""  # transformers' implementation of a mixture's experts

    @property
    def key(self) -> str:
        """Returns everything that shapes the measurement."""
        words = [f"in memory {self.shape}", f"{self.rows}x{LENGTH} by {self.micro}", f"{self.steps} steps"]
        words += [f"clip {self.clip:g}" if self.clip is not None else "no clipping"]
        words += ["compute alone"] if self.compute_alone else []
        words += [] if self.checkpointing else ["activations kept"]
        words += [f"peft, rank {self.rank}"] if self.rank else []
        words += [f"experts by {self.experts}"] if self.experts else []
        return ", ".join([*words, f"turn {self.turn}"])

    def command(self, *, model: Path, rows: Path, out: Path) -> list[str]:
        command = [sys.executable, str(ROOT / "scripts" / "proof" / "in_memory.py"), "--model", str(model)]
        command += ["--rows", str(rows), "--batch", str(self.rows), "--micro", str(self.micro), "--steps", str(self.steps)]
        command += ["--threads", str(THREADS), "--seed", str(SEED), "--length", str(self.length), "--out", str(out)]
        command += ["--compute-alone"] if self.compute_alone else []
        command += [] if self.checkpointing else ["--no-checkpointing"]
        command += ["--rank", str(self.rank)] if self.rank else []
        command += ["--experts", self.experts] if self.experts else []
        command += ["--clip", str(self.clip)] if self.clip is not None else []
        return command


def in_memory_run(setting: Setting, case: InMemory, *, rows_from: Callable[[], Path]) -> dict[str, Any]:
    """Runs the case on the rows that `rows_from` finds or makes, and keeps it under its key. Raises RunFailed."""
    result = setting.measure(case.key, lambda: _in_memory_run(setting, case, rows_from()))
    if result.get("failed"):
        raise RunFailed(f"{case.key}: {result['failed']}")
    return result


def _in_memory_run(setting: Setting, case: InMemory, rows: Path) -> dict[str, Any]:
    out, output = setting.work / "in_memory.jsonl", setting.work / "in_memory.txt"
    command = case.command(model=setting.model(case.shape), rows=rows, out=out)
    out.unlink(missing_ok=True)
    # Its weights in huge pages, as ours are: glibc advises what malloc maps.
    environment = {"OMP_NUM_THREADS": str(THREADS), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    others = BackgroundLoad()
    with output.open("wb") as file, started(command, None, file, **environment) as child:
        watch.follow(child, log=out, group=None, memory=False, counters=False, steps=case.steps)
    cores = others.cores()
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    result: dict[str, Any] = {"warm_up": 1, "steps": done, "others_cores": cores, "noisy": cores > NOISE_CORES}
    if child.returncode != 0 or len(done) != case.steps:
        hint = "; it was killed, probably for memory: try a smaller --shape" if child.returncode == -9 else ""
        result["failed"] = f"exit code {child.returncode}{hint}:\n{end_of(output)}"
    return result


# ---- bytes -----------------------------------------------------------------------------------------------------------


UNCOUNTED = 2  # steps, where a run logs no sums: after them every step reads states


def counted(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns bytes per step (read, written) by the plan, the kernel and the daemon.

    Over the whole run the kernel and the daemon lack the states that the first update did not read. They also count weights
    that the first step read and later ones found in their slots, those that the last of the deferred updates (with clipping
    all) fetched for themselves, and what saving wrote. Without these, all three speak of the same step."""
    plan, steps = result["plan"], result["steps"]
    unread = plan["predicted_read_by"].get("states", 0)
    unread -= plan["deferred_weights"] + plan["weights_left"]
    sums = {"kernel": result["kernel_whole"], "daemon": result["daemon_whole"]}
    by = {"plan": (plan["predicted_read_per_step"], plan["predicted_written_per_step"])}
    for who, whole in sums.items():
        if whole is None:  # a run that logs its steps only: what is in flight at a step's end blurs these
            counting = steps[UNCOUNTED:-1]
            by[who] = (
                statistics.mean(step["read_bytes"] for step in counting),
                statistics.mean(step["written_bytes"] for step in counting),
            )
        else:
            by[who] = ((whole[0] + unread) / len(steps), (whole[1] - result["saved"]) / len(steps))
    return by
