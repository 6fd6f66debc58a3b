"""Keeps the weights of a run's lowest evaluation loss in `output_dir/best`, as an export writes them.

They are taken as they pass through memory, so nothing is committed for them. The new copy takes the old one's place in one
step: a run that is killed leaves the one or the other whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoint.files import ADAPTER_NAME, SINGLE_NAME
from ..checkpoint.header import parse_file
from ..checkpoint.writer import OutTensor
from ..core.errors import FuyouError, SwapError, UsageError
from ..engine.forward_only import ForwardOnly
from ..engine.skeleton import TORCH_DTYPE
from ..spec.model import ModelSpec, TensorSpec
from .adapting import configuration
from .exporting import STEP, bytes_of, write_adapter, write_model
from .prepare import best_folder
from .report import BestReport
from .state.kept_companions import kept_companions

if TYPE_CHECKING:
    from .prepare import Ready

_RUN = "fuyou_run"  # in a copy's metadata: the name of the run, as in its manifest
Passing = Iterator[tuple[int, torch.Tensor]]  # stages that own parameters, in running order, each with its weights


def kept_step(folder: Path, run: str | None = None) -> int | None:
    """Returns after how many steps the weights in a folder were kept, or None where there are none. `run`: the name of the run
    that must have kept them."""
    names = (ADAPTER_NAME, SINGLE_NAME)
    files = [folder / name for name in names if (folder / name).is_file()] or sorted(folder.glob("model-*.safetensors"))[:1]
    try:
        said = parse_file(files[0]).metadata if files else {}
        return int(said[STEP]) if run in (None, said.get(_RUN)) else None
    except (UsageError, LookupError, ValueError):
        return None


class PassingWeights:
    """Reads weights as `StoreWeights` does, while the stages pass. Tensors are to be read in their order.

    A piece of a cut head has a part of its matrix and one of its bias: the bias is read in a second pass."""

    def __init__(
        self, passes: Callable[[], Passing], model: ModelSpec, stored_as: Mapping[str, str], *, dtype: str, step: int, run: str
    ) -> None:
        self.dtype, self.metadata = dtype, {STEP: str(step), _RUN: run}
        self._passes, self._passing = passes, passes()
        self._here: tuple[int, torch.Tensor] | None = None
        self._places: dict[str, list[tuple[int, TensorSpec]]] = {}
        for stage in model.stages:
            for tensor in stage.tensors:
                self._places.setdefault(stored_as[tensor.name], []).append((stage.index, tensor))

    def model_name(self, tensor: OutTensor) -> str:
        return self._places[tensor.name][0][1].name

    def is_trained(self, tensor: OutTensor) -> bool:
        return not self._places[tensor.name][0][1].frozen

    def tensors(self) -> list[OutTensor]:
        return [OutTensor(name=name, dtype=self.dtype, shape=places[0][1].model_shape) for name, places in self._places.items()]

    def read(self, tensor: OutTensor, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) of a tensor."""
        found = torch.empty(count, dtype=TORCH_DTYPE[tensor.dtype])
        for stage, part in self._places[tensor.name]:
            begin, end = max(first, part.first), min(first + count, part.first + part.numel)
            if begin < end:
                inside = self._weights(stage)[part.offset + begin - part.first : part.offset + end - part.first]
                found[begin - first : end - first].copy_(inside)  # sync: from a device
        return bytes_of(found)

    def _weights(self, stage: int) -> torch.Tensor:
        """Lets stages pass until this one is there: to the end of this pass, and in one more."""
        begun_again = False
        while self._here is None or self._here[0] != stage:
            self._here = next(self._passing, None)
            if self._here is None:
                assert not begun_again, f"stage {stage} owns no weights"
                begun_again, self._passing = True, self._passes()
        return self._here[1]

    def check(self) -> None:
        """Lets the other stages pass, so that nothing is left under way."""
        for _ in self._passing:
            pass


class BestCopy:
    """Writes the copies of the run of this name. `store`: the folder with its companions."""

    def __init__(self, ready: Ready, forward: ForwardOnly, store: Path, run: str) -> None:
        self._ready, self._forward, self._store, self._run = ready, forward, store, run
        self.folder = best_folder(ready.planned.recipe, ready.planned.model_dir)

    @property
    def step(self) -> int | None:
        """Returns after how many steps of this run the weights in the folder were kept, or None where they are not its own."""
        return kept_step(self.folder, self._run)

    @property
    def is_foreign(self) -> bool:
        """Tells whether the folder holds something that this run did not keep."""
        return self.folder.is_dir() and self.step is None

    @property
    def older(self) -> str:
        """Says which weights are there where newer ones could not be kept. Empty if there are none of this run."""
        return "" if (step := self.step) is None else f"; those after step {step} are still in {self.folder}"

    def write(self, step: int, loss: float) -> BestReport:
        """Replaces the copy. A failure that the store has no part in is told: the copy before stays, and the run goes on."""
        begin, size, problem = time.monotonic(), 0, ""
        with self._forward.open():
            try:
                size = sum(file.stat().st_size for file in self._written(step))
            except SwapError:
                raise
            except (FuyouError, OSError) as error:
                problem = f"{error}{self.older}"
                self._forward.stop_ahead()
        seconds = time.monotonic() - begin
        return BestReport(step=step, loss=loss, folder=str(self.folder), size=size, seconds=seconds, problem=problem)

    def _written(self, step: int) -> list[Path]:
        planned, export = self._ready.planned, self._ready.planned.recipe.export
        names = self._ready.stored_as
        weights = PassingWeights(self._forward.weights, planned.model, names, dtype=export.dtype, step=step, run=self._run)
        companions = kept_companions(self._store) or planned.model_dir
        adapter = configuration(planned.recipe, planned.anatomy.model, planned.model_dir)
        if adapter is not None:
            return write_adapter(weights, self.folder, companions=companions, configuration=adapter)
        return write_model(
            weights,
            self.folder,
            companions=companions,
            untouched=self._ready.untouched,
            model_dir=planned.model_dir,
            max_shard_size=export.max_shard_size,
        )
