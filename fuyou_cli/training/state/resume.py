"""Finds the saved run that a recipe resumes, and checks that it fits the recipe, or that the folders are free. Writes nothing.

The manifest is in the first folder only. Folders may be named in another order or not be mounted, so the part file in each says
what it is part of (`parts`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoint.files import name_list
from ...core.disk import file_size, status_of, unreadable
from ...core.errors import FuyouError, UnreadableError, UsageError
from ...core.paths import folder, is_same_folder
from . import manifest as manifests
from .parts import PART_FILE, STORE_FILE, lacking, read_part
from .places import check_mounted
from .recipe_changes import changed_keys, in_words, is_rate, may_change, of_fingerprint, put_back, recorded, why_kept
from .source_checks import changed_files
from .stored import Change, Manifest

if TYPE_CHECKING:
    from ...recipe.schema import Recipe

Say = Callable[[str], None]

# What each fingerprint covers, in a recipe's words. A missing name stands for itself.
_CHANGED = {
    "model": "the model's configuration (model.name_or_path)",
    "weights": "the weights it began with (model.name_or_path, model.revision)",
    "code": "the model's own code (*.py in model.name_or_path)",
    "attention": "model.attn_implementation",
    "schedule": "the learning-rate schedule (lr_scheduler, train.max_steps or train.epochs)",
    "clipping": "train.clip_grad_norm",
    "shuffle": "dataset.shuffle",
    "mixture": "the weights in dataset.train",
    "deterministic": "train.deterministic",
    "compile": "train.compile",
    "kernels": "model.kernels",
    "frozen": "which parameters are trained (freeze)",
    "adapter": "the adapter (adapter)",
    "data": "the tokens of the data (dataset, tokenizer)",
    "device": "the kind of device (offload.device; for auto: whether there is a GPU)",
}
_UNRECORDED = ("optimizer", "schedule", "clipping", "shuffle", "attention")  # of keys whose old values a store may not tell
_OTHER_DATA = (
    "a run goes on only with the data it began with: put that back. With other data start over: checkpoint.resume=never gives "
    "the saved state up, so run `fuyou export STORE OUT{}` first to begin with its weights (model.name_or_path=OUT)"
)
REFUSED = "A run would be refused"  # in the notes of a plan; the screen looks for it to say so at the top
_DYING = 1.0  # seconds that a killed process may need to end


def saved_state(
    recipe: Recipe, directories: tuple[Path, ...], *, must: bool, here: bool, say: Say
) -> tuple[tuple[Path, ...], Manifest | None]:
    """Returns the folders of the run, and the state saved in them (only if `here`). Raises FuyouError if a run that `must`
    resume it could not."""
    try:
        manifest = find_saved(recipe.checkpoint.resume, directories, say=say) if here else None
    except FuyouError as error:
        if must:
            raise
        say(refused(error))
        return directories, None
    if manifest is not None and recipe.checkpoint.resume != "auto":  # a run named by its folder resumes there
        directories = tuple(Path(file).parent for file in manifest.files)
    return directories, manifest


def refused(error: FuyouError) -> str:
    """Returns a note that says why a run could not resume, for a plan that goes on without the saved run."""
    hint = f" ({error.hint})" if error.hint else ""
    return f"note: {error.message}. {REFUSED}{hint}; this plan is for a new run"


def steps_left(total: int, manifest: Manifest | None) -> int:
    """Returns the steps of `total` (0: not known) that no earlier process has done."""
    return max(0, total - (manifest.step if manifest is not None else 0))


def find_saved(resume: str, directories: Sequence[Path], *, say: Say) -> Manifest | None:
    """Returns the saved run to resume, or None for a new one. `resume`: auto, never, or a store's folder.

    Raises UsageError if a saved run cannot be resumed, or if a new run would overwrite one without being asked to.
    """
    if resume == "never":
        return None
    source = directories[0] if resume == "auto" else folder(resume, key="checkpoint.resume")
    found, problem = manifests.newest(source)
    if found is None:
        check_mounted(directories if resume == "auto" else [source])
    if resume != "auto" and (found is None or found.state == "loading"):
        what = "there is no saved run" if found is None else "nothing is saved yet"
        raise UsageError(f"checkpoint.resume: {what} in {source}", hint="use auto to begin a new run")
    if found is None:
        _check_free(directories, being_filled=())
        _check_moved(source.parent)
        return None
    if found.state == "loading":
        refuse_in_use(found)
        _check_free(directories, being_filled=found.files)
        return None
    refuse_copy(found, source)
    refuse_in_use(found)
    if problem:
        say(f"note: {problem}; continuing from the state after step {found.step}")
    _check_parts(found)
    return found


def refuse_copy(manifest: Manifest, source: Path) -> None:
    """Raises UsageError if the manifest in `source` belongs to a store elsewhere: `source` is a copy of it, or was moved."""
    home = Path(manifest.files[0]).parent
    if is_same_folder(home, source):
        return
    if file_size(manifest.files[0]) is not None:
        raise UsageError(
            f"{source} is a copy of the store in {home}: its manifest names the files there",
            hint=f"name {home}; a copy can be used only if it is moved there",
        )
    raise UsageError(
        f"{source} holds a run that was saved after step {manifest.step} in {home} and moved since",
        hint="move it back, or mount it at that path too (mount --bind), and name its folders as before; a run that starts "
        "over (checkpoint.resume=never) gives the saved state up",
    )


def refuse_in_use(manifest: Manifest) -> None:
    """Raises FuyouError while a running fuyou uses the store. Waits for the kernel to end the I/O of a killed one (about 40
    ms)."""
    until = time.monotonic() + _DYING
    while name := _in_use(manifest):
        if time.monotonic() >= until:
            raise FuyouError(f"{name} is in use by a running fuyou", hint="stop that run first (Ctrl-C saves it)")
        time.sleep(_DYING / 20)


def _in_use(manifest: Manifest) -> str:
    """Returns the name of a file of the store that a process has locked, or an empty string. Raises UnreadableError where that
    cannot be found out."""
    for name in manifest.files:
        if file_size(name) is None:
            continue
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # the store refuses a link by name
                continue
            raise unreadable(name, error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return name
        except OSError as error:
            raise unreadable(name, error, verb="locked") from None
        finally:
            os.close(descriptor)
    return ""


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
    if missing := lacking(saved):
        raise _kept(f"the saved run cannot be resumed: {missing}", "mount its drive or put the file back")
    for index, path in enumerate(map(Path, saved.files)):
        part, place = read_part(path.parent), path.parent / PART_FILE
        if part is None and status_of(place) is not None:
            raise _kept(f"the saved run cannot be resumed: {place} is damaged", "put a copy of it back")
        if part is None or (part.run, part.index) != (saved.run, index):
            raise _kept(f"the saved run cannot be resumed: {path} belongs to another run now", "put a copy back")


def _check_free(directories: Sequence[Path], *, being_filled: Sequence[str]) -> None:
    """Checks that nothing in these folders belongs to a saved run that a new one would destroy.

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
        if owner is None and status_of(first) is not None:
            continue  # the run was removed
        if owner is not None and (owner.run != part.run or owner.state != "committed"):
            continue
        step = f"after step {owner.step}" if owner is not None else f"whose manifest was in {first}"
        raise _kept(
            f"{directory} holds part {part.index + 1} of {part.count} of a saved run {step}",
            f"name the folders in offload.dir in the order of that run ({first.parent} first)",
        )


def _holds_data(file: Path) -> bool:
    """Tells whether anything was written to a file, not only room reserved."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # the file may be a pipe
    try:
        os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno != errno.ENXIO
    finally:
        os.close(descriptor)
    return True


def check_unchanged(expected: Manifest | None, directory: Path, *, start_over: bool) -> None:
    """Raises UsageError if the manifest is not the one that was planned with. The store must be locked."""
    if start_over:
        return
    current, _ = manifests.newest(directory)
    if current is not None and current.state == "loading":
        current = None
    if current != expected:
        raise UsageError(
            f"another process has used the store in {directory} since this one read its manifest",
            hint="run the same command again",
        )


def check_same_store(saved: Manifest, paths: Sequence[Path], *, stripe: int) -> None:
    """Raises UsageError if the run was saved in other files than these."""
    if saved.files != tuple(map(str, paths)) or saved.stripe != stripe:
        was, now = ", ".join(saved.files), ", ".join(map(str, paths))
        what = f"the saved run is striped over {was} by {saved.stripe} bytes, not over {now} by {stripe}"
        raise _kept(what, "name the same folders in offload.dir, in the same order")


def check_unchanged_run(
    saved: Manifest, fingerprints: Mapping[str, str], *, total_steps: int, settings: Mapping[str, Any] | None = None,
    accepted: bool = False,
) -> tuple[Change, ...]:  # fmt: skip
    """Returns the changes of the recipe that the run goes on with. `settings`: its keys now; `accepted`: a rate, schedule or
    length may be another. Raises UsageError that names every other one, with its old and new value."""
    changes = changed_keys(saved.settings, settings, step=saved.step)
    names = dict.fromkeys((*fingerprints, *saved.fingerprints))
    changed = [name for name in names if saved.fingerprints.get(name) != fingerprints.get(name)]
    if "frozen" in changed and "model" in changed:
        changed.remove("model")  # its stages are laid out by what is frozen
    may = [name for name in changed if may_change(name, of_fingerprint(name, changes))]
    refused = [name for name in changed if not accepted or name not in may]
    if any(name not in may for name in refused):
        raise _changed(saved, refused, may, changes)
    if saved.step > total_steps:
        raise UsageError(
            f"the saved run has done {saved.step} steps, but the recipe asks for {total_steps}",
            hint=f"write train.max_steps={saved.step} or more, or raise train.epochs; `fuyou export` writes the model as it is",
        )
    if refused:
        raise _changed(saved, refused, may, changes)
    unknown = [Change(step=saved.step, key=_CHANGED[name], before=None, now=None) for name in changed if saved.settings is None]
    return (*unknown, *recorded(changes))


def _changed(saved: Manifest, names: Sequence[str], may: Sequence[str], changes: Sequence[Change]) -> UsageError:
    """Makes the error for a recipe that is another one in what fingerprints of these names are of; `may`: those that a run may
    go on with."""
    told = f"the saved run cannot be resumed, because {' and '.join(_CHANGED.get(name, name) for name in names)} changed since "
    told += "it was saved"
    of_these = list({one.key: one for name in names for one in of_fingerprint(name, changes)}.values())
    if of_these:
        told += f": {in_words(of_these)}"
    elif saved.settings is None and any(name in _UNRECORDED for name in names):
        told += " (by a version of fuyou that did not record what the recipe said)"
    if "weights" in names and (files := changed_files(saved)):
        told += f": {name_list(files)}"
    if "data" in names:
        return UsageError(told, hint=_OTHER_DATA.format(" --merged" if "adapter" in saved.fingerprints else ""))
    kept = [name for name in names if name not in may]
    ways = ["add --accept-changes to go on with it"] if not kept else []
    rates = [one.key for one in of_these if is_rate(one)] if kept else []
    if kept and (why := why_kept(kept)):
        told += f"; {why}"
    of_these = [one for one in of_these if one.key not in rates]
    ways.append(f"put it back: {put_back(of_these)}" if of_these else "put back what changed")
    ways[-1] += f" (--accept-changes goes on with {' and '.join(rates)})" if rates else ""
    if kept and saved.settings is None and "optimizer" in kept:
        ways.append("run it once with its old recipe, which is recorded then, and with --accept-changes for another rate")
    return _kept(told, ", or ".join(ways))
