"""Decides from which commit several ranks go on: the newest that every one of them has.

A commit is durable once all ranks have named it, and until then none writes over what the one before names (`saver.Commits`).
So ranks that ended at any moment are at most one commit apart, and the one ahead goes back by one. Anything else is no moment
of one run, and is refused by the name of the rank and of its folder. Pure, but for reading the manifest before the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UsageError
from ...core.json_files import from_json
from . import manifest as manifests
from .at_rest import SavedStore
from .manifest import Manifest

if TYPE_CHECKING:
    from ..peers import Peers

_GIVE_UP = "or start over with checkpoint.resume=never, which gives the saved state up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Says what one rank's folder holds. `commit`: the newest; None: nothing that was committed."""

    rank: int
    host: str
    folder: str
    run: str = ""
    step: int = 0  # whole steps of the newest commit
    commit: int | None = None
    before: int | None = None  # the commit before the newest, if its manifest is there
    count: int = 0  # ranks that the run had

    @property
    def place(self) -> str:
        return f"{self.folder} (rank {self.rank} on {self.host})"


def offer_of(saved: Manifest | None, folder: Path, *, rank: int, host: str) -> Offer:
    """Returns what a rank offers whose newest manifest is `saved`."""
    empty = Offer(rank=rank, host=host, folder=str(folder))
    if saved is None or saved.share is None:
        return empty
    older = manifests.before(folder, saved)
    return Offer(
        rank=rank,
        host=host,
        folder=str(folder),
        run=saved.run,
        step=saved.step,
        commit=saved.commit,
        before=None if older is None or older.share is None or not older.commit else older.commit,
        count=saved.share.count,
    )


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
            last = next(one for one in saved if one.commit == least)
            raise UsageError(
                f"{offer.place} holds the state after step {offer.step} and not the one before it that {last.place} holds, "
                f"after step {last.step}",
                hint=f"put back folders that were saved together, {_GIVE_UP}",
            )
    return least


def saved_by_all(peers: Peers, saved: SavedStore | None, folder: Path) -> SavedStore | None:
    """Returns the state that this rank goes on from with all others; None: all begin anew. `saved`: its newest."""
    mine = offer_of(None if saved is None else saved.manifest, folder, rank=peers.rank, host=peers.hosts[peers.rank])
    commit = agreed_commit([from_json(Offer, told) for told in peers.all_gather("saved state", asdict(mine))])
    if commit is None or saved is None:
        return None
    return saved if saved.manifest.commit == commit else one_back(saved)


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
        hint=f"N was {was}: {same}, or `fuyou export` writes its model and a new run begins with that, {_GIVE_UP}",
    )


def _ranks(count: int) -> str:
    return "one process" if count == 1 else f"{count} ranks"
