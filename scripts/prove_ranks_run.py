#!/usr/bin/env python3
"""Kills, freezes and starts again the ranks of one model: they end as one process does, and none outlives its peers.

    python scripts/prove_ranks_run.py --work DIR
    200 kills, 20 full drives and 10 frozen ranks: an hour on two cores; to try it: --kills 6 --full 2 --frozen 1

Two ranks train a run of 60 tiny steps, each committed. They are killed (SIGKILL) while they load, train, commit or export: one
or both at a random moment, one at a random call on its files, which most often is inside a commit, or the launcher of
`--nproc 2`, alone or with a rank. Whoever is left must end within five seconds, a rank with an error that names the other, or
with the run's own end. What all ranks had committed must still be whole. The same command goes on, and is killed again; now and
then one process goes on in place of two, or two in place of one, which bring the state from the stores before, and are killed
too, most often at a call on files while they do. Each run that comes to its end must have the states, losses, export and best
weights of one process, to the last bit. Where no launcher started the ranks, nobody can
tell one that still waits for the others that they never come: the proof ends it by SIGTERM then, as torchrun would.

A rank whose drive is full from a random call on ends, and the other with it, as above. One that is frozen (SIGSTOP) is found
after `train.peer_timeout`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import crashes
from proof.nursery import Child, Ended, Nursery
from proof.setting import Lost, Setting, fresh, lost_row, parser, run_script
from proof.shim import Call, Trace, build, preloaded
from proof.tiny_runs import Place, placed
from proof.verdicts import holds

from fuyou_cli.training.run_log import read_log
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.store_folders import rank_count

RANKS = 2
ENDS = 5.0  # seconds in which a rank ends that has lost a peer
JOINS = 30.0  # the same while ranks begin
FROZEN = 6  # seconds of `train.peer_timeout` where a rank is frozen
EACH = 10  # kills of one run
AT_ONCE = 20  # kills that are kept together
WAYS = ("moment", "moment", "call", "call", "launcher", "one process", "move", "move")  # one is drawn for each kill
FOR_EVER = 10**9
CHANGES = {
    "train.clip_grad_norm": 0.5, "dataset.eval_fraction": 0.1, "export.dtype": "bfloat16",
    "eval": {"every_steps": 5, "keep_best": True},
}  # fmt: skip


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--full", type=int, default=20, help="drives of one rank that are full")
    options.add_argument("--frozen", type=int, default=10)
    options.add_argument("--seed", type=int, default=1)
    return options.parse_args()


@dataclass(slots=True)
class Tally:
    kills: int = 0
    runs: int = 0
    apart: int = 0  # times that ranks were found one commit apart
    by_call: int = 0  # kills at a call on files
    launchers: int = 0  # that were killed
    alone: int = 0  # kills of one process in place of two
    moving: int = 0  # kills while the state of another number of processes was brought
    joining: int = 0  # survivors that had not joined yet, and ended when they were told to
    slowest: float = 0.0  # seconds until a rank had ended that lost its peer


class Pair:
    """Starts both ranks of a run, each from a nursery of its own."""

    def __init__(self, place: Place, second: Nursery) -> None:
        self.place, self._nurseries = place, (place.nursery, second)
        self.calls = 1  # of a rank on its files in a whole run, about
        self.moves: dict[int, range] = {}  # by how many processes go on: a process's calls on files while it brings a state

    def trace(self, recipe: Path) -> Trace:
        return Trace(self.place.folder / "ranks.trace", recipe.parent)

    def launched(self, recipe: Path) -> Child:
        return self.place.begin("finetune", recipe, "--nproc", str(RANKS))

    def begin(self, recipe: Path, *, rank_with: int = -1, seen: dict[str, str] | None = None) -> list[Child]:
        """`seen`: more of the environment of rank `rank_with`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {**self.place.environment, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words, folder, children = ["finetune", str(recipe)], recipe.parent, list[Child]()
        for rank, nursery in enumerate(self._nurseries):
            more = seen if seen and rank == rank_with else {}
            environment = {**common, **more, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(nursery.begin(words, folder=folder, environment=environment))
        return children


@contextmanager
def paired(folder: Path) -> Iterator[Pair]:
    with placed(folder) as place:
        other = folder / "second"
        other.mkdir()
        environment = preloaded(place.environment, build(folder))
        with Nursery(folder=other, environment=environment, models=[(place.model, 2, 32)]) as second:
            yield Pair(place, second)


def learn_moves(pair: Pair, recipe: Path) -> None:
    """Sees which calls of a process bring a state: what two ranks have trained goes to one process, and back."""
    for count in (1, RANKS):
        trace = pair.trace(recipe)
        if count == 1:
            children = [pair.place.begin("finetune", recipe, trace=trace)]
        else:
            children = pair.begin(recipe, rank_with=0, seen=trace.environment())
        for child in children:
            _check(child.wait(), recipe)
        calls = [number for number, call in enumerate(trace.calls(), start=1) if _is_of_move(call, count)]
        pair.moves[count] = range(calls[0], calls[-1] + 1)


def _is_of_move(call: Call, count: int) -> bool:
    """Tells whether a call writes a manifest that is loaded into, or removes a store of another number of processes."""
    folder = Path(call.file).parent
    if call.what == "unlink":
        return call.file.endswith("store.bin") and rank_count(folder) != count
    return call.what == "create" and folder.parent.name == "store"


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
    return {"sums": sums, "losses": steps, "export": crashes.exported(recipe), "best": best(recipe)}


def best(recipe: Path) -> dict[str, str]:
    """Returns digests of the best weights, without what their files begin with, which names the run."""
    contents = {file.name: file.read_bytes() for file in (recipe.parent / "out" / "best").glob("*.safetensors")}
    return {
        name: hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
        for name, content in contents.items()
    }


def committed(recipe: Path, tally: Tally) -> int:
    """Returns the step of the newest commit that all ranks have, of however many; -1: nothing was committed by all."""
    found: dict[int, list[dict[int, int]]] = {}
    for store in stores(recipe):
        newest, _ = manifests.newest(store)
        assert newest is not None
        both = [one for one in (newest, manifests.before(store, newest)) if one is not None and one.state == "committed"]
        found.setdefault(rank_count(store), []).append({one.commit or one.step: one.step for one in both})
    steps = [-1]
    for count, commits in found.items():
        common = set.intersection(*map(set, commits))
        if len(commits) == count:
            tally.apart += count > 1 and len({max(one, default=0) for one in commits}) > 1
            steps += [commits[0][commit] for commit in common]
    return max(steps)


def killed(pair: Pair, recipe: Path, draw: random.Random, seconds: float, tally: Tally) -> bool:
    """Kills a run in a way that is drawn. False: it came to its end before."""
    way = draw.choice(WAYS)
    if way == "one process":
        return _killed_alone(pair.place.begin("finetune", recipe), recipe, draw.uniform(0, seconds), tally)
    if way == "launcher":
        return _killed_launcher(pair.launched(recipe), recipe, draw, seconds, tally)
    if way == "move":
        return _killed_moving(pair, recipe, draw, tally)
    if way == "call":
        return _killed_at(pair, recipe, draw.randrange(1, pair.calls), draw, tally)
    began, children = time.time(), pair.begin(recipe)
    if children[0].is_over(draw.uniform(0, seconds)):
        for child in children:
            _check(child.wait(), recipe)
        return False
    lost = draw.choice(({0}, {1}, {0, 1}))
    for rank in lost:
        children[rank].send(signal.SIGKILL)
    survive(children, lost, ENDS, tally, has_begun=partial(is_written_since, recipe, began))
    return True


def _killed_at(pair: Pair, recipe: Path, call: int, draw: random.Random, tally: Tally) -> bool:
    """Kills a rank at this call on its files."""
    rank, fault = draw.randrange(RANKS), f"{call}:{call}:kill"
    children = pair.begin(recipe, rank_with=rank, seen=pair.trace(recipe).environment(fault=fault))
    ends = over_together(children, recipe, tally)
    if all(end.code == 0 for end in ends):
        return False
    if ends[rank].code != -signal.SIGKILL:
        raise Lost(f"rank {rank}: exit code {ends[rank].code}\n{ends[rank].text}")
    if ends[1 - rank].code != -signal.SIGTERM:
        _check_survivor(1 - rank, ends[1 - rank])
    tally.by_call += 1
    return True


def _killed_moving(pair: Pair, recipe: Path, draw: random.Random, tally: Tally) -> bool:
    """Goes on with another number of processes than have saved the state, and kills one at a call while it brings that. Where
    nothing is saved yet, it loads."""
    alone = any(rank_count(store) == RANKS for store in stores(recipe))
    call = draw.choice(pair.moves[1 if alone else RANKS])
    if alone:
        trace = pair.trace(recipe)
        end = pair.place.begin("finetune", recipe, trace=trace, fault=f"{call}:{call}:kill").wait()
        is_killed = end.code == -signal.SIGKILL
        if not is_killed:
            _check(end, recipe)
    else:
        is_killed = _killed_at(pair, recipe, call, draw, tally)
    tally.moving += is_killed and len({rank_count(store) for store in stores(recipe)}) > 1
    return is_killed


def is_written_since(recipe: Path, began: float) -> bool:
    """Tells whether the run that began then has joined its ranks: its log is written."""
    log = recipe.parent / "out" / "log.jsonl"
    return log.exists() and log.stat().st_mtime > began


def over_together(children: list[Child], recipe: Path, tally: Tally) -> list[Ended]:
    """Waits until a rank has ended, and for the other, which ends in time."""
    began = time.time()
    while not any(child.is_over(0.05) for child in children):
        pass
    lost = {rank for rank, child in enumerate(children) if child.is_over()}
    return _ended(children, lost, ENDS, tally, partial(is_written_since, recipe, began))


def _ended(children: list[Child], lost: set[int], seconds: float, tally: Tally, has_begun: Callable[[], bool]) -> list[Ended]:
    """Waits for the ranks that are not `lost`, which end in time. One that has not joined yet waits for the others: it ends
    when it is told to."""
    begun, told = time.monotonic(), set[int]()
    for rank, child in enumerate(children):
        if rank in lost or child.is_over(max(0.0, begun + seconds - time.monotonic())):
            continue
        if has_begun():
            raise Lost(f"rank {rank} still runs {seconds:g} s after its peer was lost")
        child.send(signal.SIGTERM)
        told.add(rank)
        if not child.is_over(ENDS):
            raise Lost(f"rank {rank}, which waits for its peer, still runs {ENDS:g} s after SIGTERM")
    if told:
        tally.joining += 1
    elif len(lost) < len(children):
        tally.slowest = max(tally.slowest, time.monotonic() - begun)
    for rank in lost:
        children[rank].kill()
    ends = [child.wait() for child in children]
    return [replace(end, code=-signal.SIGTERM) if rank in told else end for rank, end in enumerate(ends)]


def _killed_alone(child: Child, recipe: Path, after: float, tally: Tally) -> bool:
    if child.is_over(after):
        _check(child.wait(), recipe)
        return False
    child.kill()
    child.wait()
    tally.alone += 1
    return True


def _killed_launcher(launcher: Child, recipe: Path, draw: random.Random, seconds: float, tally: Tally) -> bool:
    """Kills the launcher, or a rank, or both; all that it has started is gone in time."""
    until = time.monotonic() + draw.uniform(seconds / 2, 3 * seconds)  # its ranks import all that a run needs first
    began, ranks = time.time(), list[int]()
    while time.monotonic() < until:
        if launcher.is_over(0.02):
            _check(launcher.wait(), recipe)
            return False
        ranks = ranks_of(launcher.pid) or ranks
    begun, which = time.monotonic(), draw.choice(("launcher", "rank", "both"))
    if which != "launcher" and ranks:
        os.kill(draw.choice(ranks), signal.SIGKILL)
    if which != "rank" or not ranks:
        launcher.send(signal.SIGKILL)
        tally.launchers += 1
    # A launcher looks for ranks that have ended, and then ends the others. Ranks look for it only now and then while they join.
    within = ENDS + 2.0 if is_written_since(recipe, began) else JOINS
    while left := [pid for pid in (launcher.pid, *ranks) if is_there(pid)]:
        if time.monotonic() > begun + within:
            raise Lost(f"processes {left} still run {within:g} s after {which} was killed")
        time.sleep(0.02)
    launcher.wait()
    return True


def ranks_of(launcher: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{launcher}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def is_there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def survive(children: list[Child], lost: set[int], seconds: float, tally: Tally, *, has_begun: Callable[[], bool]) -> None:
    """Waits for the ranks. Those that were not disturbed end in time, well or with an error that names another."""
    for rank, end in enumerate(_ended(children, lost, seconds, tally, has_begun)):
        if rank not in lost and end.code != -signal.SIGTERM:
            _check_survivor(rank, end)


def _check_survivor(rank: int, end: Ended) -> None:
    if end.code not in (0, 1):
        raise Lost(f"rank {rank}: exit code {end.code}\n{end.text}")
    named = ("was lost", "is gone")  # by the first rank; another one says so in its log
    if rank == 0 and end.code == 1 and not any(words in end.text for words in named):
        raise Lost(f"rank {rank} does not name the rank that was lost\n{end.text}")


def kill_some(pair: Pair, whole: dict[str, Any], seconds: float, *, kills: int, seed: int) -> Tally:
    draw, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        recipe, least = pair.place.recipe(f"seed{seed}-{tally.runs}", CHANGES), -1
        for _ in range(min(EACH, kills - tally.kills)):
            if not killed(pair, recipe, draw, seconds, tally):
                break
            tally.kills += 1
            if (step := committed(recipe, tally)) < least:
                raise Lost(f"{recipe}: step {least} was committed by all, and now only {step} is")
            least = step
        for child in pair.begin(recipe):
            _check(child.wait(), recipe)
        if (ours := ending(recipe)) != whole:
            unlike = [name for name in whole if ours[name] != whole[name]]
            raise Lost(f"{recipe}: {', '.join(unlike)} are not those of one process")
        tally.runs += 1
        shutil.rmtree(recipe.parent)
    return tally


def fill_some(pair: Pair, whole: dict[str, Any], *, count: int, seed: int) -> Tally:
    """Lets the drive of one rank be full from a random call on. The same command ends well on a drive that has room."""
    draw, tally = random.Random(seed), Tally()
    while tally.kills < count:
        recipe, rank = pair.place.recipe(f"full{seed}-{tally.runs}", CHANGES), draw.randrange(RANKS)
        trace = pair.trace(recipe)
        children = pair.begin(
            recipe, rank_with=rank, seen=trace.environment(fault=f"{draw.randrange(1, pair.calls)}:{FOR_EVER}:enospc")
        )
        first, *_ = ends = over_together(children, recipe, tally)
        if not {end.code for end in ends} <= {0, 1, 4, -signal.SIGTERM}:  # 4: the drive is full; 1: a peer is lost
            raise Lost(f"rank {rank} with a full drive: exit codes {[end.code for end in ends]}\n{ends[rank].text}")
        if first.code in (1, 4) and f"rank {rank} on" not in first.text and rank > 0:
            raise Lost(f"rank 0 does not name rank {rank}, whose drive is full\n{first.text}")
        tally.kills += 1
        for child in pair.begin(recipe):
            _check(child.wait(), recipe)
        if (ours := ending(recipe)) != whole:
            raise Lost(
                f"{recipe}: {', '.join(name for name in whole if ours[name] != whole[name])} are not those of one process"
            )
        tally.runs += 1
        shutil.rmtree(recipe.parent)
    return tally


def freeze_some(pair: Pair, seconds: float, *, count: int, seed: int) -> Tally:
    draw, tally = random.Random(seed), Tally()
    for number in range(count):
        recipe = pair.place.recipe(f"frozen{number}", {**CHANGES, "train.peer_timeout": f"{FROZEN}s"}, steps=5000)
        began, children = time.time(), pair.begin(recipe)
        time.sleep(seconds / 2 + draw.uniform(0, seconds))
        rank = draw.randrange(RANKS)
        children[rank].send(signal.SIGSTOP)
        survive(children, {rank}, FROZEN + ENDS, tally, has_begun=partial(is_written_since, recipe, began))
        tally.kills += 1
        committed(recipe, tally)
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
        begun, trace = time.monotonic(), pair.trace(two)
        for child in pair.begin(two, rank_with=1, seen=trace.environment()):
            _check(child.wait(), two)
        seconds, pair.calls = time.monotonic() - begun, len(trace.calls())
        if ending(two) != whole or not whole["best"]:
            raise Lost("two ranks that nobody kills do not end as one process")
        learn_moves(pair, two)

        def some(kills: int, seed: int) -> Tally:
            return kill_some(pair, whole, seconds, kills=kills, seed=seed)

        result = setting.in_parts("kills", options.kills, AT_ONCE, options.seed, some, Tally(), longest="slowest")
        what = "kills of one rank or both, after which all end as one process"
        if result.get("failed"):
            rows.append(lost_row(what, f"{options.kills}", result))
        else:
            note = (
                f"{result['by_call']} at a call on files, {result['launchers']} of launchers, {result['alone']} of one process "
                f"in place of two, {result['moving']} inside a move; {result['apart']} times one commit apart; "
                f"{result['joining']} left alone had not joined; others ended in {result['slowest']:.1f} s"
            )
            made = result["kills"]
            rows.append(holds(what, f"{options.kills}", f"{made}", made >= options.kills, note=note, values=result))

        def filled() -> dict[str, Any]:
            return asdict(fill_some(pair, whole, count=options.full, seed=options.seed))

        result = setting.attempt(f"{options.full} full", filled)
        what = "full drives of one rank, after which all end as one process"
        if result.get("failed"):
            rows.append(lost_row(what, f"{options.full}", result))
        else:
            full, note = result["kills"], f"both had ended {result['slowest']:.1f} s after one"
            rows.append(holds(what, f"{options.full}", f"{full}", full >= options.full, note=note, values=result))

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
    settings = {"kills": options.kills, "full": options.full, "frozen": options.frozen, "seed": options.seed, "ranks": RANKS}
    return setting.conclude(f"prove_ranks_run-{options.seed}", rows, settings)


if __name__ == "__main__":
    sys.exit(run_script(arguments(), prove))
