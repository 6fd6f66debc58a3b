"""Makes the rows that a run would train on, as a run makes them, and decodes some to be looked at."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, count, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.hub import Hub, Progress
from ..core.disk import existing
from ..core.paths import scratch_in
from ..data.sources import find_sources, is_read_whole
from ..data.tokenise import PREVIEW_TOKENS, decode_pieces, load_tokenizer
from .length import Epoch, cache_of, evaluation_rows, evaluation_sets, fed, mixture_of, steps_of
from .numerics import usual_numerics

if TYPE_CHECKING:
    from ..data.rows import DataSummary, Feed
    from ..data.sources import Source
    from ..recipe.schema import Recipe
    from ..spec.plan import TypicalStep

Say = Callable[[str], None]

Pieces = Sequence[tuple[str, bool]]  # texts, and whether they are trained


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    """Holds one row, decoded. `documents`: of each document that is kept apart, or of the whole row."""

    row: int  # from 0
    tokens: int
    trained: int
    documents: Sequence[Pieces]

    def as_data(self) -> dict[str, Any]:
        """Returns it for JSON."""
        documents = [[{"text": text, "trained": trained} for text, trained in document] for document in self.documents]
        return {"row": self.row, "tokens": self.tokens, "label_tokens": self.trained, "documents": documents}


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingShares:
    """Says how much of what a typical step computes is padding. Shares of all tokens, but for `step_tokens`."""

    step_tokens: int  # without padding
    end_to_end: float  # if rows lie end to end, as for most models
    padded: float  # of a model that cannot keep rows apart: each micro-batch is as wide as its longest row


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPreview:
    """Holds what is told about a recipe's data."""

    recipe: Recipe
    summary: DataSummary
    sets: dict[str, DataSummary]  # to evaluate
    steps: int  # of the run
    sources: Sequence[Source]  # of training, then of the sets to evaluate
    notes: Sequence[str]  # on how often rows are seen, where texts are cut, and what is not packed
    mixture: str | None
    padding: PaddingShares | None  # None: all rows are whole
    shown: Sequence[ShownRow]

    def as_data(self) -> dict[str, Any]:
        """Returns it for JSON."""
        left_out, of_a_set = ("preview", "pad_id", "digest", "highest_token_id", "formats"), ("rows", "tokens", "label_tokens")
        return {
            **{name: value for name, value in asdict(self.summary).items() if name not in left_out},
            "formats": [{"path": path, "format": name} for path, name in self.summary.formats],
            "files": [
                {"path": source.entry.path, "files": list(map(str, source.files)), "skipped": list(map(str, source.skipped))}
                for source in self.sources
            ],
            "notes": [*self.summary.notes, *self.notes],
            "steps": self.steps,
            "padding": None if self.padding is None else asdict(self.padding),
            "eval": {name: {key: getattr(source, key) for key in of_a_set} for name, source in self.sets.items()},
            "shown": [row.as_data() for row in self.shown],
        }


def preview(recipe: Recipe, number: int, *, whole: bool, say: Say, progress: Progress) -> DataPreview:
    """Looks at the data of a recipe, and at the first `number` rows of training. `whole`: all of each document."""
    with _folder(recipe, say) as cache:
        tokenizer_dir = Hub(recipe, say=say, progress=progress).tokenizer_alone()
        say("reading and tokenising the data")
        rows, sampler = fed(recipe, tokenizer_dir, cache=cache, check=lambda summary: None, say=say)
        sets = evaluation_rows(recipe, tokenizer_dir, cache=cache, say=say)
        steps = steps_of(recipe, rows.summary.rows)
        order = chain.from_iterable(map(sampler.batch, count()))
        seen_often = sampler.note(steps, recipe.train.epochs)
        return DataPreview(
            recipe=recipe,
            summary=rows.summary,
            sets={name: rows.summary for name, rows in sets.items()},
            steps=steps,
            sources=[
                source for section in (recipe.dataset, *evaluation_sets(recipe).values()) for source in find_sources(section)
            ],
            notes=[*([seen_often] if seen_often else []), *_cuts(recipe)],
            mixture=mixture_of(recipe, sampler, steps),
            padding=_padding(recipe, Epoch.of(rows)),
            shown=_decoded(recipe, tokenizer_dir, rows, list(islice(order, min(number, rows.summary.rows))), whole=whole),
        )


@contextmanager
def _folder(recipe: Recipe, say: Say) -> Iterator[Path]:
    """Gives the folder of the recipe's rows, if a run has made it; else one that is removed, on the same disk: the usual
    folder for temporary files may be memory."""
    if (cache := cache_of(recipe)).is_dir():
        yield cache
        return
    place = existing(cache.parent)
    if not os.access(place, os.W_OK | os.X_OK):
        place = Path(tempfile.gettempdir())
        say(f"note: rows are written to {place}, because {existing(cache.parent)} cannot be written")
    key = "output_dir" if recipe.dataset.cache_dir is None else "dataset.cache_dir"
    with scratch_in(place, what=key, hint="name another folder") as folder:
        yield folder


def _cuts(recipe: Recipe) -> Iterator[str]:
    """Says where .txt files are cut, and that sets to evaluate are not packed."""
    sets, packing = list(evaluation_sets(recipe).values()), recipe.dataset.packing
    named = [(find_sources(section), is_read_whole(section)) for section in (recipe.dataset, *sets)]
    for whole, what in ((True, "is one document"), (False, "is cut at blank lines: each paragraph is a sample")):
        sources = [source for files, is_whole in named for source in files if is_whole is whole and source.has_paragraphs]
        for path in dict.fromkeys(source.entry.path for source in sources):
            yield f"{path} {what}"
    if packing and (sets or recipe.dataset.eval_fraction):
        yield f"dataset.packing={packing} is for rows to train on: each sample to evaluate is a row of its own"


def _padding(recipe: Recipe, epoch: Epoch) -> PaddingShares | None:
    """Finds what a typical step holds, with micro-batches as they usually are: a plan may choose others."""
    from ..data.batches import typical_step

    shares: list[TypicalStep] = []
    for apart in (True, False):
        numerics = usual_numerics(recipe, apart=apart)
        if (typical := typical_step(epoch.lengths, numerics)) is None:
            return None
        shares.append(typical)
    end_to_end, padded = (1 - typical.tokens / typical.computed for typical in shares)
    return PaddingShares(step_tokens=shares[0].tokens, end_to_end=end_to_end, padded=padded)


def _decoded(recipe: Recipe, tokenizer_dir: Path, rows: Feed, chosen: Sequence[int], *, whole: bool) -> list[ShownRow]:
    """Decodes rows; of each document the first tokens, unless it is to be shown `whole`."""
    if not chosen:
        return []
    tokenizer = load_tokenizer(tokenizer_dir, chat_template=None, pad_token=recipe.tokenizer.pad_token)
    shown = []
    for row in chosen:
        tokens, mask = rows.tokens(row), rows.mask(row)
        bounds = pairwise(accumulate(rows.documents(row) or [len(tokens)], initial=0))
        most = len(tokens) if whole else PREVIEW_TOKENS
        documents = [decode_pieces(tokenizer, (tokens[a:b], mask[a:b]), at_most=most) for a, b in bounds]
        shown.append(ShownRow(row=row, tokens=len(tokens), trained=int(mask[1:].sum()), documents=documents))
    return shown
