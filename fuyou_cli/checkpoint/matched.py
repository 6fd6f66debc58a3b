"""A model and a checkpoint, brought together: one call that checks everything before the first weight is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import shown

from .files import Checkpoint
from .header import TensorEntry
from .names import architecture_renames, match, tied_copies, tied_names
from .reader import TensorReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def entries_for(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The file's tensor for every name of the model's state dict; the model may be on the meta device.

    Names of tied weights get the same entry. Reads data only where a tied tensor is stored twice: both copies must be
    equal, since training keeps one. Raises UsageError naming every tensor that does not fit.
    """
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = tied_names(model)
    prefix = model.base_model_prefix
    renames = architecture_renames(model, checkpoint.entries)
    matched = match(names, checkpoint.entries, base_model_prefix=prefix, tied=tied, renames=renames)
    with TensorReader() as reader:
        for one, other in tied_copies(checkpoint.entries, base_model_prefix=prefix, tied=tied, renames=renames):
            if not reader.equal(one, other):
                raise UsageError(
                    f"{checkpoint.directory}: {shown(one.name)} and {shown(other.name)} are tied in the model "
                    "but differ in the file",
                    hint='Set "tie_word_embeddings": false in config.json if they are meant to differ.',
                )
        _check_buffers(model, matched, reader)
    return matched


def _check_buffers(model: PreTrainedModel, matched: dict[str, TensorEntry], reader: TensorReader) -> None:
    """What a file holds beside parameters is what the model's code computes: it is neither loaded nor exported."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        entry = matched.get(name)
        if entry is None or buffer.is_meta:
            continue
        stored = reader.read(entry)
        if not stored.equal(buffer.to(stored.dtype)):
            raise UsageError(
                f"{entry.file}: tensor {shown(entry.name)} is no parameter of the model and has other values than its code "
                "computes",
                hint="fuyou trains and writes parameters alone: what it made of this model would lack these values",
            )
