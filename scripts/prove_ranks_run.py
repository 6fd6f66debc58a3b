#!/usr/bin/env python3
"""Kills, freezes and starts again the ranks of one model: they end as one process does, and none outlives its peers.

    python scripts/prove_ranks_run.py --work DIR
    200 kills and 10 frozen ranks: an hour on two cores; to try the script itself: --kills 6 --frozen 1

Two ranks train a run of 60 tiny steps, each committed. At a random moment one of them, or both, are killed (SIGKILL), while
they load, train, commit or export. The one that is left must end within five seconds with an error that names the other, or
with the run's own end. The folders of both must then hold a commit that both have. The same command goes on, and is killed
again. Each run that comes to its end must have the states, losses and export of one process, to the last bit. A rank that is
frozen (SIGSTOP) is found after `train.peer_timeout`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import crashes
from proof.nursery import Child, Ended, Nursery
from proof.setting import Lost, Setting, fresh, lost_row, parser, run_script
from proof.tiny_runs import Place, placed
from proof.verdicts import holds

from fuyou_cli.training.run_log import read_log
from fuyou_cli.training.state import manifest as manifests

RANKS = 2
ENDS = 5.0  # seconds in which a rank ends that has lost a peer
FROZEN = 6  # seconds of `train.peer_timeout` where a rank is frozen
EACH = 10  # kills of one run
AT_ONCE = 20  # kills that are kept together
CHANGES = {"train.clip_grad_norm": 0.5}


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--frozen", type=int, default=10)
    options.add_argument("--seed", type=int, default=1)
    return options.parse_args()


@dataclass(slots=True)
class Tally:
    kills: int = 0
    runs: int = 0
    apart: int = 0  # times that ranks were found one commit apart
    slowest: float = 0.0  # seconds until a rank had ended that lost its peer


class Pair:
    """Starts both ranks of a run, each from a nursery of its own."""

    def __init__(self, place: Place, second: Nursery) -> None:
        self.place, self._nurseries = place, (place.nursery, second)

    def begin(self, recipe: Path) -> list[Child]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {**self.place.environment, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words, folder = ["finetune", str(recipe)], recipe.parent
        return [
            nursery.begin(words, folder=folder, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, nursery in enumerate(self._nurseries)
        ]


@contextmanager
def paired(folder: Path) -> Iterator[Pair]:
    with placed(folder) as place:
        other = folder / "second"
        other.mkdir()
        with Nursery(folder=other, environment=place.environment, models=[(place.model, 2, 32)]) as second:
            yield Pair(place, second)


def stores(recipe: Path) -> list[Path]:
    return sorted(path.parent for path in recipe.parent.rglob(manifests.NAME))


def ending(recipe: Path) -> dict[str, Any]:
    """What a run has left, of however many ranks: the checksum of each tensor by its stage, its losses and its export."""
    sums = {}
    for store in stores(recipe):
        saved = manifests.read(store)
        assert saved is not None
        sums |= {f"{stage.name} {name}": extent.sum for stage in saved.stages for name, extent in stage.extents()}
    steps = {line["step"]: line["loss"] for line in read_log(recipe.parent / "out" / "log.jsonl") if line["event"] == "step"}
    return {"sums": sums, "losses": steps, "export": crashes.exported(recipe)}


def check_commits(recipe: Path, tally: Tally) -> None:
    """Raises Lost unless both folders hold a commit that is the same, or nothing was committed by both yet."""
    offers = []
    for store in stores(recipe):
        newest, _ = manifests.newest(store)
        assert newest is not None
        older = manifests.before(store, newest)
        offers.append({newest.commit, *([] if older is None else [older.commit])} - {0})
    if len(offers) < RANKS or not all(offers):
        return
    tally.apart += len({max(one) for one in offers}) > 1
    if not set.intersection(*offers):
        raise Lost(f"{recipe}: no commit that all ranks have: {offers}")


def survive(children: list[Child], lost: set[int], seconds: float, tally: Tally) -> list[Ended]:
    """Waits for the ranks. Those that were not disturbed end in time, well or with an error that names another."""
    begun = time.monotonic()
    for rank, child in enumerate(children):
        if rank not in lost and not child.is_over(max(0.0, begun + seconds - time.monotonic())):
            raise Lost(f"rank {rank} still runs {seconds:g} s after its peer was lost")
    tally.slowest = max(tally.slowest, time.monotonic() - begun) if len(lost) < len(children) else tally.slowest
    for rank in lost:
        children[rank].kill()
    ends = [child.wait() for child in children]
    for rank, end in enumerate(ends):
        if rank not in lost and end.code not in (0, 1):
            raise Lost(f"rank {rank}: exit code {end.code}\n{end.text}")
        named = ("was lost", "is gone")  # by the first rank; another one says so in its log
        if rank == 0 and rank not in lost and end.code == 1 and not any(words in end.text for words in named):
            raise Lost(f"rank {rank} does not name the rank that was lost\n{end.text}")
    return ends


def kill_some(pair: Pair, whole: dict[str, Any], seconds: float, *, kills: int, seed: int) -> Tally:
    draw, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        recipe = pair.place.recipe(f"seed{seed}-{tally.runs}", CHANGES)
        for _ in range(min(EACH, kills - tally.kills)):
            children = pair.begin(recipe)
            if children[0].is_over(draw.uniform(0, seconds)):
                for child in children:
                    _check(child.wait(), recipe)
                break
            lost = draw.choice(({0}, {1}, {0, 1}))
            for rank in lost:
                children[rank].send(signal.SIGKILL)
            survive(children, lost, ENDS, tally)
            tally.kills += 1
            check_commits(recipe, tally)
        for child in pair.begin(recipe):
            _check(child.wait(), recipe)
        if (ours := ending(recipe)) != whole:
            unlike = [name for name in whole if ours[name] != whole[name]]
            raise Lost(f"{recipe}: {', '.join(unlike)} are not those of one process")
        tally.runs += 1
        shutil.rmtree(recipe.parent)
    return tally


def freeze_some(pair: Pair, seconds: float, *, count: int, seed: int) -> Tally:
    draw, tally = random.Random(seed), Tally()
    for number in range(count):
        recipe = pair.place.recipe(f"frozen{number}", {**CHANGES, "train.peer_timeout": f"{FROZEN}s"}, steps=5000)
        children = pair.begin(recipe)
        time.sleep(seconds / 2 + draw.uniform(0, seconds))
        rank = draw.randrange(RANKS)
        children[rank].send(signal.SIGSTOP)
        survive(children, {rank}, FROZEN + ENDS, tally)
        tally.kills += 1
        check_commits(recipe, tally)
        shutil.rmtree(recipe.parent)
    return tally


def _check(end: Ended, recipe: Path) -> None:
    if end.code != 0:
        raise Lost(f"{recipe}: exit code {end.code}\n{end.text}")


def prove(setting: Setting, options: argparse.Namespace) -> int:
    rows = []
    with paired(fresh(setting.work / "ranks")) as pair:
        one = pair.place.recipe("one", CHANGES)
        _check(pair.place.begin("finetune", one).wait(), one)
        whole = ending(one)
        two = pair.place.recipe("two", CHANGES)
        begun = time.monotonic()
        for child in pair.begin(two):
            _check(child.wait(), two)
        seconds = time.monotonic() - begun
        if ending(two) != whole:
            raise Lost("two ranks that nobody kills do not end as one process")

        def some(kills: int, seed: int) -> Tally:
            return kill_some(pair, whole, seconds, kills=kills, seed=seed)

        result = setting.in_parts("kills", options.kills, AT_ONCE, options.seed, some, Tally(), longest="slowest")
        what = "kills of one rank or both, after which all end as one process"
        if result.get("failed"):
            rows.append(lost_row(what, f"{options.kills}", result))
        else:
            note = f"{result['apart']} times one commit apart; a rank left alone ended in {result['slowest']:.1f} s"
            made = result["kills"]
            rows.append(holds(what, f"{options.kills}", f"{made}", made >= options.kills, note=note, values=result))

        def frozen() -> dict[str, Any]:
            return asdict(freeze_some(pair, seconds, count=options.frozen, seed=options.seed))

        result = setting.attempt(f"{options.frozen} frozen", frozen)
        what = f"frozen ranks, found in {FROZEN + ENDS:g} s"
        if result.get("failed"):
            rows.append(lost_row(what, f"{options.frozen}", result))
        else:
            found = result["kills"]
            note = f"slowest {result['slowest']:.1f} s"
            rows.append(holds(what, f"{options.frozen}", f"{found}", found >= options.frozen, note=note, values=result))
    settings = {"kills": options.kills, "frozen": options.frozen, "seed": options.seed, "ranks": RANKS}
    return setting.conclude(f"prove_ranks_run-{options.seed}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
