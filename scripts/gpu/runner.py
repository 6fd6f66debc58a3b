"""Runs the stages one after the other, each with its limit, and writes what is known after each of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from proof.verdicts import FAILED, HELD, NOT_SHOWN, ROOT, Row, described, exit_code, machine, now, say, table, versions

from fuyou_cli.core.errors import UsageError

from .card_runs import end_of
from .card_stages import STAGES, Stage
from .pack import TEST_TOOLS
from .record import read_record, write_json

State = Literal["passed", "failed", "not shown", "timed out", "running", "interrupted", "not reached"]
LEAST = 8.0  # seconds that a stage is begun with
TO_WRITE = 3.0  # seconds kept for the end
PATIENCE = 2.0  # times a limit, where processors stand for a GPU
GRACE = 2.0  # seconds from SIGTERM, at which commands remove their files, to SIGKILL


@dataclass(slots=True)
class Outcome:
    """Of one stage."""

    stage: Stage
    state: State
    seconds: float = 0.0
    limit: float = 0.0
    rows: list[Row] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    end: str = ""  # of its output, where it did not pass

    def as_record(self) -> dict[str, Any]:
        return {
            "name": self.stage.name, "what": self.stage.what, "state": self.state, "seconds": round(self.seconds, 1),
            "limit": round(self.limit, 1), "rows": [asdict(row) for row in self.rows], "values": self.values, "end": self.end,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One whole run of gpu_check."""

    work: Path
    out: Path
    name: str
    device: str
    minutes: float
    limits: Mapping[str, float]  # seconds of a stage, instead of its own

    @property
    def json(self) -> Path:
        return self.out / f"{self.name}.json"

    @property
    def text(self) -> Path:
        return self.out / f"{self.name}.txt"

    def write(self, outcomes: Sequence[Outcome], device_name: str) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        content = {
            "check": self.name,
            "date": now(),
            "settings": {"device": self.device, "device_name": device_name, "minutes": self.minutes},
            "machine": machine(),
            "versions": versions(),
            "stages": [outcome.as_record() for outcome in outcomes],
        }
        write_json(self.json, content)
        words = [f"gpu_check on {device_name}: {described()}", *(_paragraph(outcome) for outcome in outcomes)]
        new = self.text.with_suffix(".new")
        new.write_text("\n\n".join(words) + "\n", encoding="utf-8")
        new.replace(self.text)


def _paragraph(outcome: Outcome) -> str:
    head = f"== {outcome.stage.name} ({outcome.stage.what}): {outcome.state}"
    head += f" in {outcome.seconds:.0f} s" if outcome.seconds else ""
    return "\n".join(filter(None, (head, table(outcome.rows) if outcome.rows else "", outcome.end)))


def check_here(options: Any, work: Path) -> int:
    """What the command line asks for, in this interpreter; the exit code."""
    stages, limits = chosen(options.only), limits_of(options.limit)
    need_test_tools(stages)
    device_name = named(options.device)
    work.mkdir(parents=True, exist_ok=True)
    # Where no bytecode is kept, every process would compile torch and transformers anew, for ten seconds and more.
    os.environ |= {"PYTHONPYCACHEPREFIX": str(work / "pycache"), "PYTHONDONTWRITEBYTECODE": ""}
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    check = Check(
        work=work, out=options.out.resolve(), name=f"gpu_check-{slug}-{time.strftime('%Y-%m-%d')}", device=options.device,
        minutes=options.minutes, limits=limits,
    )  # fmt: skip
    return run(check, stages, device_name)


def need_test_tools(stages: Sequence[Stage]) -> None:
    """Raise UsageError where a stage that runs tests would find no pytest: better now than minutes into a lent machine."""
    lacking = [tool for tool in TEST_TOOLS if not _installed(tool)]
    if lacking and any(stage.name in ("tests", "blocking") for stage in stages):
        hint = f"{sys.executable} -m pip install {' '.join(lacking)}; or --wheels DIR, or --only with other stages"
        raise UsageError(f"this Python lacks {', '.join(lacking)}, which the gpu tests need", hint=hint)


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def named(device: str) -> str:
    """The name of the GPU that runs use. Raises UsageError where there is none."""
    if device == "emulated":
        return "emulated device"
    import pynvml

    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError as error:
        raise UsageError(f"no GPU can be seen: {error}", hint="--device emulated tries the script itself") from None
    return str(name)


def run(check: Check, stages: Sequence[Stage], device_name: str) -> int:
    """All of them; the exit code. What is done so far is written when a stage begins and when it ends."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    until = time.monotonic() + check.minutes * 60 - TO_WRITE
    outcomes = [Outcome(stage=stage, state="not reached") for stage in stages]
    for outcome in outcomes:
        own = outcome.stage.limit * (1 if check.device == "cuda" else PATIENCE)
        asked = check.limits.get(outcome.stage.name, own)
        outcome.limit = min(asked, until - time.monotonic())
        if outcome.limit < min(LEAST, asked):
            continue
        outcome.state = "running"
        check.write(outcomes, device_name)
        try:
            _run_stage(check, outcome)
        except KeyboardInterrupt:
            outcome.state = "interrupted"
            check.write(outcomes, device_name)
            raise
        say(f"{outcome.stage.name}: {outcome.state} in {outcome.seconds:.0f} s")
        check.write(outcomes, device_name)
    check.write(outcomes, device_name)
    print(check.text.read_text(encoding="utf-8"))
    print(f"written to {check.json} and {check.text.name}")
    return code_of(outcomes)


def code_of(outcomes: Sequence[Outcome]) -> int:
    """HELD where all stages passed, FAILED where one failed or was too slow, else NOT_SHOWN."""
    states = {outcome.state for outcome in outcomes}
    if states & {"failed", "timed out"}:
        return FAILED
    return HELD if states <= {"passed"} else NOT_SHOWN


def _run_stage(check: Check, outcome: Outcome) -> None:
    name = outcome.stage.name
    record, output = check.work / "records" / f"{name}.json", check.work / f"{name}.txt"
    record.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--stage", name, "--work", str(check.work)]
    command += ["--device", check.device, "--seconds", str(outcome.limit)]
    begun = time.monotonic()
    say(f"{name}: {outcome.stage.what}, at most {outcome.limit:.0f} s")
    with output.open("wb") as file:
        # In a session of its own: its commands end with it.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(outcome.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(child)
            outcome.seconds = time.monotonic() - begun
            outcome.rows, outcome.values = read_record(record)
    outcome.state = _state(code, outcome.rows)
    if outcome.state != "passed" and code != 0:
        outcome.end = end_of(output)


def _state(code: int | None, rows: Sequence[Row]) -> State:
    if code is None:
        return "timed out"
    if code != 0 or exit_code(rows) == FAILED:
        return "failed"
    return "passed" if exit_code(rows) == HELD else "not shown"


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends every process of the child's group, politely first, and waits for the child."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + patience
        while time.monotonic() < until and _lives(child):
            time.sleep(0.05)
    child.wait()


def _lives(child: subprocess.Popen[bytes]) -> bool:
    """Whether anything of the group does; the child itself is a zombie of it until it is waited for."""
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def limits_of(words: str | None) -> dict[str, float]:
    """Of stage=seconds,... Raises UsageError."""
    try:
        pairs = [word.split("=") for word in words.split(",")] if words else []
        return {stage.name: float(seconds) for name, seconds in pairs for stage in chosen(name)}
    except ValueError:
        raise UsageError(f"--limit: STAGE=SECONDS,... is wanted, not {words}") from None


def chosen(names: str | None) -> list[Stage]:
    """The stages named, in our order. Raises UsageError for a name that is none."""
    known = [stage.name for stage in STAGES]
    asked = known if names is None else names.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise UsageError(f"--only: no stage is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [stage for stage in STAGES if stage.name in asked]
