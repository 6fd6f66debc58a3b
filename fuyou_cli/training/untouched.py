"""Keeps what training leaves alone of a model: the parts that do not run on text, as a vision tower, and the values of buffers.

Nothing of them is in the store. An export copies their tensors from the checkpoint that the run began with, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.files import open_checkpoint
from ..checkpoint.header import BYTES_PER_ELEMENT, TensorEntry
from ..checkpoint.names import is_in
from ..checkpoint.reader import TensorReader, weights_mark
from ..checkpoint.writer import OutTensor, Read
from ..core.errors import UsageError
from .state.stored import Untouched

if TYPE_CHECKING:
    from ..engine.anatomy import Anatomy


def untouched_of(anatomy: Anatomy, entries: Mapping[str, TensorEntry]) -> Untouched | None:
    """Names the tensors of a checkpoint that a run leaves alone. None without any."""
    parts = (*anatomy.untouched, *anatomy.buffers)
    found = {entry.name: entry for name, entry in entries.items() if is_in(parts, name)}
    return Untouched(names=tuple(found), mark=weights_mark(found)) if found else None


class UntouchedError(UsageError):
    """Reports a folder that does not hold what a run has left alone of its model."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            hint="put the model that the run began with back there, or name its new folder with the recipe: "
            "`fuyou export RECIPE OUT model.name_or_path=FOLDER`",
        )


@contextmanager
def with_untouched(
    untouched: Untouched | None, model_dir: Path, tensors: list[OutTensor], read: Read
) -> Iterator[tuple[list[OutTensor], Read]]:
    """Adds what a run left alone, in the dtypes of its checkpoint, to the tensors to write and to what reads them. Raises
    UntouchedError if the folder does not hold it any more."""
    if untouched is None:
        yield tensors, read
        return
    entries = left_alone(untouched, model_dir)
    more = [OutTensor(name=name, dtype=entry.dtype, shape=entry.shape) for name, entry in entries.items()]
    with TensorReader() as reader:

        def read_either(tensor: OutTensor, first: int, elements: int) -> memoryview:
            entry = entries.get(tensor.name)
            if entry is None:
                return read(tensor, first, elements)
            item = BYTES_PER_ELEMENT[entry.dtype]
            return memoryview(reader.read_some(entry, first * item, elements * item))

        yield [*tensors, *more], read_either


def left_alone(untouched: Untouched, model_dir: Path) -> dict[str, TensorEntry]:
    """Finds the tensors in the checkpoint's folder, and checks that they are those of the run."""
    try:
        there = open_checkpoint(model_dir).entries
    except UsageError as error:
        raise UntouchedError(f"what was not trained is in the model's checkpoint: {error.message}") from error
    found = {name: there[name] for name in untouched.names if name in there}
    if len(found) < len(untouched.names) or weights_mark(found) != untouched.mark:
        raise UntouchedError(f"{model_dir}: does not hold the parts of the model that were not trained as they were")
    return found
