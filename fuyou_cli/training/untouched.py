"""Keeps what training leaves alone of a model: the parts that do not run on text, as a vision tower, layers that its class does
not read, as those that predict further tokens, the values of buffers, and what frozen weights were before they were rounded to
the dtype of compute.

Nothing of them is in the store. An export copies their tensors from the checkpoint that the run began with, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.files import open_checkpoint
from ..checkpoint.header import BYTES_PER_ELEMENT, TensorEntry
from ..checkpoint.names import is_in
from ..checkpoint.reader import FLOATS, TensorReader, weights_mark
from ..checkpoint.writer import OutTensor, Read
from ..core.errors import UsageError
from ..spec.packed_tensors import READ_ONLY
from .state.stored import Manifest, Untouched

if TYPE_CHECKING:
    import torch

    from ..engine.anatomy import Anatomy


def untouched_of(anatomy: Anatomy, entries: Mapping[str, TensorEntry]) -> Untouched | None:
    """Names the tensors of a checkpoint that a run leaves alone: also those that stand for nothing in the model. None without
    any."""
    parts = (*anatomy.untouched, *anatomy.buffers)
    known = {*anatomy.model.state_dict(), *(name for those in anatomy.parts.values() for name, _ in those)}
    found = {entry.name: entry for name, entry in entries.items() if is_in(parts, name) or name not in known}
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
    """Adds what a run left alone, in the dtypes of its checkpoint, to the tensors to write and to what reads them: what is
    quantised there decoded to bfloat16. Raises UntouchedError if the folder does not hold it any more."""
    if untouched is None:
        yield tensors, read
        return
    from .packed_reading import DecodingReader  # numpy

    entries = left_alone(untouched, model_dir)
    dtypes = {name: entry.dtype if entry.scales is None else "bfloat16" for name, entry in entries.items()}
    more = [OutTensor(name=name, dtype=dtypes[name], shape=entry.shape) for name, entry in entries.items()]
    with TensorReader() as reader:
        decoding = DecodingReader(reader, "bfloat16")

        def read_either(tensor: OutTensor, first: int, elements: int) -> memoryview:
            entry = entries.get(tensor.name)
            if entry is None:
                return read(tensor, first, elements)
            if entry.scales is not None:
                return decoding.read(entry, first, elements)
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


class OwnValues:
    """Reads frozen tensors as the model's files have them. Each element must round to what the store has, whose checksums an
    export compares: so the files are those that the run began with."""

    def __init__(self, entries: Mapping[str, TensorEntry], reader: TensorReader) -> None:
        self._entries, self._reader = entries, reader

    def read(self, name: str, first: int, rounded: torch.Tensor) -> torch.Tensor | None:
        """Returns elements of a tensor from `first` on, in float32, that round to `rounded` (1-D, bfloat16). None: the file has
        these. Raises UsageError if they do not."""
        import torch

        if (entry := self._entries.get(name)) is None:
            return None
        values = torch.empty(len(rounded), dtype=torch.float32)
        self._reader.read_into(entry, values, first_element=first)
        if not torch.equal(values.bfloat16().view(torch.int16), rounded.view(torch.int16)):
            raise UsageError(
                f"{entry.file}: {name} is not what the run began with, so what was not trained cannot be exported in float32",
                hint="put the file back as it was, or export in bfloat16 (--dtype bfloat16, or export.dtype)",
            )
        return values


@contextmanager
def own_values(
    saved: Manifest, model_dir: Path, *, dtype: str, say: Callable[[str], None] | None
) -> Iterator[OwnValues | None]:
    """Opens the model's files for an export in a wider `dtype` than the run computed in. None: the store has all there is, or
    the files are not there, which `say` gets."""
    frozen = {
        tensor.stored_as: tensor.shape
        for stage in saved.stages
        for tensor in stage.tensors
        if stage.frozen is not None and stage.trained <= tensor.offset < stage.params - stage.quantised
    }
    if not frozen or (saved.compute_dtype, dtype) != ("bfloat16", "float32"):
        yield None
        return
    found, problem = {}, f"{model_dir} does not hold the model that the run began with"
    try:
        found = open_checkpoint(model_dir).entries
    except UsageError as error:
        problem = error.message
    own = (*FLOATS, *READ_ONLY)  # what is decoded has no values of its own
    is_it = all(name in found and found[name].shape == shape and found[name].dtype in own for name, shape in frozen.items())
    if not is_it and say is not None:
        say(f"note: {problem}. So what was not trained is written as it was computed with, rounded to {saved.compute_dtype}")
    wider = {name: found[name] for name in frozen if found[name].dtype in {*FLOATS} - {saved.compute_dtype}} if is_it else {}
    with TensorReader() as reader:
        yield OwnValues(wider, reader) if wider else None
