"""Tests `fuyou report`: what is read back from a log, and how it is shown on a terminal, as JSON and as a page."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.cli.render.charts import line_svg
from fuyou_cli.cli.render.report_screen import Series, about, evaluations, experts, page, series_of, show_report
from fuyou_cli.cli.stores import run_report
from fuyou_cli.core.errors import Interrupted, SwapError, UsageError
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.training.report import Busy, RunReport, Spread, StepReport
from fuyou_cli.training.run_log import History, JsonlLog, read_history, read_log
from tests.step_reports import step_report

from .conftest import Printer

PLAN = {
    "budget": 2 * GiB, "parameters": 1_100_048_384, "total_steps": 40, "choice": "2 ahead", "model": "TinyLlama-1.1B",
    "device": "cpu (AMD EPYC)", "began": "2026-11-24T10:00:00+00:00", "predicted_cpu_peak": 1884 * MiB,
    "predicted_gpu_peak": 0, "predicted_ssd_bytes": 28_600 * MiB, "predicted_read_per_step": 17_600_000_000,
    "predicted_written_per_step": 15_400_000_000, "predicted_step_seconds": 88.4, "new in a later version": {"x": 1},
    "memory": [
        {"what": "weights", "tier": "cpu", "size": 420 * MiB}, {"what": "states", "tier": "ssd", "size": 22_000 * MiB},
    ],
    "drives": [{"model": "990 PRO", "rated_bytes": 1_200 * 10**12, "used_bytes": 100 * 10**12}],
}  # fmt: skip


def step(number: int, **changes: Any) -> StepReport:
    figures = dict(
        total_steps=40, loss=4.0 - 0.05 * number, grad_norm=1.5, tokens=7000, batch_tokens=8000, seconds=80.0, tflops=0.6,
        ram_now=MiB, ram_peak=1850 * MiB, read_bytes=17_610_000_000, written_bytes=15_400_000_000, update_cpu_seconds=1.0,
        io_cpu_seconds=1.0, stalls={"update": 0.5}, busy={"ssd read": 10.0, "ssd write": 20.0},
    )  # fmt: skip
    return step_report(number, **{**figures, **changes})


@pytest.fixture
def log(tmp_path: Path, run_report: RunReport) -> Path:
    """Writes the log of 40 steps that ended well, of which 8 to 10 were done twice and the ninth had no finite loss."""
    with JsonlLog(tmp_path / "log.jsonl") as file:
        file.write("plan", {**PLAN, "began": "earlier"})
        for number in range(1, 11):
            file.step(step(number, loss=9.0))
        file.write("plan", PLAN)
        for number in range(8, 41):
            file.step(step(number, loss=math.nan if number == 9 else 4.0 - 0.05 * number, seconds=80.0 + number))
        file.timeline(run_report)
        file.write(
            "end",
            {
                "compared": [line.as_data() for line in run_report.compared],
                "written_total": 616_000_000_000,
                "settled": 30,
                "saved_bytes": 0,
            },
        )
    return file.path


@pytest.fixture
def history(log: Path) -> History:
    return read_history(log)


def test_a_step_that_was_done_again_counts_once(history: History) -> None:
    assert [one.step for one in history.steps] == list(range(1, 41))
    assert [str(one.loss) for one in history.steps[6:10]] == ["9.0", str(4.0 - 0.05 * 8), "nan", str(4.0 - 0.05 * 10)]
    assert history.ended and history.plan.began == PLAN["began"]


def test_figures_are_of_the_settled_steps(history: History, run_report: RunReport) -> None:
    report = history.report
    assert report.step_seconds == 80 + 25.5 and report.settled == 30  # the median of steps 11 to 40
    assert report.tokens_per_second == pytest.approx(30 * 8000 / sum(80 + number for number in range(11, 41)))
    assert report.compared == run_report.compared and report.timeline == run_report.timeline
    assert report.written_total == 616_000_000_000 and report.stalls == {"update": 40 * 0.5}


def test_a_run_that_goes_on_is_compared_with_its_plan(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-2]) + '{"schema_version": 1, "event": "st')  # it is writing the next step
    found = read_history(log)
    assert not found.ended and len(found.steps) == 40 and not found.report.timeline
    (peak, seconds, *_) = found.report.compared
    assert (peak.predicted, peak.measured) == (1884 * MiB, 1850 * MiB)
    assert (seconds.predicted, seconds.measured) == (88.4, found.report.step_seconds)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1]", "not a JSON object"),
        ('{"event": "step", "step": 0}', "step: must be at least 1"),
        ('{"event": "plan", "budget": "much"}', "budget: expected a whole number"),
        ('{"event": "step", "step": 41, "step": 42}', "occurs twice"),
        ("x", "not valid JSON"),
    ],
)
def test_what_is_no_record_is_named_by_its_line(log: Path, line: str, told: str) -> None:
    with log.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError) as refused:
        read_history(log)
    assert f"{log}:{len(log.read_text().splitlines())}: " in refused.value.message and told in refused.value.message


def test_a_log_of_many_evaluations_takes_the_time_of_its_lines(log: Path) -> None:
    """Each of its own set, which takes longest: ten times as many took a hundred times as long."""

    plain = log.read_text()

    def seconds(count: int) -> float:
        log.write_text(plain)
        with log.open("a") as file:
            for number in range(count):
                one = {"event": "eval", "step": 40, "name": f"set {number}", "loss": 1.0, "perplexity": 2.0, "tokens": 1}
                file.write(json.dumps({**one, "rows": 1, "seconds": 1.0}) + "\n")
                said = {"event": "sample", "step": 40, "number": number + 1, "prompt": "a", "text": "b", "tokens": 1}
                file.write(json.dumps({**said, "ended": "end", "seconds": 1.0}) + "\n")
        begin = time.process_time()
        found = read_history(log)
        assert len(evaluations(found)) == len(found.samples) == count
        return time.process_time() - begin

    assert seconds(15000) < 30 * seconds(1500)


def test_no_log_and_no_step_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist") as missing:
        run_report(tmp_path, json_output=False, html=None)
    assert "logging.backends" in str(missing.value.hint)
    (tmp_path / "log.jsonl").write_text(json.dumps({"event": "plan"}) + "\n")
    with pytest.raises(UsageError, match="has no step yet"):
        run_report(tmp_path, json_output=False, html=None)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_the_screen_fits_and_says_it_all(history: History, printer: Printer, width: int, ascii: bool) -> None:
    console, printed = printer(width, ascii=ascii)
    show_report(console, history)
    lines = printed().splitlines()
    assert max(map(len, lines)) <= width
    said = " ".join(" ".join(lines).split())
    for part in (
        "TinyLlama-1.1B", "40 of 40: all steps are done", "learning rate 1e-05", "loss 9 2", "peak RAM 1.84 GiB 1.81 GiB",
        "planned peak 1.84 GiB", "weights 420 MiB", "states 21.48 GiB", "17.6 GB per step, 1.76 GB/s during the 10.0 s",
        "616 GB written", "0.051% of its 1,200 TB", "ssd read",
    ):  # fmt: skip
        assert part in said, part


def test_an_axis_has_round_values(history: History) -> None:
    (memory,) = [series for series in series_of(history) if series.name == "peak RAM so far"]
    drawn = line_svg(memory, first_step=1)
    assert [text for text in (">0 MiB<", ">1.00 GiB<", ">2.00 GiB<") if text not in drawn] == []
    for value in (0.0, 1e-30, 1e30, 5.0):  # alone, or beside none
        found = line_svg(Series(name="x", values=(value, None, value), shown=str, from_zero=False), first_step=1)
        assert "nan" not in found.replace("not finite", "") and found.count("c-dot") == 2


class _Page(HTMLParser):
    """Collects what a page loads, and whether its tags are paired."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else(history: History) -> None:
    text = page(history)
    parsed = _Page()
    parsed.feed(text)
    assert not parsed.open and not parsed.loads and not {"script", "link", "iframe", "img", "object"} & set(parsed.seen)
    assert "prefers-color-scheme:dark" in text and "url(" not in text and "@import" not in text and "default-src 'none'" in text
    assert parsed.seen.count("svg") == len(series_of(history)) + 1 and parsed.seen.count("html") == 1
    for part in (
        "TinyLlama-1.1B",
        "Predicted and measured",
        "1.84 GiB",
        "990 PRO",
        "The last step",
        "step 40: 2",
        "not finite",
    ):
        assert part in parsed.text
    assert text.startswith("<!doctype html>")


EVEN = {"layers.0": (10, 10, 10, 10), "layers.1": (40, 0, 0, 0)}


def test_spread_of_experts() -> None:
    """Four experts get as many tokens, then one gets all: entropies of log 4 and of nothing."""
    assert Spread.of(EVEN) == Spread(entropy=0.5, least=0.0, most=4.0, unused=3)
    half = Spread.of({"one": (1, 1, 0, 0)})
    assert half.entropy == pytest.approx(0.5) and (half.least, half.most, half.unused) == (0.0, 2.0, 2)
    assert Spread.of({"one": (0, 0)}) == Spread(entropy=0.0, least=0.0, most=0.0, unused=2)


def mixture_step(number: int) -> StepReport:
    sent = EVEN | {"layers.0": (10 + number, 10, 10, 10)}
    return step(number, sent=sent, experts=Spread.of(sent), router_aux_loss=2.0 + number)


@pytest.fixture
def mixture(tmp_path: Path) -> History:
    """Reads the log of a mixture whose run was stopped."""
    with pytest.raises(Interrupted), JsonlLog(tmp_path / "log.jsonl") as file:
        file.write("plan", PLAN)
        for number in range(1, 4):
            file.step(mixture_step(number))
        raise Interrupted("stopped")
    return read_history(tmp_path / "log.jsonl")


def test_experts_are_shown(mixture: History, printer: Printer) -> None:
    assert mixture.sent is not None and mixture.sent.step == 3
    assert [one.experts.unused for one in mixture.steps if one.experts is not None] == [3, 3, 3]
    rows = {series.name: series.row[1:3] for series in series_of(mixture)}
    assert rows["experts without a token"] == ("3", "3") and rows["largest share of an expert"] == ("4.00 x even",) * 2
    assert rows["router auxiliary loss"] == ("3", "5")
    assert experts(mixture)[1] == ("layers.1", "4", "3", "0.00 x even", "0.00 x even", "4.00 x even", "0.0%")
    console, printed = printer(120)
    show_report(console, mixture)
    text = printed()
    assert "Experts" in text and "their shares of the tokens of step 3" in text and "layers.1" in text
    shown = page(mixture)
    assert shown.count('class="c-bar"') == 8 and "expert 0: 4.00 x even" in shown and "experts without a token" in shown


def test_a_dense_model_has_no_word_of_experts(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = read_history(log)
    run_report(log, json_output=True, html=None)
    for text in (log.read_text(), page(history), capsys.readouterr().out, str(series_of(history))):
        assert "expert" not in text and "router" not in text


def test_what_a_log_says_is_text_on_the_page(log: Path) -> None:
    hostile = "</title><script>alert(1)</script>\x1b\u202e"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for record in lines:
        record["model"] = record["choice"] = hostile
        if record["event"] == "timeline":
            record["intervals"][0] |= {"label": hostile, "resource": hostile}
            record["stalls"] = {hostile: 2.0}
        if record["event"] == "end":
            record["compared"][0]["what"] = hostile
    log.write_text("".join(json.dumps(record) + "\n" for record in lines))
    text = page(read_history(log))
    assert "<script" not in text and "&lt;script" in text and "\x1b" not in text and "\u202e" not in text
    parsed = _Page()
    parsed.feed(text)
    assert not parsed.open and "script" not in parsed.seen


def test_json_and_page_at_once(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_report(log.parent, json_output=True, html=tmp_path / "run.html")
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 1 and told["ended"] and len(told["steps"]) == 40
    assert told["planned"]["budget"] == 2 * GiB and told["measured"]["ram_peak"] == 1850 * MiB
    assert told["steps"][8]["loss"] is None and told["compared"][0]["what"] == "peak RAM"
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UsageError, match="cannot be written"):
        run_report(log, json_output=False, html=tmp_path)


def test_a_recipe_names_its_log(log: Path, tmp_path: Path, fresh: Callable[[str], Path]) -> None:
    recipe = fresh(f"output_dir: {log.parent}\nmodel: {{name_or_path: m}}\ndataset: {{train: [{{path: d.jsonl}}]}}\n")
    run_report(recipe, json_output=True, html=None)


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[str], Path]:
    def make(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return make


def evaluated(step: int, loss: float | None, *, name: str = "held-out") -> str:
    figures = {"step": step, "name": name, "loss": loss, "perplexity": None if loss is None else 2.0 * loss}
    return json.dumps({"schema_version": 1, "event": "eval", **figures, "tokens": 90, "rows": 7, "seconds": 1.5}) + "\n"


def test_held_out_losses_are_dots_where_their_steps_are(log: Path) -> None:
    lines = [evaluated(step, loss) for step, loss in ((0, 5.0), (20, 3.5), (40, None))]
    log.write_text(log.read_text() + "".join([*lines, evaluated(40, 7.0, name="other")]))
    (loss,) = [series for series in series_of(read_history(log)) if series.name == "loss"]
    assert loss.marks == ((0, 5.0), (20, 3.5)) and loss.note == "held-out loss of held-out"
    places = re.findall(r'class="c-mark" cx="([\d.]+)" cy="([\d.]+)"', line_svg(loss, first_step=1))
    curve = re.findall(r"[\d.]+,[\d.]+", line_svg(loss, first_step=1).split("c-curve")[2])
    assert len(places) == 2 and places[0][0] == "70.0"  # before the first step: the left edge
    assert places[1][0] == curve[20 - 10].split(",")[0]  # the second piece of the curve begins at step 10


def test_a_run_says_what_it_trained_and_that_it_ended_early(log: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    plans = {"total_steps": 90, "parameters": 1_000_000, "frozen_parameters": 990_000}
    log.write_text("".join(json.dumps(record | (plans if record["event"] == "plan" else {})) + "\n" for record in lines))
    told = dict(about(read_history(log)))
    assert told["steps"] == "40 of 90: ended early" and told["trained"] == "10,000 of 1,000,000 parameters"
    assert told["last begun"] == "2026-11-24 10:00 UTC"


def test_a_run_says_which_error_ended_it(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-2]))
    assert dict(about(read_history(log)))["steps"] == "40 of 40: running, or killed"

    def ended_by(error: BaseException) -> str:
        with pytest.raises(type(error)), JsonlLog(log):
            raise error
        return dict(about(read_history(log)))["steps"]

    assert ended_by(Interrupted("stopped")) == "40 of 40: stopped"
    assert ended_by(SwapError("the drive\nis gone")) == "40 of 40: ended with an error: the drive is gone"
    with JsonlLog(log) as begun_again:
        begun_again.write("plan", PLAN)
    assert read_history(log).failed == ""
    assert ended_by(KeyError("x")).endswith("ended with an error: KeyError: 'x'")
    log.write_text("".join(lines))
    assert ended_by(SwapError("no space")) == "40 of 40: all steps are done, then an error: no space"


def test_a_run_without_a_step_says_why(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    errors = {
        KeyboardInterrupt(): "was stopped before the first step",
        SwapError("no\nspace"): "before the first step: no space",
    }
    for error, told in errors.items():
        with pytest.raises(type(error)), JsonlLog(path, anew=True) as log:
            log.write("plan", PLAN)
            log.write("loaded", {})
            raise error
        with pytest.raises(UsageError, match=told):
            read_history(path)
    with JsonlLog(path, anew=True) as log:
        log.write("plan", PLAN)
    assert not path.with_name("log.jsonl.1").exists()
    with pytest.raises(UsageError, match="has no step yet"):
        read_history(path)


def test_a_finished_run_that_is_begun_again_keeps_its_figures(log: Path) -> None:
    before = read_history(log)
    with log.open("a") as file:
        for record in ({"event": "plan", **PLAN}, {"event": "timeline", "intervals": [], "stalls": {}}, {"event": "end"}):
            file.write(json.dumps(record) + "\n")
    found = read_history(log)
    assert found.ended and found.report == before.report


def test_one_step_has_figures_and_no_charts(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]))
    text = page(read_history(log))
    assert "<svg" not in text and "Point at a chart" not in text and "Over the steps" in text


def test_the_best_weights_are_called_kept_only_where_they_were(log: Path) -> None:
    def best(step: int, problem: str) -> str:
        return json.dumps({"event": "best", "step": step, "loss": 2.0, "folder": "out/best", "problem": problem}) + "\n"

    def told() -> str:
        return dict(about(read_history(log)))["best"]

    text = log.read_text()
    log.write_text(text + best(3, ""))
    assert told() == "loss 2.0000 after step 3, kept in out/best"
    log.write_text(text + best(3, "") + best(4, "the disk is full"))
    assert told() == "loss 2.0000 after step 4: its weights were not kept: the disk is full"


def test_evaluations_are_shown_as_they_were_the_last_time(log: Path) -> None:
    """Replaces an evaluation that is done again after a resume; those of steps that were lost go."""
    lines = log.read_text().splitlines(keepends=True)
    at = max(number for number, line in enumerate(lines) if '"event":"step","step":9,' in line)
    early = [evaluated(0, 3.0), evaluated(0, 5.0, name="other <b>"), evaluated(8, 2.5), evaluated(9, 1.0), evaluated(8, 2.0)]
    log.write_text("".join([*lines[:at], *early, *lines[at:], evaluated(40, 2.25), evaluated(40, None, name="other <b>")]))
    history = read_history(log)
    assert evaluations(history) == [
        ("held-out", "3.0000", "2.2500", "2.0000", "8", "4.5", "1.5 s"),
        ("other <b>", "5.0000", "?", "5.0000", "0", "?", "1.5 s"),
    ]
    assert "other &lt;b&gt;" in page(history) and "<h2>Evaluations</h2>" in page(history)


# ---- the log itself --------------------------------------------------------------------------------------------------


def step_of(step: int, loss: float = 2.0) -> StepReport:
    forward = [Busy(resource="compute", label="forward", begin=begin, end=end) for begin, end in ((0.0, 1.0), (0.5, 1.25))]
    return step_report(
        step, total_steps=9, loss=loss, seconds=1.5, tflops=math.inf, read_bytes=3, written_bytes=4, update_cpu_seconds=0.5,
        io_cpu_seconds=0.2, stalls={"ssd read": 0.25}, timeline=tuple(forward), busy={"compute": 1.25},
    )  # fmt: skip


def test_records_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "steps.jsonl"
    with JsonlLog(path) as log:
        log.step(step_of(1))
        log.step(step_of(2, loss=math.nan))
        log.write("saved", {"path": "outputs/é"})
    lines = path.read_text().splitlines()
    assert len(lines) == 3 and "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    first, second, third = map(json.loads, lines)
    assert first["schema_version"] == 1 and first["event"] == "step" and first["step"] == 1
    assert first["loss"] == 2.0 and first["tflops"] is None and first["grad_norm"] is None
    assert first["busy"] == {"compute": 1.25} and "timeline" not in first
    assert second["loss"] is None
    assert third == {"schema_version": 1, "event": "saved", "path": "outputs/é"}
    assert read_log(path) == [first, second, third]


@pytest.mark.parametrize("keep", [1, 40, 150_000])
def test_a_torn_line_is_dropped_on_resume(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "steps.jsonl"
    with JsonlLog(path) as log:
        log.step(step_of(1))
    whole = path.read_bytes()
    path.write_bytes(whole + (b'{"schema_version":1,"event":"step",' + b"x" * 200_000)[:keep])
    assert [record["step"] for record in read_log(path)] == [1]
    with JsonlLog(path) as log:
        log.step(step_of(2))
    assert path.read_bytes().startswith(whole)
    assert [record["step"] for record in read_log(path)] == [1, 2]


def test_a_file_of_one_torn_line_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"schema')
    JsonlLog(path).close()
    assert path.read_bytes() == b""


def test_nothing_else_is_cut_or_written(tmp_path: Path) -> None:
    other, link, pipe = tmp_path / "precious.txt", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    other.write_text("no line end")
    link.symlink_to(other)
    os.mkfifo(pipe)
    for path, why in ((link, "it is a symbolic link"), (pipe, "it is not a plain file")):
        with pytest.raises(UsageError, match=f"cannot open the log .*: {why}"):
            JsonlLog(path)
    assert other.read_text() == "no line end"


def test_errors_are_for_people(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot open the log"):
        JsonlLog(tmp_path)
    log = JsonlLog(tmp_path / "a.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.step(step_of(1))
