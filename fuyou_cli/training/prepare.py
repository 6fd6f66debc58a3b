"""From a recipe to everything a run needs before the first byte is written: model, data, specification, plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ..checkpoint.hub import Hub, Progress
from ..core.errors import PlanError, UsageError
from ..core.paths import folder
from ..planner.commit_interval import timed_plan
from ..planner.lasting import Choose, planned_for
from ..planner.place import plan as first_that_fits
from ..planner.search import fastest
from ..planner.store_modes import planned_with_room
from ..planner.wishes import Wishes, update_chunks_for, update_threads_for
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Numerics, Plan, StoreMode, Tier
from . import libraries
from .length import sampler_of, steps_of, tokenised_rows
from .limits import check_positions, check_tokens, gpu_limit
from .micro_batches import fastest_size, likely_sizes
from .numerics import numerics_of
from .rates import learning_rate
from .state import fingerprints
from .state.resume import check_unchanged_run, planned_from, saved_state, steps_left
from .state.storage import run_name
from .state.stored import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..checkpoint.files import Checkpoint
    from ..checkpoint.header import TensorEntry
    from ..data import Rows, Sampler
    from ..engine.anatomy import Anatomy
    from ..engine.describe import Described, Outlined
    from ..recipe.schema import CheckpointSection, Recipe

_KEPT: dict[str, Literal["all", "none"] | None] = {"auto": None, "swap": "all", "recompute": "none"}
CHUNK_PARAMS = 1 << 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    recipe: Recipe
    model_dir: Path
    tokenizer_dir: Path
    anatomy: Anatomy
    model: ModelSpec
    hardware: HardwareProfile
    plan: Plan
    total_steps: int
    rows: Rows | None  # None when only planning
    sampler: Sampler | None
    checkpoint: Checkpoint | None
    entries: Mapping[str, TensorEntry]
    directories: tuple[Path, ...]  # one folder of this run per striped directory
    manifest: Manifest | None  # of a stopped run to resume
    fingerprints: dict[str, str]
    stored_as: Mapping[str, str] = field(default_factory=dict)  # names of the model's tensors in its checkpoint
    refusal: str | None = None  # why the model cannot be trained yet; only ever when planning
    outline: Outlined | None = None  # the stages before the vocabulary is cut
    epoch_rows: int | None = None  # where they had to be counted for a plan
    store_room: StoreRoom | None = None

    @property
    def steps_left(self) -> int:
        """0 where the data decides, or none is."""
        return steps_left(self.total_steps, self.manifest)


Probe = Callable[[str], HardwareProfile]
# What the store of a recipe may have on the disks of these folders, given the model's folder and the bytes of an export.
StoreRoom = Callable[["Recipe", HardwareProfile, tuple[Path, ...], Path, int], int]
Planned = Callable[["Prepared"], None]


def _unheard(what: str, done: int, total: int) -> None:
    pass


def _accepted(considered: Prepared) -> None:
    pass


def prepare(
    recipe: Recipe,
    *,
    probe: Probe,
    planning_only: bool = False,
    elsewhere: bool = False,
    say: Callable[[str], None],
    progress: Progress = _unheard,
    planned: Planned = _accepted,
    choose: Choose = fastest,
    micro_batch_size: int | None = None,
    store_room: StoreRoom | None = None,
) -> Prepared:
    """Checks and reads what the recipe names, the cheap before the dear: configuration and tokenizer, where the data is,
    whether the run fits, the weights, the rows. Raises UsageError or PlanError; nothing of the run is written before.

    `planning_only` plans for any model, also for one that cannot be trained, and says so in `refusal`; `elsewhere` for another
    machine, so that nothing counts that is saved on this one.
    `probe` measures the machine for a device once libraries are loaded; `say` hears what takes a while; `progress` hears
    of a download, what it is, the bytes so far and in all, from another thread; `planned` hears the plan before weights
    are fetched (rows and entries are still empty), and may refuse it by raising; `choose` makes the plan;
    `micro_batch_size` is what `auto` means, where that was chosen before; `store_room` says what the disks have for the
    store (None: what `probe` found free)."""
    from ..engine.describe import outlined

    _check_backend(recipe)
    directories, manifest = saved_state(recipe, run_directories(recipe), must=not planning_only, here=not elsewhere, say=say)
    hub = Hub(recipe, say=say, progress=progress)
    model_dir = hub.model(need_weights=False)
    tokenizer_dir = hub.tokenizer(model_dir, needed=not planning_only)
    _look_at_data(recipe, say, needed=not planning_only)
    outline = known = outlined(_skeleton(recipe, model_dir), strict=not planning_only)
    check_positions(recipe, known.anatomy, say)
    device = device_name(recipe)
    _warm_up(recipe)
    hardware = probe(device)
    if planning_only:
        manifest = planned_from(recipe, known.anatomy, hardware, manifest, say=say)
    numerics = _numerics(recipe, known, hardware, manifest, micro=micro_batch_size, device=device)
    known = replace(known, anatomy=cut(known.anatomy, numerics))
    described = described_at(known, numerics)
    total_steps = steps_of(recipe, None)
    with _telling(described.refusal):
        asked = wishes(recipe, numerics, hardware, device=device, saved=manifest)
        asked = within(store_room, asked, recipe, described.model, hardware, directories, model_dir)
        chosen = planned_with_room(choose, described.model, hardware, asked, steps=steps_left(total_steps, manifest))
    considered = Prepared(
        recipe=recipe,
        model_dir=model_dir,
        tokenizer_dir=tokenizer_dir,
        anatomy=known.anatomy,
        model=described.model,
        hardware=hardware,
        plan=chosen,
        total_steps=total_steps,
        rows=None,
        sampler=None,
        checkpoint=None,
        entries={},
        directories=directories,
        manifest=manifest,
        fingerprints={},
        refusal=described.refusal,
        outline=outline,
        store_room=store_room,
    )
    if planning_only:
        return considered
    planned(considered)
    return _with_weights_and_rows(considered, hub, probe=probe, say=say, choose=choose)


@contextmanager
def _telling(refusal: str | None) -> Iterator[None]:
    """That nothing fits is not all there is to say of a model that cannot be trained."""
    try:
        yield
    except PlanError as error:
        if refusal is not None:
            error.add_note(f"cannot be trained yet: {refusal}")
        raise


def anatomy_of(
    recipe: Recipe, hardware: HardwareProfile, *, say: Callable[[str], None], progress: Progress = _unheard
) -> tuple[Anatomy, list[Numerics]]:
    """What a run of the recipe would compute with, without data, weights or a plan: the stages, and the numerics on a machine
    of `hardware.cores` cores; of every size of micro-batch that is likely where that is to be chosen, the usual one first.
    Raises UsageError."""
    from ..engine.describe import outlined

    model_dir = Hub(recipe, say=say, progress=progress).model(need_weights=False)
    anatomy = outlined(_skeleton(recipe, model_dir), strict=True).anatomy
    check_positions(recipe, anatomy, say)
    size = recipe.train.micro_batch_size
    sizes = likely_sizes(recipe.train.batch_size, recipe.dataset.max_seq_len) if size == "auto" else [size]
    numerics = [numerics_of(recipe, anatomy, hardware, None, micro=size) for size in sizes]
    return cut(anatomy, numerics[0]), numerics


def _check_backend(recipe: Recipe) -> None:
    from ..swap.kernels import has_io_uring

    if recipe.offload.io.backend == "io_uring" and not has_io_uring():
        raise UsageError(
            "offload.io.backend: io_uring, but fuyou was built without it",
            hint="write auto or threads, or install liburing-dev and build again (scripts/quickstart does)",
        )


def _with_weights_and_rows(
    considered: Prepared, hub: Hub, *, probe: Probe, say: Callable[[str], None], choose: Choose
) -> Prepared:
    """The dear part: weights fetched and looked at, data tokenised, and the plan once more for the process as it is then."""
    recipe, anatomy, model = considered.recipe, considered.anatomy, considered.model
    weights = _weights(hub, anatomy, considered.manifest, say)
    model_dir = weights.model_dir
    say("reading and tokenising the data")
    rows = tokenised_rows(recipe, considered.tokenizer_dir)
    check_tokens(recipe, anatomy, rows.summary)
    for note in rows.summary.notes:
        say(f"note: {note}")
    device = device_name(recipe)
    sampler, total = sampler_of(recipe, len(rows)), steps_of(recipe, len(rows))
    learning_rate(recipe, total)  # refuses a warm-up longer than the epochs are
    hardware = probe(device)
    hardware = replace(hardware, process_bytes=hardware.process_bytes + sampler.peak_bytes)
    if repeated := sampler.note(total, recipe.train.epochs):
        say(f"note: {repeated}")
    made_of = fingerprints.of(
        recipe, model_dir, model, device=device, weights_mark=weights.mark, data=rows.summary.digest, total_steps=total
    )
    if considered.manifest is not None:
        check_unchanged_run(considered.manifest, made_of, total_steps=total)
        if changed := libraries.change(considered.manifest.libraries, libraries.versions()):
            say(f"note: {changed}")
    saved = considered.manifest
    asked = wishes(recipe, considered.plan.numerics, hardware, device=device, saved=saved)
    asked = within(considered.store_room, asked, recipe, model, hardware, considered.directories, model_dir)
    return replace(
        considered,
        model_dir=model_dir,
        hardware=hardware,
        plan=planned_with_room(choose, model, hardware, asked, steps=steps_left(total, saved)),
        total_steps=total,
        rows=rows,
        sampler=sampler,
        checkpoint=weights.checkpoint,
        entries=weights.entries,
        stored_as=weights.stored_as,
        fingerprints=made_of,
    )


def _look_at_data(recipe: Recipe, say: Callable[[str], None], *, needed: bool) -> None:
    """Says which files are taken. A plan can be made without data (of a shipped recipe, say): then it is a note."""
    from ..data import MissingDataError, look

    try:
        sources = look(recipe.dataset)
    except MissingDataError as error:
        if needed:
            raise
        say(f"note: {error.message}: a run would be refused")
        return
    for source in sources:
        if source.choice is not None:
            say(f"data: {source.choice}")


def run_directories(recipe: Recipe) -> tuple[Path, ...]:
    """The folders of this run's store, one per striped directory."""
    name = run_name(folder(recipe.output_dir, key="output_dir"))
    found: dict[Path, Path] = {}
    for directory in recipe.offload_directories(os.environ):
        if (other := found.setdefault(directory.resolve(), directory)) is not directory:
            raise UsageError(f"offload.dir: {other} and {directory} are the same folder", hint="name each drive once")
    return tuple(directory / name for directory in found)


def device_name(recipe: Recipe) -> str:
    """cuda where there is one, else cpu, unless the recipe says."""
    if recipe.offload.device != "auto":
        return recipe.offload.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _warm_up(recipe: Recipe) -> None:
    """Makes torch start its threads and generate its first kernels, so that the process is measured as it will be."""
    import torch

    if recipe.train.threads != "auto":
        torch.set_num_threads(recipe.train.threads)
    dtype = torch.bfloat16 if recipe.precision.compute == "bfloat16" else torch.float32
    x = torch.zeros(1, 4, 64, 64, dtype=dtype, requires_grad=True)
    weight = torch.zeros(64, 64, dtype=dtype, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(x @ weight, x, x, is_causal=True)
    torch.nn.functional.silu(y).float().sum().backward()


def _skeleton(recipe: Recipe, model_dir: Path) -> PreTrainedModel:
    from ..engine.skeleton import build, load_config

    config = load_config(model_dir, trust_remote_code=recipe.model.trust_remote_code)
    return build(
        config,
        dtype=recipe.precision.compute,
        attention=recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """What a run begins with. `mark`: `checkpoint/reader.weights_mark`."""

    model_dir: Path
    checkpoint: Checkpoint | None
    entries: Mapping[str, TensorEntry]
    stored_as: Mapping[str, str]
    mark: str


def _weights(hub: Hub, anatomy: Anatomy, saved: Manifest | None, say: Callable[[str], None]) -> _Weights:
    """A run that goes on reads none of them: where they are gone, what its manifest says of them stands."""
    from ..checkpoint.files import open_checkpoint
    from ..checkpoint.names import entries_for
    from ..checkpoint.reader import weights_mark

    model_dir = hub.model(need_weights=saved is None)
    try:
        checkpoint = open_checkpoint(model_dir)
        entries = entries_for(anatomy.model, checkpoint)
        mark = weights_mark(entries)
    except UsageError as error:
        if saved is None:
            raise
        say(f"note: {error.message}: not compared with the weights that the run began with")
        stored_as = {tensor.name: tensor.stored_as for stage in saved.stages for tensor in stage.tensors}
        began_with = saved.fingerprints.get("weights", "")
        return _Weights(model_dir=model_dir, checkpoint=None, entries={}, stored_as=stored_as, mark=began_with)
    stored_as = {name: entry.name for name, entry in entries.items()}
    return _Weights(model_dir=model_dir, checkpoint=checkpoint, entries=entries, stored_as=stored_as, mark=mark)


def _numerics(
    recipe: Recipe, known: Outlined, hardware: HardwareProfile, saved: Manifest | None, *, micro: int | None, device: str
) -> Numerics:
    """As saved, or as the recipe says; the size of micro-batches as it was chosen before (`micro`), or by the planner."""
    if micro is None and recipe.train.micro_batch_size == "auto" and saved is None:
        micro = _fastest_micro_batch(recipe, known, hardware, device=device)
    return numerics_of(recipe, known.anatomy, hardware, saved, micro=micro)


def _fastest_micro_batch(recipe: Recipe, known: Outlined, hardware: HardwareProfile, *, device: str) -> int:
    """By the usual plan of each size, simulated; of the best two by the plans that the search finds for them."""

    def seconds(size: int, choose: Choose) -> float | None:
        numerics = numerics_of(recipe, known.anatomy, hardware, None, micro=size)
        model = described_at(replace(known, anatomy=cut(known.anatomy, numerics)), numerics).model
        asked = wishes(recipe, numerics, hardware, device=device)
        try:
            plan = planned_for(choose, model, hardware, asked, steps=steps_of(recipe, None))
        except PlanError:
            return None
        if asked.gpu_budget is not None and plan.predicted.gpu_peak > asked.gpu_budget:
            return None
        return plan.predicted.step_seconds

    return fastest_size(
        recipe.train.batch_size,
        recipe.dataset.max_seq_len,
        planned=lambda size: seconds(size, _usual_plan),
        searched=lambda size: seconds(size, fastest),
    )


def _usual_plan(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
    plan = first_that_fits(model, hardware, wishes)
    return timed_plan(model, hardware, plan, chosen=wishes.commit_every == "auto")


def cut(anatomy: Anatomy, numerics: Numerics) -> Anatomy:
    """Embedding and head in as many stages as the numerics say."""
    from ..engine.vocabulary import cut_vocabulary

    return cut_vocabulary(anatomy, numerics.vocabulary_rows)


def described_at(known: Outlined, numerics: Numerics) -> Described:
    from ..engine.describe import specified

    return specified(
        known,
        dtype=numerics.compute_dtype,
        micro_batch_size=numerics.micro_batch_size,
        max_seq_len=numerics.max_seq_len,
        head_chunk_tokens=numerics.head_chunk_tokens,
    )


def wishes(
    recipe: Recipe, numerics: Numerics, hardware: HardwareProfile, *, device: str, saved: Manifest | None = None
) -> Wishes:
    """The recipe's placement keys as numbers. A saved run goes on in a store of the kind that it has."""
    from ..swap.kernels import scratch_size

    offload, checkpoint = recipe.offload, recipe.checkpoint
    snapshots = checkpoint.mode == "snapshot"
    mode: StoreMode = saved.mode if saved is not None else "redo" if checkpoint.mode == "redo" else "in_place"
    limit = offload.max_memory

    def tier(value: str) -> Tier | None:
        if value == "gpu" and device == "cpu":
            raise UsageError("a tensor is pinned to gpu, but offload.device is cpu", hint="use cpu, ssd or auto")
        return None if value == "auto" else cast(Tier, value)

    everything: Tier | None = "cpu" if offload.strategy == "none" else None
    block = offload.io.block_size
    depth = 16 if offload.io.queue_depth == "auto" else offload.io.queue_depth
    threads = update_threads_for(hardware, device=device, torch_threads=numerics.torch_threads)
    return Wishes(
        numerics=numerics,
        model_name=recipe.model.name_or_path,
        device=device,
        clip_grad_norm=recipe.train.clip_grad_norm,
        gpu_budget=gpu_limit(recipe, hardware),
        cpu_budget=limit.cpu.resolve(total=hardware.ram_total, auto=_usual_budget(hardware, device)),
        weights=tier(offload.weights) or everything,
        states=tier(offload.optimizer_states) or everything,
        gradients="ssd" if mode == "redo" else tier(offload.gradients) or everything,
        boundaries=tier(offload.boundaries) or everything,
        kept=_KEPT[offload.activations],
        lookahead=None if offload.lookahead == "auto" else offload.lookahead,
        defer=None if offload.defer_updates == "auto" else offload.defer_updates,
        io_backend=offload.io.backend,
        read_depth=depth,
        write_depth=depth,
        block_size=1 << 20 if block == "auto" else block,
        update_threads=threads,
        chunk_params=CHUNK_PARAMS,
        scratch_size=scratch_size(CHUNK_PARAMS, update_chunks_for(threads)),
        export_item=2 if recipe.export.dtype == "bfloat16" else 4,
        commit_every=_commit_every(checkpoint, mode),
        store_mode=mode,
        may_redo=checkpoint.mode == "auto" and checkpoint.commit_every_steps in (1, "auto") and saved is None,
        keep=saved.keep if saved is not None else checkpoint.keep_last if snapshots else 1,
        wear=offload.wear,
    )


def _commit_every(checkpoint: CheckpointSection, mode: StoreMode) -> int | Literal["auto"] | None:
    if checkpoint.mode == "snapshot":
        return checkpoint.snapshot_every_steps
    return 1 if mode == "redo" and checkpoint.commit_every_steps == "auto" else checkpoint.commit_every_steps


def _usual_budget(hardware: HardwareProfile, device: str) -> int:
    """Nine tenths of what there is; beside a GPU no more than its driver may pin, as nearly all of it is pinned."""
    most = int(hardware.ram_available * 0.9)
    return min(most, hardware.pinnable) if device == "cuda" and hardware.pinnable else most


def within(
    store_room: StoreRoom | None,
    asked: Wishes,
    recipe: Recipe,
    model: ModelSpec,
    hardware: HardwareProfile,
    directories: tuple[Path, ...],
    model_dir: Path,
) -> Wishes:
    """The wishes of a run whose store is to fit its disks, and its export beside it."""
    if store_room is None:
        return asked
    room = store_room(recipe, hardware, directories, model_dir, model.parameters * asked.export_item)
    return replace(asked, ssd_budget=room)
