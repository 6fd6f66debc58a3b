"""Runs `fuyou data`: the rows that a run would train on, made as a run makes them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate, chain, count, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.disk import existing
from fuyou_cli.core.errors import UsageError

from .console import result_console, status_console, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.data.rows import Feed
    from fuyou_cli.recipe.schema import Recipe

    from .render.data_screen import Seen, Shown


def run_data(recipe: Recipe, *, number: int, json_output: bool) -> None:
    """Shows counts, lengths and the first `number` rows of training."""
    from .render.data_screen import show_data

    with _folder(recipe) as cache:
        seen = _look(recipe, cache, number, whole=json_output)
    if json_output:
        write_json(_as_data(seen))
        return
    show_data(result_console(), seen)


@contextmanager
def _folder(recipe: Recipe) -> Iterator[Path]:
    """Gives the folder of the recipe's rows, if a run has made it; else one that is removed, on the same disk: the usual
    folder for temporary files may be memory."""
    from fuyou_cli.training.length import cache_of

    if (cache := cache_of(recipe)).is_dir():
        yield cache
        return
    place = existing(cache.parent)
    if not os.access(place, os.W_OK | os.X_OK):
        place = Path(tempfile.gettempdir())
        write_status(f"note: rows are written to {place}, because {existing(cache.parent)} cannot be written")
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".fuyou-rows-", dir=place)
    except OSError as error:
        key = "output_dir" if recipe.dataset.cache_dir is None else "dataset.cache_dir"
        raise UsageError(f"{key}: nothing can be written to {place}: {error.strerror}", hint="name another folder") from None
    with scratch as folder:
        yield Path(folder)


def _look(recipe: Recipe, cache: Path, number: int, *, whole: bool) -> Seen:
    from fuyou_cli.checkpoint.hub import Hub
    from fuyou_cli.training.length import evaluation_rows, fed, mixture_of, steps_of

    from .render.data_screen import Seen
    from .render.transfer import Transfers

    with Transfers(status_console()) as progress:
        tokenizer_dir = Hub(recipe, say=write_status, progress=progress).tokenizer_alone()
    write_status("reading and tokenising the data")
    rows, sampler = fed(recipe, tokenizer_dir, cache=cache, check=lambda summary: None, say=write_status)
    sets = evaluation_rows(recipe, tokenizer_dir, cache=cache)
    steps = steps_of(recipe, rows.summary.rows)
    order = chain.from_iterable(map(sampler.batch, count()))
    return Seen(
        recipe=recipe,
        summary=rows.summary,
        sets={name: found.summary for name, found in sets.items()},
        steps=steps,
        note=sampler.note(steps, recipe.train.epochs),
        mixture=mixture_of(recipe, sampler, steps),
        shown=_decoded(recipe, tokenizer_dir, rows, list(islice(order, min(number, rows.summary.rows))), whole=whole),
    )


def _decoded(recipe: Recipe, tokenizer_dir: Path, rows: Feed, chosen: Sequence[int], *, whole: bool) -> list[Shown]:
    """Decodes rows; of each document the first tokens, unless it is to be shown `whole`."""
    from fuyou_cli.data.tokenise import PREVIEW_TOKENS, decode_pieces, load_tokenizer

    from .render.data_screen import Shown

    if not chosen:
        return []
    tokenizer = load_tokenizer(tokenizer_dir, chat_template=None, pad_token=recipe.tokenizer.pad_token)
    shown = []
    for row in chosen:
        tokens, mask = rows.tokens(row), rows.mask(row)
        bounds = pairwise(accumulate(rows.documents(row) or [len(tokens)], initial=0))
        most = len(tokens) if whole else PREVIEW_TOKENS
        documents = [decode_pieces(tokenizer, (tokens[a:b], mask[a:b]), at_most=most) for a, b in bounds]
        shown.append(Shown(row=row, tokens=len(tokens), trained=int(mask[1:].sum()), documents=documents))
    return shown


def _as_data(seen: Seen) -> dict[str, Any]:
    left_out = ("preview", "pad_id", "digest", "highest_token_id", "formats")
    summary = {name: value for name, value in asdict(seen.summary).items() if name not in left_out}
    return {
        **summary,
        "formats": [{"path": path, "format": name} for path, name in seen.summary.formats],
        "notes": [*seen.summary.notes, *([seen.note] if seen.note else [])],
        "steps": seen.steps,
        "eval": {
            name: {"rows": one.rows, "tokens": one.tokens, "label_tokens": one.label_tokens} for name, one in seen.sets.items()
        },
        "shown": [
            {
                "row": row.row,
                "tokens": row.tokens,
                "label_tokens": row.trained,
                "documents": [
                    [{"text": text, "trained": trained} for text, trained in document] for document in row.documents
                ],
            }
            for row in seen.shown
        ],
    }  # fmt: skip
