"""Decides from which commit several ranks go on: the newest that every one of them has.

A commit is durable once all ranks have named it, and until then none writes over what the one before names (`saver.Commits`).
So ranks that ended at any moment are at most one commit apart, and the one ahead goes back by one. Anything else is no moment
of one run, and is refused by the name of the rank and of its folder.

A run may go on with another number of ranks. Each number has folders of its own, so the state lies in others then, and is
brought from there (`storage`). The choice is by what all ranks tell of their folders. Pure, but for reading manifests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import FuyouError, UnreadableError, UsageError
from ...core.json_files import from_json
from . import manifest as manifests
from .at_rest import SavedStore, saved_store, whole_store
from .manifest import Manifest
from .store_folders import missing_file, of_any_count, rank_count, refuse_copy, refuse_in_use

if TYPE_CHECKING:
    from ..peers import Peers

_GIVE_UP = "or start over with checkpoint.resume=never, which gives the saved state up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """Says what the folders of another number of ranks hold. `folder`: one of them; `problem`: why not all can be read."""

    folder: str
    written: float  # when its manifest was, in seconds since 1970
    run: str = ""
    step: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Says what one rank's folder holds. `commit`: the newest; None: nothing that was committed."""

    rank: int
    host: str
    folder: str
    run: str = ""
    written: float = 0.0  # as of Elsewhere
    step: int = 0  # whole steps of the newest commit
    commit: int | None = None
    before: int | None = None  # the commit before the newest, if its manifest is there
    count: int = 0  # ranks that the run had
    elsewhere: Elsewhere | None = None  # that this rank can see

    @property
    def place(self) -> str:
        return f"{self.folder} (rank {self.rank} on {self.host})"


def offer_of(saved: Manifest | None, folder: Path, *, rank: int, host: str) -> Offer:
    """Returns what a rank offers that goes on from `saved`, if from anything in its folder."""
    offer = Offer(rank=rank, host=host, folder=str(folder), written=manifests.written_at(folder), elsewhere=elsewhere(folder))
    if saved is None:
        loading, _ = manifests.newest(folder)
        return offer if loading is None else replace(offer, run=loading.run)
    older = manifests.before(folder, saved)
    return replace(
        offer,
        run=saved.run,
        step=saved.step,
        commit=saved.commit,
        before=None if older is None or older.share is None or not older.commit else older.commit,
        count=1 if saved.share is None else saved.share.count,
    )


def elsewhere(folder: Path) -> Elsewhere | None:
    """Returns the newest state that another number of ranks has saved of the run whose folder this is. One that was being
    brought there when its run was killed does not count: it still is where it was."""
    others = [place for place in of_any_count(folder) if rank_count(place) != rank_count(folder)]
    for place in sorted(others, key=manifests.written_at, reverse=True):
        if not (written := manifests.written_at(place)):
            return None
        try:
            newest = saved_store(place).manifest
            if newest.state != "committed" or not newest.step or (whole := whole_store(place).manifest).state != "committed":
                continue
        except UnreadableError:
            raise
        except UsageError as error:
            return Elsewhere(folder=str(place), written=written, problem=error.message)
        return Elsewhere(folder=str(place), written=written, run=whole.run, step=whole.step)
    return None


def brought_from(offers: Sequence[Offer]) -> Elsewhere | None:
    """Returns the folders of another number of ranks that all ranks go on from; None: their own have what there is. A run that
    was started over, or that went on since, counts in place of one that was saved before."""
    newest = max((offer.elsewhere for offer in offers if offer.elsewhere), key=lambda one: one.written, default=None)
    if newest is None:
        return None
    of_run = [offer for offer in offers if offer.run == newest.run]
    if any(offer.run != newest.run and offer.run and offer.written >= newest.written for offer in offers):
        return None
    if any(offer.commit is not None and offer.step > newest.step for offer in of_run):
        return None
    all_have_it = len(of_run) == len(offers) and all(offer.commit is not None and offer.step == newest.step for offer in of_run)
    return None if all_have_it else newest


def agreed_commit(offers: Sequence[Offer]) -> int | None:
    """Returns the commit that all ranks go on from; None: they begin anew. Raises UsageError, the same on every rank.

    Where the run ended before every rank had committed the loaded model, nothing is lost by beginning anew.
    """
    saved = [offer for offer in offers if offer.commit is not None]
    if not saved or (len(saved) < len(offers) and all(offer.step == 0 for offer in saved)):
        return None
    if other := next((offer for offer in saved if offer.count != len(offers)), None):
        raise of_another_count(other.count, folder=other.folder, now=len(offers))
    if gone := next((offer for offer in offers if offer.commit is None), None):
        raise UsageError(
            f"{gone.place} holds no saved state, but {saved[0].place} holds the state after step {saved[0].step}",
            hint=f"mount its drive or put the folder back, {_GIVE_UP}",
        )
    if other := next((offer for offer in saved if offer.run != saved[0].run), None):
        raise UsageError(
            f"{other.place} holds another run than {saved[0].place}",
            hint=f"put back the folders of one run, {_GIVE_UP}",
        )
    least = min(offer.commit for offer in saved if offer.commit is not None)
    for offer in saved:
        if least not in (offer.commit, offer.before):
            last = next(offer for offer in saved if offer.commit == least)
            raise UsageError(
                f"{offer.place} holds the state after step {offer.step} and not the one before it that {last.place} holds, "
                f"after step {last.step}",
                hint=f"put back folders that were saved together, {_GIVE_UP}",
            )
    return least


def saved_by_all(peers: Peers | None, saved: SavedStore | None, folder: Path) -> SavedStore | None:
    """Returns the state that this process goes on from, with all others if there are `peers`; None: all begin anew. `saved`:
    the newest in its own folder."""
    manifest = None if saved is None else saved.manifest
    if peers is None:
        source = brought_from([offer_of(manifest, folder, rank=0, host="")])
        return saved if source is None else _moving(source)
    mine = offer_of(manifest, folder, rank=peers.rank, host=peers.hosts[peers.rank])
    offers = [from_json(Offer, content) for content in peers.all_gather("saved state", asdict(mine))]
    if (source := brought_from(offers)) is not None:
        return _moving_to_all(peers, source)
    commit = agreed_commit(offers)
    if commit is None or saved is None:
        return None
    return saved if saved.manifest.commit == commit else one_back(saved)


def _moving(source: Elsewhere) -> SavedStore:
    """Returns the state in folders of another number of ranks. Raises UsageError where one of them cannot be reached or is in
    use."""
    saved = None if source.problem else whole_store(Path(source.folder))
    if saved is None or saved.manifest.run != source.run:
        what = source.problem or f"{source.folder} holds another run here"
        raise UsageError(
            f"the run has been trained by another number of ranks, and its state cannot be brought here: {what}",
            hint=f"let every box reach the folders of all of them, each at its path; or start as many as before, {_GIVE_UP}",
        )
    for one in saved.shares or (saved,):
        refuse_copy(one.manifest, one.folder)
        refuse_in_use(one.manifest)
        if missing := missing_file(one.manifest):
            raise UsageError(f"the saved run cannot be resumed: {missing}", hint="mount its drive or put the file back")
    return replace(saved, moves=True)


def _moving_to_all(peers: Peers, source: Elsewhere) -> SavedStore:
    """Returns the same for each of all ranks, or raises for all of them what refuses it on one."""
    saved: SavedStore | None = None
    refused: list[str | None] | None = None
    try:
        saved = _moving(source)
    except FuyouError as error:
        refused = [error.message, error.hint]
    for rank, refusal in enumerate(peers.all_gather("state to bring", refused)):
        if refusal is not None:
            raise UsageError(f"{peers.named(rank)}: {refusal[0]}", hint=refusal[1])
    assert saved is not None
    return saved


def one_back(saved: SavedStore) -> SavedStore:
    """Returns the state before the newest one, which not all ranks have."""
    older = manifests.before(saved.folder, saved.manifest)
    assert older is not None, "it was offered"
    return replace(saved, manifest=older, problem=f"not all ranks have the state after step {saved.manifest.step}")


def of_another_count(was: int, *, folder: str, now: int) -> UsageError:
    """Makes the error for a run that other ranks have trained than those that there are now. `was` and `now`: how many."""
    same = f"run with --nproc {was}" if was > 1 else "leave out --nproc"
    return UsageError(
        f"the run saved in {folder} was trained by {_ranks(was)}, not by {_ranks(now)}",
        hint=f"N was {was}: {same}, or use checkpoint.resume=auto, which brings it to any number of ranks, {_GIVE_UP}",
    )


def _ranks(count: int) -> str:
    return "one process" if count == 1 else f"{count} ranks"
