"""Finds the saved run that a recipe resumes, and checks that it fits the recipe, or that the folders are free. Writes nothing.

The manifest is in the first folder only. Folders may be named in another order or not be mounted, so the part file in each says
what it is part of (`store_folders`). A run agrees with its recipe by digests, one per subject, and the recipe's keys as they
were tell which of them changed, from what to what, and which may.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...checkpoint.files import name_list, own_code, read_json
from ...core.disk import file_size, status_of, unreadable
from ...core.errors import FuyouError, UnreadableError, UsageError
from ...core.json_files import one_line
from ...core.paths import folder
from ...recipe.diagnostics import spelt
from ...recipe.load import as_override
from ...recipe.rules import REMOVED_KEYS
from ...spec.model import ModelFacts, ModelSpec
from ...spec.plan import Plan, Span
from ..numerics import sums_in
from . import manifest as manifests
from .at_rest import SavedStore, changed_files, find_saved_store, used_since
from .manifest import TENSORS, Change, Manifest
from .recovery import of_another_count
from .store_folders import PART_FILE, STORE_FILE, check_mounted, missing_file, read_part, refuse_copy, refuse_in_use

if TYPE_CHECKING:
    from ...recipe.schema import Recipe

Say = Callable[[str], None]

# Keys that say nothing of a run's steps: where things are, and how fast they go. A run may change them without a word.
_OF_A_PLACE = (
    "version", "output_dir", "offload", "checkpoint.resume", "dataset.cache_dir", "dataset.num_workers", "train.nproc",
    "train.peer_timeout", "train.parallel",
)  # fmt: skip
# Keys that a run may go on with at another value; what is under the first of them changes its steps, so it has to be accepted.
_SCHEDULE = ("lr_scheduler", "train.max_steps", "train.epochs")
RATES = ("optimizer.lr", "optimizer.weight_decay", "optimizer.eps", *_SCHEDULE)  # each update takes them as they are
_FREE = (
    "train.max_time",
    "train.skip_nonfinite",
    "train.early_stopping",
    "eval",
    "dataset.eval",
    "checkpoint",
    "export",
    "logging",
)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What one fingerprint covers."""

    words: str  # in a recipe's
    keys: tuple[str, ...] = ()  # that it is of
    why: str = ""  # a run keeps it


_BITS = "it decides the bits of every step"
_ROWS = "the rows that are left depend on it"
_ORIGIN = ("model.name_or_path", "model.revision")
_SUBJECTS = {
    "numerics": _Subject("its numerics", why="they decide the bits of every step"),  # its keys are those of `_changed_numerics`
    "optimizer": _Subject("optimizer", ("optimizer",), "momentum and variance were made with it"),
    "schedule": _Subject("the learning-rate schedule (lr_scheduler, train.max_steps or train.epochs)", _SCHEDULE),
    "clipping": _Subject("train.clip_grad_norm", ("train.clip_grad_norm",), "all of a run's gradients are clipped alike"),
    "attention": _Subject("model.attn_implementation", ("model.attn_implementation",), _BITS),
    "kernels": _Subject("model.kernels", ("model.kernels",), _BITS),
    "compile": _Subject("train.compile", ("train.compile",), _BITS),
    "deterministic": _Subject("train.deterministic", ("train.deterministic",), _BITS),
    "shuffle": _Subject("dataset.shuffle", ("dataset.shuffle",), _ROWS),
    "mixture": _Subject("the weights in dataset.train", ("dataset.train",), _ROWS),
    "frozen": _Subject("which parameters are trained (freeze)", ("freeze",), "only what is trained has states"),
    "adapter": _Subject("the adapter (adapter)", ("adapter",), "what is saved has its shapes and scale"),
    "data": _Subject("the tokens of the data (dataset, tokenizer)", ("dataset", "tokenizer")),
    "device": _Subject("the kind of device (offload.device; for auto: whether there is a GPU)", ("offload.device",), _BITS),
    "model": _Subject("the model's configuration (model.name_or_path)", _ORIGIN, "what is saved was trained from it"),
    "weights": _Subject(
        "the weights it began with (model.name_or_path, model.revision)", _ORIGIN, "what is saved was trained from it"
    ),
    "code": _Subject("the model's own code (*.py in model.name_or_path)", why="what is saved was trained with it"),
}
_OFTEN_WITHOUT = ("deterministic", "compile", "mixture", "adapter")  # what a recipe need not have
_UNRECORDED = ("optimizer", "schedule", "clipping", "shuffle", "attention")  # of keys whose old values a store may not tell
_MOST = 8  # keys that a message names
_OTHER_DATA = (
    "a run goes on only with the data it began with: put that back. With other data start over: checkpoint.resume=never gives "
    "the saved state up, so run `fuyou export STORE OUT{}` first to begin with its weights (model.name_or_path=OUT)"
)
REFUSED = "A run would be refused"  # in the notes of a plan; the screen looks for it to say so at the top


def saved_state(
    recipe: Recipe, directories: tuple[Path, ...], *, count: int = 1, must: bool, here: bool, say: Say
) -> tuple[tuple[Path, ...], SavedStore | None]:
    """Returns the folders of the run, and the state saved in them (only if `here`). Raises FuyouError if a run that `must`
    resume it could not. `count`: the ranks that train the model."""
    try:
        saved = find_saved(recipe.checkpoint.resume, directories, count=count, say=say) if here else None
    except FuyouError as error:
        if must:
            raise
        say(refused(error))
        return directories, None
    if saved is not None and recipe.checkpoint.resume != "auto":  # a run named by its folder resumes there
        directories = tuple(Path(file).parent for file in saved.manifest.files)
    return directories, saved


def refused(error: FuyouError) -> str:
    """Returns a note that says why a run could not resume, for a plan that goes on without the saved run."""
    hint = f" ({error.hint})" if error.hint else ""
    return f"note: {error.message}. {REFUSED}{hint}; this plan is for a new run"


def steps_left(total: int, manifest: Manifest | None) -> int:
    """Returns the steps of `total` (0: not known) that no earlier process has done."""
    return max(0, total - (manifest.step if manifest is not None else 0))


def find_saved(resume: str, directories: Sequence[Path], *, count: int = 1, say: Say) -> SavedStore | None:
    """Returns the saved run to resume, or None for a new one. `resume`: auto, never, or a store's folder. `count`: the ranks
    that train the model.

    Raises UsageError if a saved run cannot be resumed, or if a new run would overwrite one without being asked to.
    """
    if resume == "never":
        return None
    if resume != "auto" and count > 1:
        what = f"checkpoint.resume names one folder, and each of {count} ranks has its own"
        raise UsageError(what, hint="use auto: each rank finds its folder in offload.dir")
    source = directories[0] if resume == "auto" else folder(resume, key="checkpoint.resume")
    saved = find_saved_store(source)
    manifest = None if saved is None else saved.manifest
    if manifest is None:
        check_mounted(directories if resume == "auto" else [source])
    if resume != "auto" and (manifest is None or manifest.state == "loading"):
        what = "there is no saved run" if manifest is None else "nothing is saved yet"
        raise UsageError(f"checkpoint.resume: {what} in {source}", hint="use auto to begin a new run")
    if saved is None or manifest is None:
        _check_free(directories, being_filled=(), say=say)
        _check_moved(source.parent)
        return None
    if manifest.state == "loading":
        refuse_in_use(manifest)
        _check_free(directories, being_filled=manifest.files, say=say)
        return None
    if (was := 1 if manifest.share is None else manifest.share.count) != count:
        raise of_another_count(was, folder=str(source), now=count)
    refuse_copy(manifest, source)
    refuse_in_use(manifest)
    if saved.problem:
        say(f"note: {saved.problem}; continuing from the state after step {manifest.step}")
    _check_parts(manifest)
    return saved


def _kept(what: str, remedy: str) -> UsageError:
    """Makes the error for a saved run that is in the way. Whatever the remedy, the user can give the run up."""
    return UsageError(what, hint=f"{remedy}, or start over with checkpoint.resume=never, which gives the saved state up")


def _check_moved(directory: Path) -> None:
    """Raises UsageError if the only store is of a saved run that was moved here. Otherwise a new run would begin without being
    asked to."""
    kept = list(directory.glob(f"*/{manifests.NAME}"))
    if len(kept) != 1:  # several runs share the folders
        return
    store = kept[0].parent
    try:
        saved = manifests.read(store)
    except UnreadableError:
        raise
    except UsageError:
        return
    if saved is None or saved.state != "committed" or file_size(saved.files[0]) is not None:
        return
    if status_of(store / STORE_FILE) is None:
        return
    if Path(saved.files[0]).parent.name == store.name:
        refuse_copy(saved, store)


def _check_parts(saved: Manifest) -> None:
    """Checks that every file that the manifest names exists, is as long as it was, and belongs to this run."""
    if missing := missing_file(saved):
        raise _kept(f"the saved run cannot be resumed: {missing}", "mount its drive or put the file back")
    for index, path in enumerate(map(Path, saved.files)):
        part, place = read_part(path.parent), path.parent / PART_FILE
        if part is None and status_of(place) is not None:
            raise _kept(f"the saved run cannot be resumed: {place} is damaged", "put a copy of it back")
        if part is None or (part.run, part.index) != (saved.run, index):
            raise _kept(f"the saved run cannot be resumed: {path} belongs to another run now", "put a copy back")


def _check_free(directories: Sequence[Path], *, being_filled: Sequence[str], say: Say) -> None:
    """Checks that nothing in these folders belongs to a saved run that a new one would destroy. Says where data is written over
    whose manifests are gone.

    `being_filled`: files of a run that was killed while it loaded. They may have no part file yet, and some file systems do not
    tell reserved room from data.
    """
    for directory in directories:
        store, part_file = directory / STORE_FILE, directory / PART_FILE
        if status_of(store) is None:
            continue
        if status_of(part_file) is None:
            if str(store) not in being_filled and _holds_data(store):
                raise _kept(f"{store} holds data that does not belong to any known run of fuyou", "move it away")
            continue
        part = read_part(directory)
        if part is None:  # it may belong to a saved run, so nothing is overwritten on a guess
            raise _kept(f"{part_file} is damaged", "put it back")
        first = Path(part.first)
        owner, _ = manifests.newest(first)
        if owner is None and status_of(first) is not None:  # the run was removed, or killed as it began
            if _holds_data(store):
                gone = f"{manifests.NAME} and {manifests.BEFORE} are not in {first}"
                say(f"note: {store} holds data but no saved state, as {gone}: a run starts over at step 1 and writes over it")
            continue
        if owner is not None and (owner.run != part.run or owner.state != "committed"):
            continue
        step = f"after step {owner.step}" if owner is not None else f"whose manifest was in {first}"
        raise _kept(
            f"{directory} holds part {part.index + 1} of {part.count} of a saved run {step}",
            f"name the folders in offload.dir in the order of that run ({first.parent} first)",
        )


def _holds_data(file: Path) -> bool:
    """Tells whether anything was written to a file, not only room reserved."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # the file may be a pipe
    except OSError as error:
        raise unreadable(file, error) from None
    try:
        os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno != errno.ENXIO
    finally:
        os.close(descriptor)
    return True


def check_still_new(directory: Path) -> None:
    """Raises UsageError if a run has saved its state here since this one was planned. The store must be locked. A rank begins
    anew where it alone had committed what it loaded (`recovery`)."""
    current, _ = manifests.newest(directory)
    if current is not None and current.state != "loading" and not (current.share is not None and current.step == 0):
        raise used_since(directory)


def check_same_store(saved: Manifest, paths: Sequence[Path], *, stripe: int) -> None:
    """Raises UsageError if the run was saved in other files than these."""
    if saved.files != tuple(map(str, paths)) or saved.stripe != stripe:
        was, now = ", ".join(saved.files), ", ".join(map(str, paths))
        what = f"the saved run is striped over {was} by {saved.stripe} bytes, not over {now} by {stripe}"
        raise _kept(what, "name the same folders in offload.dir, in the same order")


def check_same_stages(saved: Manifest, model: ModelSpec) -> None:
    """Raises UsageError where a manifest has other stages than those of the model that are computed here."""
    here = [stage for stage in model.stages if not stage.away]
    wanted = [(stage.name, stage.params, stage.trained, stage.quantised, stage.source) for stage in here]
    together = zip(model.stages, saved.stages, strict=False)
    found = [(one.name, one.params, one.trained, one.quantised, one.pieces) for stage, one in together if not stage.away]
    if len(saved.stages) != len(model.stages) or found != wanted:
        place = Path(saved.files[0]).with_name(manifests.NAME)
        raise UsageError(
            f"{place}: its {len(saved.stages)} stages do not match the {len(model.stages)} of this model in number or size",
            hint="name the model that the run was started with, or start over with checkpoint.resume=never",
        )


def check_stages(saved: Manifest, model: ModelSpec, plan: Plan) -> None:
    """Raises UsageError where a manifest has other stages than the model, or elsewhere than the plan; the store is not opened
    before, which may make it longer."""
    check_same_stages(saved, model)
    for stage_plan, stage in zip(plan.stages, saved.stages, strict=True):
        places = {name: stage_plan.extent(name, stage.turn) for name in TENSORS}
        if any(places[name] != Span(offset=extent.offset, size=extent.size) for name, extent in stage.extents()):
            raise UsageError(
                f"the saved {stage.name} is not where this version of fuyou would put it",
                hint="another version made the store: start over with checkpoint.resume=never",
            )


def check_unchanged_run(
    saved: Manifest, fingerprints: Mapping[str, str], *, total_steps: int, settings: Mapping[str, Any] | None = None,
    accepted: bool = False, numerics: Sequence[Change] = (), unread: Sequence[str] = (),
) -> tuple[Change, ...]:  # fmt: skip
    """Returns the changes of the recipe that the run goes on with and remembers. `settings`: its keys now; `accepted`: a rate,
    schedule or length may be another; `numerics`: those of the run that the recipe would have otherwise; `unread`: what is
    compared later by its content. Raises UsageError that names every other one, with its old and new value."""
    own = [change.key for change in numerics]
    changes = [change for change in changed_keys(saved.settings, settings, step=saved.step) if change.key not in own]
    names = dict.fromkeys((*fingerprints, *saved.fingerprints))
    changed = [name for name in names if saved.fingerprints.get(name) != fingerprints.get(name)]
    if "frozen" in changed and "model" in changed:
        changed.remove("model")  # its stages are laid out by what is frozen
    may = [name for name in changed if name == "schedule" or ((of := _of_subject(name, changes)) and all(map(is_rate, of)))]
    if numerics:  # the optimizer's are named by their keys, unless another key of its has changed
        changed = ["numerics", *(name for name in changed if name != "optimizer" or _of_subject(name, changes))]
    if any(name not in may for name in changed):
        raise _changed(saved, changed, may, changes, numerics=numerics, unread=unread)
    if saved.step > total_steps:
        raise UsageError(
            f"the saved run has done {saved.step} steps, but the recipe asks for {total_steps}",
            hint=f"write train.max_steps={saved.step} or more, or raise train.epochs; `fuyou export` writes the model as it is",
        )
    if changed and not accepted:
        raise _changed(saved, changed, may, changes, unread=unread)
    unknown = changed if saved.settings is None else []
    return (
        *(Change(step=saved.step, key=_in_words_of(name), before=None, now=None) for name in unknown),
        *(change for change in changes if _is_below(change.key, (*RATES, *_FREE))),
    )


def check_unchanged_recipe(
    saved: Manifest, recipe: Recipe, facts: ModelFacts, *, device: str, total_steps: int, accepted: bool
) -> None:
    """Does the same for what the recipe tells, with the model's `facts`: nothing is measured and no data read for a run that is
    refused. `total_steps`: 0 where the data decides."""
    now = _digests(_of_recipe(recipe, device=device, total_steps=total_steps))
    if not total_steps:
        del now["schedule"]
    others = {name: digest for name, digest in saved.fingerprints.items() if name not in _OFTEN_WITHOUT}
    check_unchanged_run(
        saved, {**others, **now}, total_steps=total_steps or saved.step, settings=settings_of(recipe, device=device),
        accepted=accepted, numerics=_changed_numerics(saved, recipe, facts), unread=("frozen", "data", "model"),
    )  # fmt: skip


def _changed_numerics(saved: Manifest, recipe: Recipe, facts: ModelFacts) -> list[Change]:
    """Returns the settings that decide a run's bits and that differ from the saved run's. `auto` keeps the saved value."""
    train, was = recipe.train, saved.numerics
    rested, rests = saved.quantisation or "none", recipe.model.quantisation or "none"
    pairs: dict[str, tuple[Any, Any]] = {
        "precision.compute": (was.compute_dtype, recipe.precision.compute),
        "train.batch_size": (was.batch_size, train.batch_size),
        "train.micro_batch_size": (was.micro_batch_size, train.micro_batch_size),
        "dataset.max_seq_len": (was.max_seq_len, recipe.dataset.max_seq_len),
        "train.head_chunk_tokens": (was.head_chunk_tokens, train.head_chunk_tokens),
        "train.head_chunk_vocab": (was.vocabulary_rows, "auto" if train.head_chunk_vocab == "auto" else facts.vocabulary_rows),
        "train.threads": (was.torch_threads, train.threads),
        "seed": (was.seed, recipe.seed),
        "train.lanes": (was.lanes, train.lanes),
        "optimizer.state_dtype": (saved.state_dtype, recipe.optimizer.state_dtype),
        "optimizer.name": (saved.rule, recipe.optimizer.name),
        "train.router_aux_loss": (was.router_aux_loss or None, train.router_aux_loss or None),
        "model.quantize": (rested.removesuffix("_double"), rests.removesuffix("_double")),
        "model.double_quant": (rested.endswith("_double"), rests.endswith("_double")),
    }
    changed = {key: pair for key, pair in pairs.items() if pair[1] not in ("auto", pair[0])}
    micro = was.micro_batch_size if train.micro_batch_size == "auto" else train.micro_batch_size
    chunk = was.head_chunk_tokens if train.head_chunk_tokens == "auto" else train.head_chunk_tokens
    said = None if saved.settings is None else saved.settings.get("precision.grad_accum")
    # Sums may have another dtype because there is one piece, or no longer: then the key that says so is named already.
    is_named = bool(changed) if said is None else said == recipe.precision.grad_accum
    if sums_in(recipe, micro, chunk) != was.accumulate_dtype and not is_named:
        changed = {"precision.grad_accum": (said or was.accumulate_dtype, recipe.precision.grad_accum), **changed}
    return [Change(step=saved.step, key=key, before=before, now=now) for key, (before, now) in changed.items()]


def _in_words_of(name: str) -> str:
    return _SUBJECTS[name].words if name in _SUBJECTS else name


def _changed(
    saved: Manifest, names: Sequence[str], may: Sequence[str], changes: Sequence[Change], *, numerics: Sequence[Change] = (),
    unread: Sequence[str] = (),
) -> UsageError:  # fmt: skip
    """Makes the error for a recipe that is another one in what fingerprints of these names are of; `may`: those that a run may
    go on with."""
    what = f"the saved run cannot be resumed, because {' and '.join(map(_in_words_of, names))} changed since it was saved"
    of_these = [*numerics, *_of_subjects(names, changes)]
    if of_these:
        what += f": {in_words(of_these)}"
    elif saved.settings is None and any(name in _UNRECORDED for name in names):
        what += " (by a version of fuyou that did not record what the recipe said)"
    if "weights" in names and (files := changed_files(saved)):
        what += f": {name_list(files)}"
    if "data" in names:
        return UsageError(what, hint=_OTHER_DATA.format(" --merged" if "adapter" in saved.fingerprints else ""))
    kept = [name for name in names if name not in may]
    ways = ["add --accept-changes to go on with it"] if not kept else []
    rates = [change.key for change in of_these if is_rate(change)] if kept else []
    if whys := dict.fromkeys(_SUBJECTS[name].why for name in kept if name in _SUBJECTS and _SUBJECTS[name].why):
        what += f"; {'; '.join(whys)}"
    if others := [change for change in _of_subjects(unread, changes) if change not in of_these]:
        what += f"; and {in_words(others)}, with which data and model have to be the same"
    of_these = [change for change in of_these if change.key not in rates]
    ways.append(f"put it back: {put_back(of_these)}" if of_these else "put back what changed")
    ways[-1] += f" (--accept-changes goes on with {' and '.join(rates)})" if rates else ""
    if kept and saved.settings is None and "optimizer" in kept:
        ways.append("run it once with its old recipe, which is recorded then, and with --accept-changes for another rate")
    return _kept(what, ", or ".join(ways))


# ---- digests of what a resumed run must agree on ----------------------------------------------------------------------


def fingerprints_of(
    recipe: Recipe, model_dir: Path, model: ModelSpec, *, device: str, weights_mark: str, data: str, total_steps: int
) -> dict[str, str]:
    """Returns digests by name; `_SUBJECTS` has words for each. `weights_mark` and `data` are digests already."""
    config = read_json(model_dir / "config.json")  # the raw file, because libraries add their defaults
    described: dict[str, Any] = {
        "model": [
            _shapes(recipe, model),
            {key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"},
        ],
        **_of_recipe(recipe, device=device, total_steps=total_steps),
    }
    if recipe.adapter is None and (
        frozen := sorted({tensor.name for stage in model.stages for tensor in stage.tensors if tensor.frozen})
    ):
        described["frozen"] = frozen
    if recipe.model.trust_remote_code and "auto_map" in config:
        described["code"] = own_code(model_dir)
    return {**_digests(described), "weights": weights_mark, "data": data}


def _of_recipe(recipe: Recipe, *, device: str, total_steps: int) -> dict[str, Any]:
    """Returns what a run must agree on and the recipe alone tells, by name."""
    described: dict[str, Any] = {
        "attention": recipe.model.attn_implementation,
        "optimizer": {**recipe.optimizer.model_dump(mode="json"), "momentum": 0.9},  # a key of earlier builds: digests stay
        "schedule": [recipe.lr_scheduler.model_dump(mode="json"), _schedule_length(recipe, total_steps)],
        "clipping": recipe.train.clip_grad_norm,
        "shuffle": recipe.dataset.shuffle,
        "device": device,
    }
    if recipe.train.deterministic and device != "cpu":
        described["deterministic"] = True
    if recipe.train.compile:
        described["compile"] = True
    if recipe.dataset.weights:
        described["mixture"] = recipe.dataset.weights
    if recipe.adapter is not None:
        described["adapter"] = recipe.adapter.model_dump(mode="json")
    return described


def _digests(described: Mapping[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in described.items()}


def _shapes(recipe: Recipe, model: ModelSpec) -> list[Any]:
    """Returns what a configuration's digest says of the stages. An adapter changes names and sizes, and has its own digest."""
    if recipe.adapter is not None:
        return [stage.name for stage in model.stages]
    return [[s.name, s.params, [[t.name, list(t.shape)] for t in s.tensors]] for s in model.stages]


def _schedule_length(recipe: Recipe, total_steps: int) -> int | None:
    """Returns the number of steps if a step's learning rate depends on it. A run with a constant rate may be made longer."""
    schedule = recipe.lr_scheduler
    return None if schedule.name == "constant" and not schedule.warmup_ratio else total_steps


def library_versions(recipe: Recipe) -> dict[str, str]:
    """Returns the versions of the libraries that compute a run's steps, by name."""
    names = ("torch", "transformers") if recipe.adapter is None else ("torch", "transformers", "peft")
    return {"fuyou": __version__, **{name: _installed(name) for name in names}}


@cache  # every commit asks, and finding it takes 10 ms
def _installed(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def change_of_libraries(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Says which versions differ from those in a manifest, and what that means. Empty if none differ."""
    changed = [f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if not changed:
        return ""
    return f"{'; '.join(changed)}: results from here on may differ in their last bits from those of an uninterrupted run"


# ---- changes of a recipe ----------------------------------------------------------------------------------------------


def settings_of(recipe: Recipe, *, device: str) -> dict[str, Any]:
    """Returns the keys of a recipe that a run goes by, each with its value as JSON has it. `device`: what `auto` stands for."""
    kept = {key: value for key, value in recipe.settings().items() if not _is_below(key, _OF_A_PLACE)}
    return {**kept, "offload.device": device}


def changed_keys(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, *, step: int) -> list[Change]:
    """Returns every key whose value is another one than `before`; none if what was is not known."""
    if before is None or now is None:
        return []
    old = dict(_apart({key: value for key, value in before.items() if key not in REMOVED_KEYS}))
    new = dict(_apart(now))
    names = dict.fromkeys((*new, *old))
    pairs = [(name, old.get(name), new.get(name)) for name in names]
    return [Change(step=step, key=name, before=was, now=is_now) for name, was, is_now in pairs if was != is_now]


def _apart(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of each section of a list as keys of their own: dataset.train[0].path."""
    for key, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from _apart({f"{key}[{number}].{name}": inner for name, inner in item.items()})
        else:
            yield key, value


def _of_subject(name: str, changes: Sequence[Change]) -> list[Change]:
    """Returns the changes of keys that a fingerprint of this name is of, but for those that change no step."""
    keys = _SUBJECTS[name].keys if name in _SUBJECTS else ()
    return [change for change in changes if _is_below(change.key, keys) and not _is_below(change.key, _FREE)]


def _of_subjects(names: Sequence[str], changes: Sequence[Change]) -> list[Change]:
    return list({change.key: change for name in names for change in _of_subject(name, changes)}.values())


def is_rate(change: Change) -> bool:
    """Tells whether a run goes on with another value of a key where that is accepted."""
    return _is_below(change.key, RATES)


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in names)


def in_words(changes: Sequence[Change]) -> str:
    """Says what each key was and is."""
    words = [f"{one_line(change.key)} was {spelt(change.before)}, is {spelt(change.now)}" for change in changes[:_MOST]]
    return "; ".join([*words, *([f"and {len(changes) - _MOST} keys more"] if len(changes) > _MOST else [])])


def put_back(changes: Sequence[Change]) -> str:
    """Returns what to write for a recipe to say again what it said."""
    return " ".join(as_override(change.key, change.before) for change in changes[:_MOST])
