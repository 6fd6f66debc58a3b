"""Reports every step to other programs: TensorBoard, W&B, MLflow, trackio, each through its own library; and the newest steps
as a trace, which ui.perfetto.dev and chrome://tracing open.

Nothing goes over the network unless the recipe or the library's own environment asks for it. If a logger fails, the user is
told once and the run goes on without it. A logger never ends a run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import FuyouError, UsageError, pip_install
from ..core.units import GiB
from .report import Busy, EvalReport, StepReport

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
_AT_HOME = {  # the libraries send usage reports unless these are set before they are imported
    "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "GRADIO_ANALYTICS_ENABLED": "False",
}  # fmt: skip
_MOST_TEXT = 500  # characters of a parameter; some MLflow stores take no more


class Backend(Protocol):
    """Takes the figures of steps. `close` gets whether the run reached its end."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, ended: bool) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """Describes a run to a logger. `identity` stays the same when the run is resumed; it is then resumed after `done` steps."""

    recipe: Recipe
    identity: str
    done: int

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output_dir).expanduser().absolute()

    @property
    def name(self) -> str:
        return f"{self.folder.name}-{self.identity[:8]}"

    @property
    def settings(self) -> dict[str, Any]:
        """Returns every key of the recipe, dotted, with its value."""
        return self.recipe.settings()


# ---- one class for each library ----------------------------------------------------------------------------------------


class TensorBoard:
    """Writes event files to OUTPUT_DIR/tensorboard."""

    def __init__(self, library: Any, run: LoggedRun) -> None:
        # purges earlier records of steps that are done again
        self._writer = library.SummaryWriter(log_dir=str(run.folder / "tensorboard"), purge_step=run.done + 1)
        self._writer.add_text("recipe", "\n".join(f"    {key}: {value}" for key, value in run.settings.items()), run.done)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self, ended: bool) -> None:
        self._writer.close()


class Wandb:
    """Logs to W&B: to OUTPUT_DIR/wandb, which `wandb sync` uploads, or online if `logging.wandb.mode` is online."""

    def __init__(self, library: Any, run: LoggedRun) -> None:
        section = run.recipe.logging.wandb
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = library.init(
            project=section.project or "fuyou",
            name=section.name or run.name,
            id=run.identity,
            resume="allow" if section.mode == "online" else None,  # offline runs do not support it
            mode=section.mode,
            dir=str(run.folder),
            config=run.settings,
            settings=library.Settings(console="off"),  # otherwise it captures what is printed
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, ended: bool) -> None:
        self._run.finish(exit_code=0 if ended else 1)


class Mlflow:
    """Logs to the tracking server of the recipe or of MLFLOW_TRACKING_URI, otherwise to OUTPUT_DIR/mlflow.db."""

    def __init__(self, library: Any, run: LoggedRun) -> None:
        section, self._library = run.recipe.logging.mlflow, library
        local = f"sqlite:///{run.folder / 'mlflow.db'}"
        run.folder.mkdir(parents=True, exist_ok=True)
        library.set_tracking_uri(section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or local)
        experiment = section.experiment or "fuyou"
        library.set_experiment(experiment)
        earlier = library.search_runs(
            experiment_names=[experiment], filter_string=f"tags.`fuyou.run` = '{run.identity}'", max_results=1,
            output_format="list",
        )  # fmt: skip
        if earlier:
            library.start_run(run_id=earlier[0].info.run_id)
            return
        library.start_run(run_name=section.name or run.name, tags={"fuyou.run": run.identity})
        library.log_params({key: str(value)[:_MOST_TEXT] for key, value in run.settings.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._library.log_metrics(dict(values), step=step, synchronous=False)  # a slow server does not delay a step

    def close(self, ended: bool) -> None:
        self._library.flush_async_logging()
        self._library.end_run("FINISHED" if ended else "KILLED")


class Trackio:
    """Logs to trackio's local store, or to the Space of the recipe or of TRACKIO_SPACE_ID. If there is a hub token, trackio
    asks the hub whose it is, unless HF_HUB_OFFLINE is set."""

    def __init__(self, library: Any, run: LoggedRun) -> None:
        section = run.recipe.logging.trackio
        self._run = library.init(
            project=section.project or "fuyou", name=section.name or run.name, space_id=section.space_id, resume="allow",
            config=run.settings,
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, ended: bool) -> None:
        self._run.finish()


_BACKENDS: dict[str, Callable[[Any, LoggedRun], Backend]] = {
    "tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio,
}  # fmt: skip


# ---- all of them ---------------------------------------------------------------------------------------------------------


def libraries(backends: Sequence[str]) -> dict[str, Any]:
    """Imports the libraries of the backends, before a run is planned, so that their memory counts. Raises UsageError for one
    that is not installed or cannot be imported."""
    imported = {}
    for name in backends:
        if name not in _MODULES:
            continue
        for variable, value in _AT_HOME.items():
            os.environ.setdefault(variable, value)
        try:
            imported[name] = import_module(_MODULES[name])
        except ImportError as error:
            extra = f"fuyou[{name}]"
            hint = f"{pip_install(extra)}, or leave {name} out of logging.backends"
            raise UsageError(f"logging.backends: {name} cannot be imported: {error}", hint=hint) from None
    return imported


class Loggers:
    """The open loggers of a run, while its context lasts. `say` gets one message for each that fails."""

    def __init__(self, libraries: Mapping[str, Any], run: LoggedRun, *, say: Callable[[str], None]) -> None:
        self._say, self._open = say, dict[str, Backend]()
        for name, library in libraries.items():
            self._trying(name, self._begin, name, library, run)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, backend in list(self._open.items()):
            self._trying(name, backend.close, error is None)

    def step(self, report: StepReport) -> None:
        """Logs a finished step."""
        self._log(figures(report), report.step)

    def evaluation(self, report: EvalReport) -> None:
        """Logs the loss of one set of rows."""
        values = {f"eval/{report.name}/loss": report.loss, f"eval/{report.name}/perplexity": report.perplexity}
        self._log({key: value for key, value in values.items() if math.isfinite(value)}, report.step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, backend in list(self._open.items()):
            self._trying(name, backend.log, values, step)

    def _begin(self, name: str, library: Any, run: LoggedRun) -> None:
        self._open[name] = _BACKENDS[name](library, run)

    def _trying(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        try:
            with redirect_stdout(sys.stderr):  # stdout is for the run's results
                action(*arguments)
        except Exception as error:  # any error of these libraries matters less than the run
            self._open.pop(name, None)
            message = str(error).strip().partition("\n")[0] or type(error).__name__
            self._say(f"note: the logger {name} failed, and the run goes on without it: {message}")


def figures(report: StepReport) -> dict[str, float]:
    """Returns what is logged of a step, without values that are not finite."""
    seconds = report.seconds or 1e-9
    values: dict[str, float | None] = {
        "train/loss": report.loss,
        "train/learning_rate": report.lr,
        "train/gradient_norm": report.grad_norm,
        "speed/tokens_per_second": report.batch_tokens / seconds,
        "speed/seconds_per_step": report.seconds,
        "speed/tflops": report.tflops,
        "speed/waiting_seconds": sum(report.stalls.values()),
        "memory/peak_ram_gib": report.ram_peak / GiB,
        "ssd/read_gb_per_second": report.read_bytes / seconds / 1e9,
        "ssd/written_gb_per_second": report.written_bytes / seconds / 1e9,
        "train/router_aux_loss": report.router_aux_loss,
    }
    if report.experts is not None:
        values |= {f"experts/{name}": value for name, value in asdict(report.experts).items()}
    return {key: float(value) for key, value in values.items() if value is not None and math.isfinite(value)}


# ---- a trace -----------------------------------------------------------------------------------------------------------

MOST_STEPS = 10
MOST_BYTES = 128 << 20  # of the file; one step is always kept, whatever its size
_TRACKS = ("step", "compute", "visit", "wait", "h2d", "d2h", "update", "update chunk", "ssd read", "ssd write")  # top to bottom
_NAMED = {"h2d": "copy up", "d2h": "copy down"}
_LANES = 1000  # lanes of one track, at most


class Trace:
    """Keeps the newest steps, and writes them as a JSON array of events at the end of the context, whatever ended the run.
    Every resource has a track, and one more track for each of its overlapping intervals. Steps are packed as they end, so a
    long run takes little memory. Raises UsageError at once if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.open("ab").close()
        except OSError as error:
            raise UsageError(f"--trace: {path} cannot be written: {error.strerror}", hint="name another file") from error
        self.seen = 0
        self.steps: deque[tuple[int, int, bytes]] = deque()  # step, bytes of JSON, packed
        self._zero: float | None = None
        self._lanes: dict[str, list[float]] = {}  # track -> when each lane is free

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.write()
        except OSError as failure:
            message = f"the trace {self.path} cannot be written: {failure.strerror}"
            if error is None:
                raise FuyouError(message) from failure
            error.add_note(message)

    def step(self, number: int, seconds: float, begin: float, items: Sequence[Busy]) -> None:
        """Adds a step that began at `begin` (monotonic), and its intervals, in seconds from then."""
        if self._zero is None:  # intervals left over from loading lie before the first step
            self._zero = begin + min((item.begin for item in items), default=0.0)
        step = Busy(resource="step", label=f"step {number}", begin=0.0, end=seconds)
        shift = begin - self._zero
        events = [self._event(item, shift, number) for item in sorted((step, *items), key=lambda item: item.begin)]
        data = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
        self.steps.append((number, len(data), zlib.compress(data, level=1)))
        self.seen += 1
        while len(self.steps) > 1 and (len(self.steps) > MOST_STEPS or sum(size for _, size, _ in self.steps) > MOST_BYTES):
            self.steps.popleft()

    def write(self) -> None:
        """Writes the steps that are kept."""
        with self.path.open("wb") as file:
            file.write(b"[\n" + ",\n".join(json.dumps(event) for event in self._names()).encode())
            for _, _, packed in self.steps:
                file.write(b",\n" + zlib.decompress(packed))
            file.write(b"\n]\n")

    @property
    def summary(self) -> str:
        """Returns a line that says what the file holds."""
        if not self.steps:
            return f"trace: {self.path} has no step"
        first, last, left = self.steps[0][0], self.steps[-1][0], self.seen - len(self.steps)
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        bound = f" (the newest: at most {MOST_STEPS} steps and {MOST_BYTES >> 20} MiB)" if left else ""
        return f"trace: {self.path} has {steps}{bound}; open it at ui.perfetto.dev"

    def _event(self, item: Busy, shift: float, step: int) -> dict[str, object]:
        span = item.end - item.begin
        arguments: dict[str, object] = {"bytes": item.bytes} if item.bytes else {}
        if item.bytes and span > 0:
            arguments["GB/s"] = round(item.bytes / span / 1e9, 3)
        return {
            "name": item.label,
            "cat": item.resource,
            "ph": "X",
            "ts": round((shift + item.begin) * 1e6, 3),
            "dur": round(span * 1e6, 3),
            "pid": 1,
            "tid": self._thread(item.resource, self._lane(item.resource, shift + item.begin, shift + item.end)),
            "args": {"step": step, **arguments},
        }

    def _lane(self, track: str, begin: float, end: float) -> int:
        """Returns the first free lane. Intervals of one lane do not overlap."""
        lanes = self._lanes.setdefault(track, [])
        lane = next((number for number, free in enumerate(lanes) if free <= begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        return lane

    def _thread(self, track: str, lane: int) -> int:
        return _LANES * (_TRACKS.index(track) + 1) + lane

    def _names(self) -> Iterable[dict[str, object]]:
        yield {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "fuyou"}}
        for track, lanes in self._lanes.items():
            for lane in range(len(lanes)):
                place, name = {"ph": "M", "pid": 1, "tid": self._thread(track, lane)}, _NAMED.get(track, track)
                yield {"name": "thread_name", **place, "args": {"name": f"{name} {lane + 1}" if lane else name}}
                yield {"name": "thread_sort_index", **place, "args": {"sort_index": self._thread(track, lane)}}
