"""Finds the number of steps of a run: from the recipe, or from its epochs and the number of rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core.errors import FuyouError, UsageError
from ..core.paths import expanded, folder
from ..core.units import MiB, gb
from ..data.named_sets import unsaid

if TYPE_CHECKING:
    from ..data.holding_back import Part
    from ..data.rows import DataSummary, Rows
    from ..data.sampler import Sampler
    from ..data.stream import Stream
    from ..recipe.schema import DatasetSection, Recipe

HELD_BACK = "held-back"  # the name of the set of `dataset.eval_fraction`
_ALONE: dict[str, object] = {"eval": (), "packing": False, "streaming": False}  # of a set to evaluate
LARGE = 1 << 30  # bytes of data files: tokenising them takes many minutes
_SAMPLES = 2000  # of each entry of the data, that a plan tokenises to see how long rows are
_LENGTHS_UNKNOWN = "how long the rows are is not known"
_LENGTHS = 4096  # rows, at most, whose lengths a plan looks at
COUNTED = 64 * MiB  # bytes of data files; tokenising more for a plan would take minutes


def tokenised_rows(
    recipe: Recipe, tokenizer_dir: Path, *, cache: Path | None = None, say: Callable[[str], None] = unsaid
) -> Rows:
    """Returns the data as rows of tokens. They are made once in `cache` (default: the run's own), and found again while what
    they depend on is the same."""
    from ..data.cache import prepare

    return prepare(**_asked(recipe, tokenizer_dir), cache_dir=cache or cache_of(recipe), say=say)


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
                beside = "dataset.streaming=true does it beside"
                say(f"note: all of the data ({gb(size)}) is tokenised before the first step; {beside}")
        rows = tokenised_rows(recipe, tokenizer_dir, cache=cache, say=say)
        check(rows.summary)
        return rows, sampler_of(recipe, len(rows), entry_rows=rows.summary.entry_rows)
    asked = {name: value for name, value in _asked(recipe, tokenizer_dir).items() if name != "part"}
    stream = Stream(
        **asked,
        cache_dir=cache or cache_of(recipe),
        batch_size=recipe.train.batch_size,
        seed=recipe.seed,
        check=check,
        say=say,
    )
    return stream, stream


def evaluation_rows(
    recipe: Recipe, tokenizer_dir: Path, *, cache: Path | None = None, say: Callable[[str], None] = unsaid
) -> dict[str, Rows]:
    """Returns the rows of each set to evaluate by its name, tokenised like those to train on, but never packed: those of
    `dataset.eval`, then the samples of `dataset.train` that `dataset.eval_fraction` holds back."""
    from ..data.cache import prepare

    asked, cache = {**_asked(recipe, tokenizer_dir), "part": None, "say": say}, cache or cache_of(recipe)
    with naming_evaluation():
        found = {
            name: prepare(**{**asked, "dataset": dataset}, cache_dir=cache) for name, dataset in evaluation_sets(recipe).items()
        }
    if recipe.dataset.eval_fraction:
        entries = tuple(entry.model_copy(update={"weight": None}) for entry in recipe.dataset.train)
        dataset = recipe.dataset.model_copy(update={"train": entries, **_ALONE})
        name = HELD_BACK if HELD_BACK not in found else "dataset.eval_fraction"
        found[name] = prepare(**{**asked, "dataset": dataset, "part": _part(recipe, held=True)}, cache_dir=cache)
    return found


def _part(recipe: Recipe, *, held: bool) -> Part | None:
    from ..data.holding_back import Part

    fraction = recipe.dataset.eval_fraction
    return Part(fraction=fraction, seed=recipe.seed, held=held) if fraction else None


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
    return find(**_asked(recipe, tokenizer_dir), cache_dir=cache_of(recipe))


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
    from ..data.sampler import Sampler

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
    told = [
        f"{entry.path} {weight / sum(weights):.3g} of the rows" + (f", seen {seen[number]:.3g} times" if seen else "")
        for number, (entry, weight) in enumerate(zip(recipe.dataset.train, weights, strict=False))
    ]
    return "; ".join(told) if told else None


def _asked(recipe: Recipe, tokenizer_dir: Path) -> dict[str, Any]:
    template = recipe.tokenizer.chat_template
    return {
        "dataset": recipe.dataset,
        "tokenizer_dir": tokenizer_dir,
        "chat_template": None if template is None else expanded(template, key="tokenizer.chat_template"),
        "pad_token": recipe.tokenizer.pad_token,
        "part": _part(recipe, held=False),
    }


def cache_of(recipe: Recipe) -> Path:
    """Returns the folder that keeps tokenised rows."""
    return folder(recipe.dataset.cache_dir or Path(recipe.output_dir, "data"), key="dataset.cache_dir")
