"""Tests loggers: what each library is told, by an object that records calls, and by the library itself where it is there."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuyou_cli.core.errors import UsageError, pip_install
from fuyou_cli.core.units import GiB
from fuyou_cli.recipe.schema import Recipe
from fuyou_cli.training.loggers import LoggedRun, Loggers, figures, libraries
from tests.step_reports import step_report

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
STEP = step_report(
    3, loss=2.5, grad_norm=math.inf, tokens=7, batch_tokens=100, ram_now=GiB, ram_peak=2 * GiB, read_bytes=4 * 10**9,
    written_bytes=10**9, stalls={"update": 0.25},
)  # fmt: skip


class Recording:
    """Stands for a library: every call is kept, as its dotted name with its arguments, and returns the same kind of object."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], name: str = "", fails: str = "") -> None:
        self._calls, self._name, self._fails = calls, name, fails

    def __getattr__(self, name: str) -> Recording:
        return Recording(self._calls, f"{self._name}.{name}".lstrip("."), self._fails)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._calls.append((self._name, arguments, named))
        if self._name == self._fails:
            raise ConnectionError("no such server\nand more")
        return [] if self._name == "search_runs" else Recording(self._calls, f"{self._name}()", self._fails)


def run_of(folder: Path, *, done: int = 0, **logging: Any) -> LoggedRun:
    content = {
        "output_dir": str(folder), "model": {"name_or_path": "m"}, "dataset": {"train": [{"path": "d"}]}, "logging": logging,
    }  # fmt: skip
    return LoggedRun(recipe=Recipe.model_validate(content), identity="0123456789abcdef", done=done)


def calls_of(name: str, run: LoggedRun) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: list[Any] = []
    with Loggers({name: Recording(calls)}, run, say=pytest.fail) as loggers:
        loggers.step(STEP)
    return {called: (arguments, named) for called, arguments, named in calls}


def test_the_figures_of_a_step() -> None:
    found = figures(STEP)
    assert found["train/loss"] == 2.5 and found["speed/tokens_per_second"] == 50 and found["memory/peak_ram_gib"] == 2
    assert found["ssd/read_gb_per_second"] == 2 and found["speed/waiting_seconds"] == 0.25
    assert "train/gradient_norm" not in found and all(map(math.isfinite, found.values()))
    assert "train/loss" not in figures(replace(STEP, loss=math.nan))


def test_tensorboard_is_told(tmp_path: Path) -> None:
    calls = calls_of("tensorboard", run_of(tmp_path, done=2))
    assert calls["SummaryWriter"][1] == {"log_dir": str(tmp_path / "tensorboard"), "purge_step": 3}
    assert calls["SummaryWriter().add_scalar"][0][2] == 3 and "SummaryWriter().close" in calls


@pytest.mark.parametrize(("mode", "resume"), [("offline", None), ("online", "allow")])
def test_wandb_is_told(tmp_path: Path, mode: str, resume: str | None) -> None:
    calls = calls_of("wandb", run_of(tmp_path, wandb={"project": "p", "mode": mode}))
    begun = calls["init"][1]
    assert (begun["project"], begun["mode"], begun["id"], begun["resume"]) == ("p", mode, "0123456789abcdef", resume)
    assert begun["config"]["optimizer.lr"] == 1e-5 and begun["name"] == f"{tmp_path.name}-01234567"
    assert calls["init().log"] == ((figures(STEP),), {"step": 3}) and calls["init().finish"][1] == {"exit_code": 0}


def test_wandb_stays_at_home_unless_asked(tmp_path: Path) -> None:
    assert calls_of("wandb", run_of(tmp_path))["init"][1]["mode"] == "offline"


def test_mlflow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    calls = calls_of("mlflow", run_of(tmp_path))
    assert calls["set_tracking_uri"][0] == (f"sqlite:///{tmp_path}/mlflow.db",) and calls["set_experiment"][0] == ("fuyou",)
    assert calls["start_run"][1]["tags"] == {"fuyou.run": "0123456789abcdef"}
    assert calls["log_metrics"] == ((figures(STEP),), {"step": 3, "synchronous": False})
    assert calls["end_run"][0] == ("FINISHED",)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://theirs")
    assert calls_of("mlflow", run_of(tmp_path))["set_tracking_uri"][0] == ("http://theirs",)
    asked = run_of(tmp_path, mlflow={"tracking_uri": "http://ours", "experiment": "e"})
    assert calls_of("mlflow", asked)["set_tracking_uri"][0] == ("http://ours",)


def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path: Path) -> None:
    calls: list[Any] = []
    library = Recording(calls)
    known = [SimpleNamespace(info=SimpleNamespace(run_id="r1"))]
    library.search_runs = lambda **named: known  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), Loggers({"mlflow": library}, run_of(tmp_path, done=2), say=pytest.fail):
        raise KeyboardInterrupt
    named = {name: (arguments, given) for name, arguments, given in calls}
    assert named["start_run"] == ((), {"run_id": "r1"}) and "log_params" not in named
    assert named["end_run"][0] == ("KILLED",)


def test_trackio_is_told(tmp_path: Path) -> None:
    calls = calls_of("trackio", run_of(tmp_path, trackio={"name": "n"}))
    begun = calls["init"][1]
    assert (begun["project"], begun["name"], begun["space_id"], begun["resume"]) == ("fuyou", "n", None, "allow")
    assert calls["init().log"] == ((figures(STEP),), {"step": 3}) and "init().finish" in calls


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("wandb", "init"),
        ("wandb", "init().log"),
        ("wandb", "init().finish"),
        ("mlflow", "log_metrics"),
        ("trackio", "init().log"),
        ("tensorboard", "SummaryWriter().add_scalar"),
    ],
)
def test_what_fails_is_said_once_and_left_out(tmp_path: Path, name: str, fails: str) -> None:
    calls: list[Any] = []
    other: list[Any] = []
    said: list[str] = []
    found = {name: Recording(calls, fails=fails), "trackio" if name != "trackio" else "wandb": Recording(other)}
    with Loggers(found, run_of(tmp_path), say=said.append) as loggers:
        loggers.step(STEP)
        loggers.step(replace(STEP, step=4))
    assert said == [f"note: the logger {name} failed, and the run goes on without it: no such server"]
    assert sum(called == fails for called, _, _ in calls) == 1
    assert [named["step"] for called, _, named in other if called == "init().log"] == [3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_a_library_that_is_missing_is_named_with_its_extra(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(UsageError, match=rf"logging.backends: {name} cannot be imported") as refused:
        libraries(["console", "jsonl", name])
    assert f'pip install "fuyou[{name}]"' in str(refused.value.hint)


def test_an_extra_is_installed_where_fuyou_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert pip_install("fuyou[lora]") == f'{sys.executable} -m pip install "fuyou[lora]"'
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert pip_install("fuyou[lora]").endswith('pip install "fuyou[lora]"')


def test_what_needs_no_library_loads_none() -> None:
    assert libraries(["console", "jsonl"]) == {}


# ---- the libraries themselves, where they are installed ------------------------------------------------------------------


def _logged(name: str, run: LoggedRun) -> None:
    with Loggers(libraries([name]), run, say=pytest.fail) as loggers:
        for step in (1, 2):
            loggers.step(replace(STEP, step=step, loss=3.0 - step))


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _logged("tensorboard", run_of(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]


def test_wandb_itself(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    _logged("wandb", run_of(tmp_path))
    assert list((tmp_path / "wandb").glob("offline-run-*-0123456789abcdef/*.wandb"))


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):  # the second is the first one resumed
        _logged("mlflow", run_of(tmp_path))
    (run,) = mlflow.search_runs(experiment_names=["fuyou"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert {(metric.step, metric.value) for metric in history} == {(1, 2.0), (2, 1.0)} and run.info.status == "FINISHED"


def test_trackio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    _logged("trackio", run_of(tmp_path))
    assert list((tmp_path / "trackio").glob("fuyou*.db"))
