"""Evaluates a run between its steps: its sets of rows and its fixed prompts, where it starts, every so many steps, and where it
ends.

Keeps the weights of the lowest loss in `output_dir/best`, as an export writes them. They are taken as they pass through memory,
so nothing is committed for them. The new copy takes the old one's place in one step: a run that is killed leaves the one or the
other whole. Of several ranks the first one decides and writes: it asks the others for the weights of their stages, piece by
piece, as these pass there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.files import ADAPTER_NAME, SINGLE_NAME
from ..checkpoint.reader import parse_file
from ..checkpoint.writer import OutTensor
from ..core.errors import FuyouError, PeerLost, SwapError, UsageError
from ..core.json_files import from_json, shown
from ..data.batches import passes
from ..data.rows import Rows
from ..engine.attention import turns
from ..engine.executor import Executor
from ..engine.forward_only import ForwardOnly
from ..engine.skeleton import TORCH_DTYPE
from ..spec.model import ModelSpec, TensorSpec
from ..spec.plan import Numerics
from .adapting import configuration
from .exporting import STEP, bytes_of, write_adapter, write_model
from .prepare import Ready, best_folder
from .report import BestReport, EvalReport, SampleReport
from .state.kept_companions import kept_companions
from .state.manifest import MOST_SETS, Evaluated
from .state.saver import Standing

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ..engine.ranks import Ranks
    from .fixed_prompts import Continuations

AnyReport = EvalReport | SampleReport | BestReport
Losses = Callable[..., torch.Tensor]  # a batch, last -> each token's loss

_LARGEST = 700.0  # of losses whose exponential still is a double
_RUN = "fuyou_run"  # in a copy's metadata: the name of the run, as in its manifest
# Asked of a rank beside weights: its tensors' names in the checkpoint, to let its other stages pass, and to stop at once.
_NAMES, _REST, _STOP = "names", "rest", "stop"
Passing = Iterator[tuple[int, torch.Tensor]]  # stages that own parameters, in running order, each with its weights


class Evaluations:
    """Evaluates the sets and prompts of one run, as many rows at once as a step's, forward alone: it takes no memory beside
    a step's."""

    def __init__(self, ready: Ready, standing: Standing, executor: Executor, *, store: Path) -> None:
        recipe = ready.planned.recipe
        self._sets, self._asked, self._total = ready.evaluated, recipe.eval, ready.planned.total_steps
        self._stopping, self._standing, self._is_elsewhere = recipe.train.early_stopping, standing, ready.planned.is_copy
        self._ring = ready.planned.ring
        self._writes = self._ring is None or self._ring.is_first
        self._numerics = executor.plan.group
        if turns(executor.anatomy.model):  # rows each have the positions of their own length, as where a model is given one row
            self._numerics = replace(self._numerics, micro_batch_size=1)
        self._forward = ForwardOnly(executor)
        self._continuations = self._of_prompts(ready, executor)
        self._best = BestCopy(ready, self._forward, store, standing.run) if recipe.eval.keep_best else None
        self._result: Evaluated | None = None  # of the evaluation under way

    def _of_prompts(self, ready: Ready, executor: Executor) -> Continuations | None:
        prompts, model = ready.planned.prompts, executor.anatomy.model
        if prompts is None:
            return None
        from .fixed_prompts import Continuations, rows_at_once

        vocabulary = model.get_output_embeddings().weight.shape[0]
        rows = rows_at_once(executor.model, most=self._forward.rows, vocabulary=vocabulary)
        one_shape = ready.planned.recipe.train.compile
        return Continuations(prompts, self._forward, model, self._numerics, rows=rows, one_shape=one_shape)

    def due(self, step: int) -> list[Callable[[int], Sequence[AnyReport]]]:
        """Returns what follows after so many steps, one part after the other. An evaluation that a saved state has is not done
        again."""
        every, last = self._asked.every_steps, self._standing.evaluated
        if self._is_elsewhere:
            return []
        regular = step == self._total or (every is not None and step % every == 0)
        parts = [
            *([self._losses] if self._sets else ()),
            *([self._keep] if self._best is not None else ()),
            *([self._continuations.run] if self._continuations is not None else ()),
        ]
        if (last is not None and last.step == step) or not (self._asked.at_start if step == 0 else regular) or not parts:
            return []
        return [*parts, self._is_over]

    def begin(self, say: Callable[[str], None]) -> None:
        """Puts losses of other rows than those that are evaluated now aside. Says so, and whether the best weights are another
        run's. What ranks know may differ: some committed a step before it was evaluated, and only the first one sees the best
        weights. So all go by what that one knows."""
        if self._is_elsewhere:
            return
        if self._writes:
            self._look_back(say)
        if self._ring is not None:
            known = (self._standing.evaluated, *self._standing.evaluated_before)
            of_first = self._ring.all_gather("evaluated", [result and asdict(result) for result in known])[0]
            last, *before = (result and from_json(Evaluated, result) for result in of_first)
            self._standing.evaluated, self._standing.evaluated_before = last, tuple(before)

    def _look_back(self, say: Callable[[str], None]) -> None:
        last, first = self._standing.evaluated, next(iter(self._sets.values()), None)
        if last is not None and first is not None and last.set_digest not in ("", first.summary.digest):
            change = self._change_set(last, first.summary.digest)
            if self._best is not None or self._stopping is not None:
                say(f"note: the losses so far are of other rows ({shown(last.set_name)}): {change}")
        if self._best is not None and self._best.is_foreign:
            say(f"note: {self._best.folder} is not of this run, until this run keeps its best weights there")

    def _change_set(self, last: Evaluated, digest: str) -> str:
        """Goes on from the losses of these rows, if they were evaluated before. The best weights do so only if they are still
        there. Says where both begin."""
        known = {result.set_digest: result for result in (*self._standing.evaluated_before, last)}
        standing = known.pop(digest, None)
        self._standing.evaluated, self._standing.evaluated_before = standing, tuple(known.values())[-MOST_SETS:]
        if standing is None:
            return "early stopping and the best weights start over"
        goes_on = f"early stopping goes on from these rows' loss after step {standing.step}"
        if self._best is None or standing.best_step in (0, self._best.step):
            return f"{goes_on}, the best weights too"
        self._standing.evaluated = replace(standing, best=None, bar=standing.best if standing.bar is None else standing.bar)
        return f"{goes_on}, the best weights start over"

    @property
    def stop(self) -> bool:
        """Tells whether the run ends here, early: the last `patience` evaluations were no better than the one before them."""
        last = self._standing.evaluated
        return self._stopping is not None and last is not None and last.worse >= self._stopping.patience

    @property
    def told(self) -> str:
        """Says why the run ends early, for people."""
        last = self._standing.evaluated
        assert last is not None
        return f"train.early_stopping ends the run after step {last.step}: {self._lowest}{self._where}"

    @property
    def best(self) -> str:
        """Says which weights are kept as the best, and where. Empty if none are to be kept, or nothing was evaluated."""
        evaluated = self._writes and self._best is not None and self._standing.evaluated is not None
        return f"{self._lowest}{self._where}" if evaluated else ""

    @property
    def _lowest(self) -> str:
        last = self._standing.evaluated
        if last is None or last.best is None:
            return "no loss was finite" if last is None or last.bar is None else "the best weights of these rows are gone"
        return f"the lowest loss, {last.best:.4f}, was after step {last.best_step}"

    @property
    def _where(self) -> str:
        last, copy = self._standing.evaluated, self._best
        if copy is None or last is None or not self._writes:
            return ""
        others = f"; {copy.folder} is not of this run" if copy.is_foreign else ""
        if last.best is None:
            return others
        if last.best_step == 0:
            return f", before training: no weights are kept{others}"
        return f": kept in {copy.folder}" if copy.step == last.best_step else f": its weights were not kept{copy.older}{others}"

    def _losses(self, step: int) -> list[EvalReport]:
        """Evaluates every set with the weights after `step`. Raises what a callback of the executor raises, after which the
        run may go on or be saved."""
        names = list(self._sets)
        with self._forward.open():
            reports = [
                evaluated(name, rows, self._forward.losses, self._numerics, step=step, last=name == names[-1])
                for name, rows in self._sets.items()
            ]
        least = self._stopping.min_delta if self._stopping is not None else 0.0
        result = after(self._standing.evaluated, step, reports[0].loss, least)
        self._result = replace(result, set_name=names[0], set_digest=self._sets[names[0]].summary.digest)
        return reports

    def _keep(self, step: int) -> list[BestReport]:
        """Keeps the weights if their loss is the lowest so far, but for those that the run started with."""
        latest = self._result
        assert latest is not None and self._best is not None
        is_best = latest.best is not None and latest.best_step == step > 0
        if self._ring is not None:
            is_best = self._ring.ranks.gather(is_best)[0]
        if is_best and not self._writes:
            self._best.give(step)
        return [self._best.write(step, latest.best or 0.0)] if is_best and self._writes else []

    def _is_over(self, step: int) -> list[AnyReport]:
        """Notes that the evaluation was done whole. Until then a stopped run does it again."""
        before = self._standing.evaluated or Evaluated(step=step, best=None, best_step=0, worse=0)
        self._standing.evaluated = self._result or replace(before, step=step)
        self._result = None
        return []


def evaluated(
    name: str, rows: Rows, losses: Losses, numerics: Numerics, *, step: int = 0, last: bool = True,
    progress: Callable[[int], None] = lambda rows: None,
) -> EvalReport:  # fmt: skip
    """Evaluates a set of rows, as many in a pass as `numerics` have tokens for. `last`: no pass follows. `progress` gets the
    rows of each pass."""
    begin, total, tokens, done = time.monotonic(), 0.0, 0, 0
    every = range(len(rows))
    for chosen, batch in passes(rows, every, pad_id=rows.summary.pad_id, numerics=numerics, most=numerics.micro_batches):
        done += len(chosen)
        total += float(losses(batch, last=last and done == len(rows)).sum())
        tokens += batch.label_tokens
        progress(len(chosen))
    loss = total / tokens
    return EvalReport(
        step=step,
        name=name,
        loss=loss,
        perplexity=math.inf if loss >= _LARGEST else math.exp(loss),
        tokens=tokens,
        rows=len(rows),
        seconds=time.monotonic() - begin,
    )


def after(before: Evaluated | None, step: int, loss: float, least: float) -> Evaluated:
    """Returns what is known after one evaluation more. The best loss is the lowest. For early stopping a loss is better only if
    it is lower by more than `least` than the last better one."""
    latest = before or Evaluated(step=step, best=None, best_step=step, worse=0)
    bar = latest.best if latest.bar is None else latest.bar
    if math.isfinite(loss) and (latest.best is None or loss < latest.best):
        latest = replace(latest, best=loss, best_step=step)
    if math.isfinite(loss) and (bar is None or loss < bar - least):
        return replace(latest, step=step, worse=0, bar=loss)
    return replace(latest, step=step, worse=latest.worse + 1, bar=bar)


# ---- the best weights ------------------------------------------------------------------------------------------------


def kept_step(folder: Path, run: str | None = None) -> int | None:
    """Returns after how many steps the weights in a folder were kept, or None where there are none. `run`: the name of the run
    that must have kept them."""
    names = (ADAPTER_NAME, SINGLE_NAME)
    files = [folder / name for name in names if (folder / name).is_file()] or sorted(folder.glob("model-*.safetensors"))[:1]
    try:
        metadata = parse_file(files[0]).metadata if files else {}
        return int(metadata[STEP]) if run in (None, metadata.get(_RUN)) else None
    except (UsageError, LookupError, ValueError):
        return None


class PassingWeights:
    """Reads weights as `StoreWeights` does, while the stages pass. Tensors are to be read in their order. `model`: with all
    stages to be read; `away`: those that pass on other ranks.

    A piece of a cut head has a part of its matrix and one of its bias: the bias is read in a second pass."""

    def __init__(
        self, passes: Callable[[], Passing], model: ModelSpec, stored_as: Mapping[str, str], *, dtype: str, step: int, run: str,
        away: AwayWeights | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.metadata = dtype, {STEP: str(step), _RUN: run}
        self._passes, self._passing, self._stored_as, self._away = passes, passes(), stored_as, away
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
        """Returns elements [first, first + count) of a tensor, as far as they are here."""
        values = torch.empty(count, dtype=TORCH_DTYPE[tensor.dtype])
        for stage, part in self._places[tensor.name]:
            begin, end = max(first, part.first), min(first + count, part.first + part.numel)
            if begin < end:
                values[begin - first : end - first].copy_(self._part(tensor, stage, part, begin, end))  # sync: from a device
        return bytes_of(values)

    def _part(self, tensor: OutTensor, stage: int, part: TensorSpec, begin: int, end: int) -> torch.Tensor:
        """Returns elements [begin, end) of a tensor, of which a stage has `part`."""
        if self._away is not None and self._away.has(stage):
            return torch.frombuffer(self._away.read(stage, tensor, begin, end), dtype=TORCH_DTYPE[tensor.dtype])
        return self._weights(stage)[part.offset + begin - part.first : part.offset + end - part.first]

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
        if self._away is not None:
            self._away.each(_REST)

    def give_to(self, ranks: Ranks, *, stop: Callable[[], None] = lambda: None) -> None:
        """Gives the first rank, which asks by `AwayWeights`, what it reads of the stages here. `stop` is called where it stops
        early. Raises PeerLost."""
        of_name = {tensor.name: tensor for tensor in self.tensors()}

        def give(question: Any) -> Buffer:
            if question == _NAMES:
                return json.dumps(dict(self._stored_as)).encode()
            if question in (_REST, _STOP):
                (self.check if question == _REST else stop)()
                return b""
            name, begin, end = question
            return self.read(of_name[name], begin, end - begin)

        ranks.answer(give)


class AwayWeights:
    """Asks the ranks that compute the other stages for their weights."""

    def __init__(self, ranks: Ranks, owners: Sequence[int]) -> None:
        self._ranks, self._owners = ranks, owners

    def has(self, stage: int) -> bool:
        return self._owners[stage] != self._ranks.rank

    def read(self, stage: int, tensor: OutTensor, begin: int, end: int) -> memoryview:
        """Returns elements [begin, end) of a tensor, all of them in one stage."""
        return self._ranks.ask(self._owners[stage], [tensor.name, begin, end])

    def names(self) -> dict[str, str]:
        """Returns the names in the checkpoint of the tensors of their stages."""
        return {name: stored for answer in self.each(_NAMES) for name, stored in json.loads(bytes(answer)).items()}

    def stop(self) -> None:
        """Tells that nothing more will be read."""
        self.each(_STOP)

    def each(self, question: str) -> list[memoryview]:
        """Returns what each of the other ranks answers."""
        return [self._ranks.ask(rank, question) for rank in range(self._ranks.size) if rank != self._ranks.rank]


class BestCopy:
    """Writes the copies of the run of this name. `store`: the folder with its companions. Of several ranks the first one
    writes, and the others give their weights."""

    def __init__(self, ready: Ready, forward: ForwardOnly, store: Path, run: str) -> None:
        self._ready, self._forward, self._store, self._run = ready, forward, store, run
        self._ranks = None if ready.planned.ring is None else ready.planned.ring.ranks
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
        away = None if self._ranks is None else AwayWeights(self._ranks, self._ready.planned.model.owners)
        with self._forward.open(), nullcontext() if self._ranks is None else self._ranks.asking():
            try:
                size = sum(file.stat().st_size for file in self._written(step, away))
            except (SwapError, PeerLost):
                raise
            except (FuyouError, OSError) as error:
                problem = f"{error}{self.older}"
                self._forward.stop_ahead()
                if away is not None:
                    away.stop()
        seconds = time.monotonic() - begin
        return BestReport(step=step, loss=loss, folder=str(self.folder), size=size, seconds=seconds, problem=problem)

    def give(self, step: int) -> None:
        """Gives the first rank the weights of the stages here, for what it writes. Raises PeerLost."""
        assert self._ranks is not None
        model = self._ready.planned.model
        names = {tensor.name: self._ready.stored_as[tensor.name] for stage in model.stages for tensor in stage.tensors}
        with self._forward.open():
            self._passing(model, names, step).give_to(self._ranks, stop=self._forward.stop_ahead)

    def _passing(
        self, model: ModelSpec, stored_as: Mapping[str, str], step: int, away: AwayWeights | None = None
    ) -> PassingWeights:
        dtype = self._ready.planned.recipe.export.dtype
        return PassingWeights(self._forward.weights, model, stored_as, dtype=dtype, step=step, run=self._run, away=away)

    def _written(self, step: int, away: AwayWeights | None) -> list[Path]:
        planned, export = self._ready.planned, self._ready.planned.recipe.export
        names = {**self._ready.stored_as, **({} if away is None else away.names())}
        weights = self._passing(planned.whole, names, step, away)
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
