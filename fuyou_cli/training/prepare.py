"""Takes a recipe to a run in steps: resolve, inspect, plan (`plan_step`), fetch, tokenise, settle (`plan_step`), run (`run`).

Each step takes what the one before it returned (Resolved, Inspected, Planned, Fetched) and adds what it found, or raises
UsageError. Cheap steps come first, and nothing of the run is written before it runs. `say` gets notes and what takes a while.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.hub import Hub, Progress, has_tokenizer
from ..core.errors import FuyouError, UsageError
from ..core.paths import folder
from ..core.units import count
from ..engine.processor import slow_bfloat16
from ..spec.hardware import HardwareProfile
from ..spec.model import InPlace, ModelSpec
from ..spec.plan import Plan
from .adapting import as_started, check_peft, check_start, entries_of, starting_entries, stored_names
from .known_model import KnownModel
from .length import Epoch, evaluation_rows, evaluation_sets, fed, learning_rate, mixture_of, naming_evaluation, steps_of
from .numerics import check_positions, check_tokens
from .state.at_rest import SavedStore
from .state.manifest import Change, Manifest, Untouched
from .state.recovery import saved_by_all
from .state.resume import (
    REFUSED,
    change_of_libraries,
    check_unchanged_recipe,
    check_unchanged_run,
    fingerprints_of,
    library_versions,
    refused,
    saved_state,
    settings_of,
    steps_left,
)
from .state.store_folders import name_of_run, newest_saved, of_any_count, of_rank
from .stored_quantised import as_stored, check_planned

if TYPE_CHECKING:
    from ..checkpoint.reader import TensorEntry
    from ..data.batches import Sampler
    from ..data.rows import Rows
    from ..data.stream import Stream
    from ..engine.anatomy import Anatomy
    from ..planner.plan_request import PlanRequest
    from ..planner.search import SearchResult
    from ..recipe.schema import Recipe
    from .fixed_prompts import FixedPrompts
    from .peers import Peers

_NAME = "best"


def best_folder(recipe: Recipe, model_dir: Path) -> Path:
    """Returns `best` below the output directory, never the folder the run started from."""
    out = Path(recipe.output_dir).expanduser() / _NAME
    return out.with_name(f"{_NAME}-finetuned") if out.resolve() == model_dir.resolve() else out


def best_copies(recipe: Recipe) -> int:
    """Counts the copies that are still to be written at most: a new one is written beside the old one."""
    if not recipe.eval.keep_best:
        return 0
    return 1 if best_folder(recipe, Path(recipe.model.name_or_path).expanduser()).is_dir() else 2  # a hub's name is no folder


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskShare:
    """Describes the disk under one file of a store. Bytes."""

    free: int  # including what these already hold there
    files: int  # number of files on this disk, of all stores that the run has on this box
    has_export: bool  # whether the exported model goes there too


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreDisks:
    """Describes the room that the disks have for a store, as it was found."""

    shares: tuple[DiskShare, ...]  # one per file; files are striped, so the fullest disk limits all
    total: int  # bytes of all these disks; offload.max_memory.ssd may name a share of it
    ranks: int = 1  # on this box, which share what is allowed

    def limit(self, recipe: Recipe) -> int | None:
        """Resolves `offload.max_memory.ssd` for one rank. Returns None if it is auto."""
        asked = recipe.offload.max_memory.ssd
        return None if asked.is_auto else asked.resolve(total=self.total, auto=0) // self.ranks

    def budget(self, recipe: Recipe, export_bytes: int) -> int:
        """Returns the bytes that the store may use beside an export at the end and the best weights."""
        export = export_bytes * (recipe.export.at_end + best_copies(recipe))
        least = min((share.free - export * share.has_export) // share.files for share in self.shares)
        there, limit = max(0, least * len(self.shares)), self.limit(recipe)
        return there if limit is None else min(there, limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """Holds what the recipe's names stand for on this machine."""

    recipe: Recipe
    to_run: bool  # False: only to plan, so that nothing is refused that only a run would refuse
    model_dir: Path
    tokenizer_dir: Path
    directories: tuple[Path, ...]  # one folder of this run per striped directory
    saved: SavedStore | None  # of the stopped run to resume, if any
    peers: Peers | None = None  # that train the model together; None: this process alone

    @property
    def manifest(self) -> Manifest | None:
        return None if self.saved is None else self.saved.manifest

    @property
    def moves(self) -> bool:
        """Tells whether the saved state is in folders of another number of ranks, and has to be brought here."""
        return self.saved is not None and self.saved.moves

    @property
    def ring(self) -> Peers | None:
        """Returns the peers that have some stages each, and a store of their own."""
        return None if self.peers is None or self.peers.are_replicas else self.peers

    @property
    def is_copy(self) -> bool:
        """Tells whether another rank saves what this one computes."""
        return self.peers is not None and self.peers.is_copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected(Resolved):
    """Holds the stages of the model, without its weights."""

    device: str
    known: KnownModel
    in_place: InPlace | None  # where frozen weights lie in the model's files; None: no matter, or nothing is frozen
    prompts: FixedPrompts | None  # of `eval.samples`


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(Inspected):
    """Holds a plan for a machine, and what it was made from."""

    hardware: HardwareProfile
    disks: StoreDisks | None  # None: the free disk in the profile
    model: ModelSpec
    request: PlanRequest
    plan: Plan
    found: SearchResult | None  # the result of the search; None if there was none
    epoch: Epoch | None  # None: not looked at yet
    whole: ModelSpec  # `model`, or of which that is what one of several ranks sees

    @property
    def anatomy(self) -> Anatomy:
        """Returns the stages that a run computes. The first call builds the model, unless `inspect` has."""
        return self.known.stages(self.plan.numerics, self.in_place)

    @property
    def refusal(self) -> str | None:
        """Returns why the model cannot be trained yet. It is None for a model that can be run."""
        return self.known.facts.refusal

    @property
    def total_steps(self) -> int:
        """Returns the steps of the whole run. 0 means that the data decides."""
        return steps_of(self.recipe, self.epoch.rows if self.epoch is not None else None)

    @property
    def steps_left(self) -> int:
        """Returns the steps that no earlier process has done. 0 means that the data decides, or that no step is left."""
        return steps_left(self.total_steps, self.manifest)

    @property
    def export_bytes(self) -> int:
        """Returns the bytes of an export, or of the best weights, that this process writes: of several ranks the first one
        writes the whole model."""
        if self.peers is None:
            return self.plan.predicted.export_bytes
        parameters = self.whole.trained_parameters if self.request.exports_trained else self.whole.parameters
        return self.request.export_item * parameters * self.peers.is_first

    @property
    def fits_ram(self) -> bool:
        """Tells whether the plan fits its RAM budget. Only the smallest plan, made if nothing fits, does not."""
        return self.plan.predicted.cpu_peak <= self.plan.cpu_budget


def fields_of(found: object, kind: type[Resolved | Fetched]) -> dict[str, Any]:
    """Returns what a step of this kind has found, to make the next one's result of it."""
    return {item.name: getattr(found, item.name) for item in fields(kind)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Holds where the model's weights are. For a resumed run whose checkpoint is gone, holds what its manifest says of them."""

    planned: Planned
    entries: Mapping[str, TensorEntry]
    stored_as: Mapping[str, str]  # names of the model's tensors in its checkpoint
    mark: str  # mark of the weights (`checkpoint/reader.weights_mark`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready(Fetched):
    """Holds all that a run needs. Once it is settled, `planned` includes the rows and the process as they are then."""

    rows: Rows | Stream  # the tokenised data
    sampler: Sampler | Stream  # the order of the rows
    fingerprints: dict[str, str]
    evaluated: Mapping[str, Rows]  # sets of rows, by name, whose loss the run tells
    untouched: Untouched | None  # what the run leaves alone of the model's checkpoint, as it was when the run began
    settings: dict[str, Any] | None = None  # keys of the recipe that the run goes by (`state/resume.py`)
    changes: tuple[Change, ...] = ()  # of these, since the run was saved


Say = Callable[[str], None]
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # devices of NVIDIA's driver, of WSL2 and of AMD's


def unheard(what: str, done: int, total: int) -> None:
    pass


def resolve(
    recipe: Recipe, *, to_run: bool = True, here: bool = True, say: Say, progress: Progress = unheard,
    peers: Peers | None = None,
) -> Resolved:  # fmt: skip
    """Finds the saved run (if `here`: on this machine), the model without weights, the tokenizer and the data that the recipe
    names. Another thread calls `progress` during a download with its name, the bytes so far and the bytes in all."""
    _check_backend(recipe)
    check_peft(recipe)
    if peers is not None and peers.is_copy:
        directories, saved = run_directories(recipe, replica=peers.rank), None
    else:
        directories, saved = _saved(recipe, peers, must=to_run, here=here, say=say)
    hub = Hub(recipe, say=say, progress=progress)
    model_dir = hub.model(need_weights=False) if to_run else hub.model_or_shapes()
    recipe = as_stored(recipe, model_dir, say=say)
    with _noted(say, unless=to_run):  # a plan can do without the adapter that it starts from
        recipe = as_started(recipe, None if saved is None else saved.manifest)
        if saved is None:
            check_start(recipe, model_dir, say=say)
    tokenizer_dir = hub.tokenizer(model_dir, needed=to_run)
    with _noted(say, unless=to_run):
        _look_at_tokenizer(tokenizer_dir, say)
    _look_at_data(recipe, say, needed=to_run)
    return Resolved(
        recipe=recipe,
        to_run=to_run,
        model_dir=model_dir,
        tokenizer_dir=tokenizer_dir,
        directories=directories,
        saved=saved,
        peers=peers,
    )


def _saved(
    recipe: Recipe, peers: Peers | None, *, must: bool, here: bool, say: Say
) -> tuple[tuple[Path, ...], SavedStore | None]:
    """Returns the folders of this process's store, and the state that it goes on from, with the others of a ring. The first
    replica's are those of one process. Raises FuyouError if it `must` go on and could not."""
    ring = None if peers is None or peers.are_replicas else peers
    rank, count = (0, 1) if ring is None else (ring.rank, ring.count)
    folders = run_directories(recipe, rank=rank, count=count)
    directories, saved = saved_state(recipe, folders, count=count, must=must, here=here, say=say)
    if here and recipe.checkpoint.resume == "auto":
        try:
            saved = saved_by_all(ring, saved, directories[0])
        except FuyouError as error:
            if must:
                raise
            say(refused(error))
            saved = None
    return directories, saved


def _check_backend(recipe: Recipe) -> None:
    from ..swap.kernels import has_io_uring

    if recipe.offload.io.backend == "io_uring" and not has_io_uring():
        raise UsageError(
            "offload.io.backend is io_uring, but fuyou was built without it",
            hint="write auto or threads, or install liburing-dev and build again (scripts/quickstart does)",
        )


def run_directories(recipe: Recipe, *, rank: int = 0, count: int = 1, replica: int = 0) -> tuple[Path, ...]:
    """Returns the folders of this run's store, one per striped directory. Their name is readable and unique to the
    output_dir, to the `rank` of `count`, and to a `replica` but the first, whose folders are the run's."""
    name = name_of_run(folder(recipe.output_dir, key="output_dir"))
    name += of_rank(rank, count) if count > 1 else ""
    name += f".replica{replica}" if replica else ""
    found: dict[Path, Path] = {}
    for directory in recipe.offload_directories(os.environ):
        if (other := found.setdefault(directory.resolve(), directory)) is not directory:
            raise UsageError(f"offload.dir: {other} and {directory} are the same folder", hint="name each drive once")
    return tuple(directory / name for directory in found)


def store_of(recipe: Recipe) -> Path:
    """Returns the first folder of the store that the recipe's runs continue; of a run of several ranks the first one's. Of
    several numbers of ranks it is the newest one's with a saved state."""
    if recipe.checkpoint.resume in ("auto", "never"):
        alone = run_directories(recipe)[0]
        return newest_saved(of_any_count(alone) or [alone])
    return folder(recipe.checkpoint.resume, key="checkpoint.resume")


@contextmanager
def _noted(say: Say, *, unless: bool) -> Iterator[None]:
    """Says why a run would be refused, and goes on. Raises it `unless` there is only a plan to make."""
    try:
        yield
    except UsageError as error:
        if unless:
            raise
        say(f"note: {error.message}. {REFUSED}{f' ({error.hint})' if error.hint else ''}")


def _look_at_tokenizer(directory: Path, say: Say) -> None:
    """Says that a tokenizer's own code is not run. Raises UsageError if it cannot be loaded without, before a plan is made."""
    from ..data.sandbox import own_class

    if own := own_class(directory):
        from ..data.tokenise import load_tokenizer

        kind = type(load_tokenizer(directory, chat_template=None, pad_token=None)).__name__
        say(f"note: the tokenizer's own code ({own}) is not run: transformers has {kind} for it")


def _look_at_data(recipe: Recipe, say: Say, *, needed: bool) -> None:
    """Says which files are used. A plan can be made without data (of a shipped recipe, for example): then this is only a
    note."""
    from ..data.sources import MissingDataError, look

    try:
        sources = look(recipe.dataset)
        with naming_evaluation():
            sources += tuple(source for dataset in evaluation_sets(recipe).values() for source in look(dataset))
    except MissingDataError as error:
        if needed:
            raise
        say(f"note: {error.message}. {REFUSED}")
        return
    for source in sources:
        if source.choice is not None:
            say(f"data: {source.choice}")


def inspect(resolved: Resolved, *, say: Say, process: Callable[[], int] | None = None) -> Inspected:
    """Finds out what a plan needs to know of the model. For a run, and for a model that was not planned before, it is built
    without its weights, and torch is loaded in the process as in a run. `process` returns the bytes of this process, if they
    are a part of the plan."""
    recipe = resolved.recipe
    known = KnownModel(recipe, resolved.model_dir, strict=resolved.to_run, process=process)
    device = device_name(recipe)
    loaded = process is not None and (device == "cuda" or "torch" in sys.modules)  # then the process is measured with the model
    if resolved.to_run or loaded or recipe.eval.samples is not None:  # whose prompts are tokenised for a built model
        known.build()
    facts = known.facts
    check_positions(recipe, facts.positions, facts.learns_positions, say)
    if recipe.train.router_aux_loss and facts.without_aux_loss:
        raise UsageError(f"train.router_aux_loss: {facts.without_aux_loss}", hint="leave train.router_aux_loss null")
    for name, other in facts.frozen_with:
        say(f"note: freeze: {name} is tied to {other}, so it is not trained either")
    if facts.untouched:
        size = count(facts.untouched_parameters)
        say(f"note: only text is trained: {', '.join(facts.untouched)} ({size} parameters) stay as they are, in exports too")
    if resolved.to_run and (slow := slow_bfloat16(recipe.precision.compute, device)):
        say(f"note: {slow}: add precision.compute=float32")
    if not resolved.to_run and resolved.manifest is None:
        _look_at_weights(recipe, known, resolved.model_dir, say)
    in_place = in_place_of(resolved, known, device, say)
    known.keep()
    prompts = _prompts(resolved, known, say)
    return Inspected(**fields_of(resolved, Resolved), device=device, known=known, in_place=in_place, prompts=prompts)


def check_resumed(inspected: Inspected, *, accept_changes: bool) -> None:
    """Raises UsageError if the recipe alone tells that the saved run cannot go on with it: before this machine is measured for
    that run, which takes a minute. `tokenise` looks at the rest."""
    if (saved := inspected.manifest) is not None:
        check_unchanged_recipe(
            saved, inspected.recipe, inspected.known.facts, device=inspected.device,
            total_steps=steps_of(inspected.recipe, None), accepted=accept_changes,
        )  # fmt: skip


def _prompts(resolved: Resolved, known: KnownModel, say: Say) -> FixedPrompts | None:
    """Tokenises the prompts of `eval.samples`, for a plan if the tokenizer is there. Their tokenizer stays, and counts as a
    part of the process from then on."""
    if resolved.recipe.eval.samples is None or not (resolved.to_run or has_tokenizer(resolved.tokenizer_dir)):
        return None
    from .fixed_prompts import fixed_prompts

    places = {"model_dir": resolved.model_dir, "tokenizer_dir": resolved.tokenizer_dir}
    with _noted(say, unless=resolved.to_run):
        return fixed_prompts(resolved.recipe, known.build().anatomy.model, **places)
    return None


def _look_at_weights(recipe: Recipe, known: KnownModel, model_dir: Path, say: Say) -> None:
    """Says in a plan why a run would refuse the files of a model in a folder. A run says so once all are fetched."""
    from .in_place_files import places_of

    if (
        known.facts.refusal is not None
        or not Path(recipe.model.name_or_path).is_dir()
        or not any(model_dir.glob("*.safetensors"))
    ):
        return
    with _noted(say, unless=False):
        places_of(recipe, known, model_dir)


def in_place_of(resolved: Resolved, known: KnownModel, device: str, say: Say) -> InPlace | None:
    """Finds where frozen weights lie in the model's files, if any are frozen. A plan goes on without them."""
    made_over = resolved.recipe.model.quantize != "none"  # then what is frozen is read and quantised once
    if made_over or not known.facts.has_frozen:
        return None
    from .in_place_files import files_in_place

    asked = (resolved.recipe, known, resolved.model_dir, resolved.directories)
    try:
        return files_in_place(*asked, resolved.manifest, device=device)
    except UsageError as error:
        if resolved.to_run:
            raise
        say(refused(error))
        return files_in_place(*asked, None, device=device)


def device_name(recipe: Recipe) -> str:
    """Returns the recipe's device. For auto, returns cuda if there is a GPU, otherwise cpu."""
    if recipe.offload.device != "auto":
        return recipe.offload.device
    from importlib.metadata import version

    if version("torch").endswith("+cpu") or not any(Path(driver).exists() for driver in _DRIVERS):
        return "cpu"  # torch need not be loaded to say so
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def fetch(planned: Planned, *, say: Say, progress: Progress = unheard) -> Fetched:
    """Downloads the weights if they are missing, and matches them with the model's tensors."""
    from ..checkpoint.files import open_checkpoint
    from ..checkpoint.reader import weights_mark

    recipe, saved = planned.recipe, planned.manifest
    model_dir = Hub(recipe, say=say, progress=progress).model(need_weights=saved is None)
    if model_dir != planned.model_dir:
        raise UsageError(f"{recipe.model.name_or_path}: changed while it was read", hint="run the same command again")
    try:
        entries = entries_of(recipe, planned.anatomy, open_checkpoint(model_dir))
        check_planned(planned.model, entries, model_dir)
        mark = weights_mark(entries)
    except UsageError as error:
        if saved is None or planned.anatomy.buffers:  # whose values are nowhere else
            raise
        say(f"note: {error.message}. So the weights are not compared with those that the run began with")
        stored_as = {tensor.name: tensor.stored_as for stage in saved.stages for tensor in stage.tensors}
        return Fetched(planned=planned, entries={}, stored_as=stored_as, mark=saved.fingerprints.get("weights", ""))
    stored_as = {name: entry.name for name, entry in entries.items()} | stored_names(recipe, planned.model, entries)
    if saved is None:
        entries |= starting_entries(recipe, planned.anatomy.model)
    return Fetched(planned=planned, entries=entries, stored_as=stored_as, mark=mark)


def tokenise(fetched: Fetched, *, say: Say, accept_changes: bool = False) -> Ready:
    """Makes rows of the data, or finds those of an earlier run. Raises UsageError if they do not fit the model or the saved
    run. `accept_changes`: that goes on with another rate, decay, schedule or length."""
    planned = fetched.planned
    recipe, saved = planned.recipe, planned.manifest
    say("reading and tokenising the data")
    tokenizer_dir = planned.tokenizer_dir
    check = partial(check_tokens, recipe, planned.known.facts.embeddings)
    with nullcontext() if planned.peers is None else planned.peers.one_of_a_box_first("tokenised"):
        rows, sampler = fed(recipe, tokenizer_dir, check=check, say=say)
        evaluated = evaluation_rows(recipe, tokenizer_dir, say=say)
    for found in evaluated.values():
        check(found.summary)
    for note in rows.summary.notes:
        say(f"note: {note}")
    total = steps_of(recipe, rows.summary.rows)
    learning_rate(recipe, total)  # refuses a warm-up that is longer than the epochs
    if repeated := sampler.note(total, recipe.train.epochs):
        say(f"note: {repeated}")
    if mixture := mixture_of(recipe, sampler, total):
        say(f"data: {mixture}")
    made_of = fingerprints_of(
        recipe,
        planned.model_dir,
        planned.whole,
        device=planned.device,
        weights_mark=fetched.mark,
        data=rows.summary.digest,
        total_steps=total,
    )
    settings = settings_of(recipe, device=planned.device)
    changes: tuple[Change, ...] = ()
    if saved is not None:
        changes = check_unchanged_run(saved, made_of, total_steps=total, settings=settings, accepted=accept_changes)
        if changed := change_of_libraries(saved.libraries, library_versions(recipe)):
            say(f"note: {changed}")
    return Ready(
        **fields_of(fetched, Fetched),
        rows=rows,
        sampler=sampler,
        fingerprints=made_of,
        evaluated=evaluated,
        untouched=untouched_of(planned.anatomy, fetched.entries) if saved is None else saved.untouched,
        settings=settings,
        changes=changes,
    )


def untouched_of(anatomy: Anatomy, entries: Mapping[str, TensorEntry]) -> Untouched | None:
    """Names the tensors of a checkpoint that a run leaves alone: also those that stand for nothing in the model. None without
    any."""
    from ..checkpoint.names import is_in
    from ..checkpoint.reader import weights_mark

    parts = (*anatomy.untouched, *anatomy.buffers)
    known = {*anatomy.model.state_dict(), *(name for those in anatomy.parts.values() for name, _ in those)}
    found = {entry.name: entry for name, entry in entries.items() if is_in(parts, name) or name not in known}
    return Untouched(names=tuple(found), mark=weights_mark(found)) if found else None
