"""Finds how long a run is: its rows and steps, its learning rate at each, and the limits that end it early."""

from __future__ import annotations

import math
import tempfile
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..core.errors import FuyouError, UsageError
from ..core.paths import expanded, folder
from ..core.units import MiB, duration, format_time, gb
from ..data.sources import say_nothing
from ..recipe.schema import format_size
from ..spec.plan import Plan
from .state.manifest import TENSORS

if TYPE_CHECKING:
    from ..data.batches import HeldPart, Sampler
    from ..data.cache import RowsRequest
    from ..data.rows import DataSummary, Rows
    from ..data.stream import Stream
    from ..recipe.schema import DatasetSection, Recipe
    from .report import StepReport

HELD_BACK = "held-back"  # the name of the set of `dataset.eval_fraction`
_ALONE: dict[str, object] = {"eval": (), "packing": False, "streaming": False}  # of a set to evaluate
LARGE = 1 << 30  # bytes of data files: tokenising them takes many minutes
_SAMPLES = 2000  # of each entry of the data, that a plan tokenises to see how long rows are
_LENGTHS_UNKNOWN = "how long the rows are is not known"
_LENGTHS = 4096  # rows, at most, whose lengths a plan looks at
COUNTED = 64 * MiB  # bytes of data files; tokenising more for a plan would take minutes


def tokenised_rows(
    recipe: Recipe, tokenizer_dir: Path, *, cache: Path | None = None, say: Callable[[str], None] = say_nothing
) -> Rows:
    """Returns the data as rows of tokens. They are made once in `cache` (default: the run's own), and found again while what
    they depend on is the same."""
    from ..data.cache import prepare

    return prepare(_asked(recipe, tokenizer_dir), cache or cache_of(recipe), say=say)


def fed(
    recipe: Recipe,
    tokenizer_dir: Path,
    *,
    check: Callable[[DataSummary], None],
    say: Callable[[str], None],
    cache: Path | None = None,
) -> tuple[Rows, Sampler] | tuple[Stream, Stream]:
    """Returns the rows to train on and their order. `check` refuses rows that do not fit the model."""
    from ..data.sources import MissingDataError, size_of
    from ..data.stream import Stream

    if not recipe.dataset.streaming:
        with suppress(MissingDataError):  # of a set that is yet to be fetched
            if recipe.train.max_steps is not None and (size := size_of(recipe.dataset)) > LARGE:
                advice = "dataset.streaming=true does it beside"
                say(f"note: all of the data ({gb(size)}) is tokenised before the first step; {advice}")
        rows = tokenised_rows(recipe, tokenizer_dir, cache=cache, say=say)
        check(rows.summary)
        return rows, sampler_of(recipe, len(rows), entry_rows=rows.summary.entry_rows)
    asked, cache = replace(_asked(recipe, tokenizer_dir), part=None), cache or cache_of(recipe)
    stream = Stream(asked, cache_dir=cache, batch_size=recipe.train.batch_size, seed=recipe.seed, check=check, say=say)
    return stream, stream


def evaluation_rows(
    recipe: Recipe, tokenizer_dir: Path, *, cache: Path | None = None, say: Callable[[str], None] = say_nothing
) -> dict[str, Rows]:
    """Returns the rows of each set to evaluate by its name, tokenised like those to train on, but never packed: those of
    `dataset.eval`, then the samples of `dataset.train` that `dataset.eval_fraction` holds back."""
    from ..data.cache import prepare

    asked, cache = replace(_asked(recipe, tokenizer_dir), part=None), cache or cache_of(recipe)
    with naming_evaluation():
        rows_of = {
            name: prepare(replace(asked, dataset=dataset), cache, say=say) for name, dataset in evaluation_sets(recipe).items()
        }
    if recipe.dataset.eval_fraction:
        entries = tuple(entry.model_copy(update={"weight": None}) for entry in recipe.dataset.train)
        dataset = recipe.dataset.model_copy(update={"train": entries, **_ALONE})
        name = HELD_BACK if HELD_BACK not in rows_of else "dataset.eval_fraction"
        rows_of[name] = prepare(replace(asked, dataset=dataset, part=_part(recipe, held=True)), cache, say=say)
    return rows_of


def _part(recipe: Recipe, *, held: bool) -> HeldPart | None:
    from ..data.batches import HeldPart

    fraction = recipe.dataset.eval_fraction
    return HeldPart(fraction=fraction, seed=recipe.seed, held=held) if fraction else None


def evaluation_sets(recipe: Recipe) -> dict[str, DatasetSection]:
    """Returns each set of `dataset.eval` as a data set of its own. Its name is its file's without suffixes, or its path where
    two would have the same name."""
    paths = [entry.path for entry in recipe.dataset.eval]
    short = [Path(path).name.partition(".")[0] or path for path in paths]
    names = short if len(set(short)) == len(short) else paths
    if len(set(names)) < len(names):
        names = [f"{path} ({number})" for number, path in enumerate(paths, start=1)]
    return {
        name: recipe.dataset.model_copy(update={"train": (entry,), **_ALONE})
        for name, entry in zip(names, recipe.dataset.eval, strict=True)
    }


@contextmanager
def naming_evaluation() -> Iterator[None]:
    """Names `dataset.eval` in errors about data: whoever reads a set takes it for the rows to train on."""
    try:
        yield
    except UsageError as error:
        raise type(error)(error.message.replace("dataset.train", "dataset.eval", 1), hint=error.hint) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Holds what a plan needs to know of the rows of an epoch. `rows`: None if the data is a stream; `lengths`: tokens of some
    of them, as they are spread in all."""

    rows: int | None
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, rows: Rows | Stream) -> Epoch:
        summary = rows.summary
        if summary.streamed:  # what of it is there tells the mean
            return cls(rows=None, lengths=(max(1, summary.tokens // max(1, summary.rows)),))
        lengths = cast("Rows", rows).lengths
        return cls(rows=len(lengths), lengths=tuple(lengths[:: -(-len(lengths) // _LENGTHS)].tolist()))


def epoch_of(recipe: Recipe, tokenizer_dir: Path, say: Callable[[str], None]) -> Epoch | None:
    """Looks at the rows of an epoch for a plan: those of an earlier run, or of data that takes seconds to tokenise. Returns
    None otherwise."""
    from ..data.sources import size_of

    with _told(say, "the number of steps is not known"):
        if (known := _made_before(recipe, tokenizer_dir, say)) is not None:
            return Epoch.of(known)
        if size_of(recipe.dataset) > COUNTED:
            say("note: the number of steps is not known until a run has tokenised the data")
            return _of_first_samples(recipe, tokenizer_dir, say)
        say("reading and tokenising the data, to count the steps")
        with tempfile.TemporaryDirectory(prefix="fuyou-rows-") as scratch:
            return Epoch.of(tokenised_rows(recipe, tokenizer_dir, cache=Path(scratch)))
    return None


def sampled_epoch(recipe: Recipe, tokenizer_dir: Path, say: Callable[[str], None]) -> Epoch | None:
    """Looks at how long rows are: at those of an earlier run, or at the first samples of each entry of the data, which takes
    seconds. Returns None where all rows are whole, or where the data cannot be read, and says why."""
    if recipe.dataset.packing == "concat":
        return None
    with _told(say, _LENGTHS_UNKNOWN):
        if not recipe.dataset.streaming and (known := _made_before(recipe, tokenizer_dir, say)) is not None:
            return replace(Epoch.of(known), rows=None)
        return _of_first_samples(recipe, tokenizer_dir, say)
    return None


def _made_before(recipe: Recipe, tokenizer_dir: Path, say: Callable[[str], None]) -> Rows | None:
    """Finds the rows that an earlier run made of the same data: nothing is tokenised then."""
    if not any(cache_of(recipe).glob("*")):
        return None
    from ..data.cache import find  # with numpy
    from ..data.sources import size_of

    if size_of(recipe.dataset) > COUNTED:
        say("reading the data, to find the rows of an earlier run")
    return find(_asked(recipe, tokenizer_dir), cache_of(recipe))


def _of_first_samples(recipe: Recipe, tokenizer_dir: Path, say: Callable[[str], None]) -> Epoch | None:
    if recipe.dataset.packing == "concat":
        return None
    entries = tuple(
        entry.model_copy(update={"max_samples": min(entry.max_samples or _SAMPLES, _SAMPLES)}) for entry in recipe.dataset.train
    )
    dataset = recipe.dataset.model_copy(update={"train": entries, "streaming": False})
    first = recipe.model_copy(update={"dataset": dataset})
    say("reading some of the data, to see how long its rows are")
    with _told(say, _LENGTHS_UNKNOWN), tempfile.TemporaryDirectory(prefix="fuyou-rows-") as scratch:
        return replace(Epoch.of(tokenised_rows(first, tokenizer_dir, cache=Path(scratch))), rows=None)
    return None


@contextmanager
def _told(say: Callable[[str], None], unknown: str) -> Iterator[None]:
    """Ends what cannot be done with the data: says what is not known, and why. Of data that is not there the user was told
    before."""
    from ..data.sources import MissingDataError

    try:
        yield
    except MissingDataError:
        pass
    except (FuyouError, OSError) as error:
        reason = error.message if isinstance(error, FuyouError) else str(error)
        say(f"note: {unknown}: {reason}")


def counted_evaluation(recipe: Recipe, tokenizer_dir: Path) -> list[int] | None:
    """Counts the rows of each set to evaluate, for a plan. Returns None where tokenising them would take minutes, or fails."""
    sets = [*evaluation_sets(recipe).values(), *([recipe.dataset] if recipe.dataset.eval_fraction else [])]
    if not sets:
        return None
    from ..data.sources import size_of

    try:
        if sum(map(size_of, sets)) > COUNTED:
            return None
        with tempfile.TemporaryDirectory(prefix="fuyou-rows-") as scratch:
            cache = cache_of(recipe) if cache_of(recipe).is_dir() else Path(scratch)
            return [len(rows) for rows in evaluation_rows(recipe, tokenizer_dir, cache=cache).values()]
    except (FuyouError, OSError):  # a run says what is wrong with them
        return None


def steps_of(recipe: Recipe, rows: int | None) -> int:
    """Returns `max_steps`, or the steps that the epochs take over this many rows. Returns 0 if neither is known."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps
    if not rows:
        return 0
    return sampler_of(recipe, rows).steps(recipe.train.epochs or 1)


def sampler_of(recipe: Recipe, rows: int, *, entry_rows: Sequence[int] = ()) -> Sampler:
    """Makes the order of this many rows, weighted if there are `entry_rows` and the recipe has weights for them."""
    from ..data.batches import Sampler

    return Sampler(
        rows,
        batch_size=recipe.train.batch_size,
        shuffle=recipe.dataset.shuffle,
        seed=recipe.seed,
        entry_rows=entry_rows,
        weights=recipe.dataset.weights if entry_rows else (),
    )


def mixture_of(recipe: Recipe, sampler: Sampler | Stream, steps: int) -> str | None:
    """Says what share of the rows each entry of a mixture gets, and how often its rows are seen, if that is known. Returns None
    without weights."""
    weights, seen = recipe.dataset.weights, sampler.entry_epochs(steps)
    shares = [
        f"{entry.path} {weight / sum(weights):.3g} of the rows" + (f", seen {seen[number]:.3g} times" if seen else "")
        for number, (entry, weight) in enumerate(zip(recipe.dataset.train, weights, strict=False))
    ]
    return "; ".join(shares) if shares else None


def _asked(recipe: Recipe, tokenizer_dir: Path) -> RowsRequest:
    from ..data.cache import RowsRequest

    template = recipe.tokenizer.chat_template
    return RowsRequest(
        dataset=recipe.dataset,
        tokenizer_dir=tokenizer_dir,
        chat_template=None if template is None else expanded(template, key="tokenizer.chat_template"),
        pad_token=recipe.tokenizer.pad_token,
        part=_part(recipe, held=False),
    )


def cache_of(recipe: Recipe) -> Path:
    """Returns the folder that keeps tokenised rows."""
    return folder(recipe.dataset.cache_dir or Path(recipe.output_dir, "data"), key="dataset.cache_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Computes a linear warm-up, then a constant, linear, cosine or wsd schedule (constant, then linear decay over
    `decay_steps`).

    The step after the warm-up has the peak: step s has transformers' factor at index s - 1, so no step of a run has the rate 0,
    and the least rate is what a step after the last would have. Runs that builds before this rule began keep theirs
    (`peak_after_warmup` False: index s), whose last step has the least rate.
    """

    name: str
    peak: float
    warmup_steps: int
    total_steps: int
    min_ratio: float
    decay_steps: int = 0
    peak_after_warmup: bool = True

    def at(self, step: int) -> float:
        """Returns the rate of step `step` (1 is the first)."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        index = step - 1 if self.peak_after_warmup else step
        progress = min(1.0, (index - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.name == "constant":
            factor = 1.0
        elif self.name == "linear":
            factor = 1.0 - (1.0 - self.min_ratio) * progress
        elif self.name == "cosine":
            factor = self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            into_decay = index - (self.total_steps - self.decay_steps)
            decayed = max(0.0, into_decay / self.decay_steps) if self.decay_steps else 0.0
            factor = 1.0 - (1.0 - self.min_ratio) * min(1.0, decayed)
        return self.peak * factor


def learning_rate(recipe: Recipe, total_steps: int, *, peak_after_warmup: bool = True) -> LearningRate:
    """Returns the learning rate of a run of `total_steps`. `peak_after_warmup`: what a saved run began with. Raises UsageError
    if the warm-up is longer than the run."""
    schedule, warmup = recipe.lr_scheduler, recipe.lr_scheduler.warmup_steps
    if warmup is None:
        warmup = round((schedule.warmup_ratio or 0.0) * total_steps)
    if warmup > total_steps:
        raise UsageError(
            f"lr_scheduler.warmup_steps: a warm-up of {warmup:,} steps is longer than the run's {total_steps:,} steps",
            hint="lower it, raise train.epochs, or write lr_scheduler.warmup_ratio",
        )
    decay = max(1, total_steps // 10) if schedule.name == "wsd" else 0
    return LearningRate(
        name=schedule.name,
        peak=recipe.optimizer.lr,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_ratio=schedule.min_lr_ratio,
        decay_steps=min(decay, total_steps - warmup) if peak_after_warmup else decay,
        peak_after_warmup=peak_after_warmup,
    )


class RunLimits:
    """Checks the limits of one process. Call `begin` before its first step, and `took` after each step."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._plan, self._seconds, self._bytes = plan, recipe.train.max_time, recipe.offload.ssd_write_limit
        self._interval = (plan.commit_every if plan.has_apart_commits else None) or 1
        self._took: deque[float] = deque(maxlen=self._interval)  # seconds of the last steps, including one with a commit
        self._first = self._step = self._begin = 0

    def begin(self, done: int, written: int) -> None:
        """Begins after step `done`. `written`: bytes that the run has written to the store so far, in all its processes."""
        self._first = self._step = done
        self._begin = written

    def took(self, step: StepReport) -> None:
        self._step = step.step
        self._took.append(step.seconds)

    def reached(self, *, seconds: float, written: int) -> str | None:
        """Returns a message with the limit that another step would exceed, or None if the step may begin. `seconds`: since the
        run was opened."""
        return self.time(seconds) or writes(self._bytes, written, self.due(written), written_by_step(self._plan))

    def time(self, seconds: float) -> str | None:
        following = max(self._took, default=0.0)
        if len(self._took) < self._interval:  # no step with a commit was seen yet
            following += self._plan.predicted.commit_seconds
        if self._seconds is None or seconds + following <= self._seconds:
            return None
        step = f", and the next step may take {duration(following)}" if following else ""
        return f"train.max_time={format_time(self._seconds)}: {duration(seconds)} have passed{step}"

    def due(self, written: int) -> int:
        """Returns the bytes that the run has written once another step is over and saved."""
        plan, done = self._plan, self._begin + _written(self._plan, self._step - self._first, done=self._first)
        return max(written, done) + written_by_step(plan) + saved_where_it_stops(plan)


def writes(limit: int | None, written: int, due: int, step: int) -> str | None:
    """Returns a message where another step would write more than a limit, None where it would not. Of ranks all of these are
    sums over those of a box."""
    if limit is None or due <= limit:
        return None
    return f"offload.ssd_write_limit={format_size(limit)}: {gb(written)} were written, and a step writes {gb(step)}"


def check_loading(recipe: Recipe, plan: Plan) -> None:
    """Raises UsageError if a new run may not even write the loaded model and one step: it could never make progress."""
    most, saved = recipe.offload.ssd_write_limit, saved_where_it_stops(plan)
    step = written_by_step(plan) + saved
    if most is None or loaded(plan) + step <= most:
        return
    raise UsageError(
        f"offload.ssd_write_limit={format_size(most)} is too small: loading the model writes {gb(loaded(plan))}, "
        f"a step{' and saving it' if saved else ''} {gb(step)}",
        hint="raise it, or leave it out",
    )


def loaded(plan: Plan) -> int:
    """Returns the bytes that loading writes, wherever the weights rest later. Moments are written by the first updates."""
    frozen = sum(stage.frozen_extent.size for stage in plan.stages if stage.frozen_extent is not None)
    return frozen + sum(stage.weights_at.size for stage in plan.stages)


def written_by_step(plan: Plan) -> int:
    """Returns the bytes that a step writes. If only some steps are committed, returns those of a step that is not. Averages are
    rounded down."""
    predicted = plan.predicted
    if not plan.has_apart_commits or plan.commit_every is None:
        return predicted.written_per_step
    return max(0, predicted.written_per_step - saved_where_it_stops(plan) // plan.commit_every)


def steps_within_writes(plan: Plan, room: int, *, done: int) -> int:
    """Returns how many steps after step `done` write at most `room` bytes, including the save at the end."""
    step, saved = written_by_step(plan), saved_where_it_stops(plan)
    interval = (plan.commit_every if plan.has_apart_commits else None) or 1
    in_one = _written(plan, interval, done=0)
    most = interval * (room // in_one + 2) if in_one else 0
    return bisect_right(range(most), room - step - saved, key=lambda steps: _written(plan, steps, done=done))


def _written(plan: Plan, steps: int, *, done: int) -> int:
    """Returns the bytes that this many steps after step `done` write, with their commits."""
    every = plan.commit_every if plan.has_apart_commits else None
    commits = (done + steps) // every - done // every if every else 0
    return steps * written_by_step(plan) + commits * saved_where_it_stops(plan)


def saved_where_it_stops(plan: Plan) -> int:
    """Returns the bytes that saving writes beside the updates: tensors that rest in RAM or on the device, unless every step's
    update writes them."""
    if plan.commit_every == 1:
        return 0
    return sum(
        extent.size
        for stage in plan.stages
        for name in TENSORS
        if name != "frozen" and (stage.updated_on_device or stage.ram(name) is not None)
        if (extent := stage.extent(name, 0)) is not None
    )
