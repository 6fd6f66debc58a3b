"""From which commit ranks go on: every pair of what two folders may hold, as real manifests on disk."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.length import writes
from fuyou_cli.training.peers import Place, box_sums, place_of
from fuyou_cli.training.run_log import saved_of
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import saved_store
from fuyou_cli.training.state.manifest import Manifest, RankShare
from fuyou_cli.training.state.recovery import (
    Elsewhere,
    Offer,
    agreed_commit,
    brought_from,
    elsewhere,
    offer_of,
    one_back,
    saved_by_all,
)
from fuyou_cli.training.state.store_folders import remove_elsewhere

K = 5
NUMERICS = Numerics(
    compute_dtype="float32", accumulate_dtype="float32", batch_size=1, micro_batch_size=1, max_seq_len=8, head_chunk_tokens=0,
    torch_threads=1, seed=0,
)  # fmt: skip
SAVED = Manifest(
    run="a", files=("/nowhere/store.bin",), parts=(), companions=(), stripe=4096, store_size=0, state="committed", step=0,
    written_total=0, model_dir="", architecture="", compute_dtype="float32", numerics=NUMERICS, fingerprints={}, libraries={},
    random={}, stages=(),
)  # fmt: skip


def commit(number: int, rank: int, *, run: str = "a", count: int = 2) -> Manifest:
    """The commit of this number, which is of the step before it: the loaded model is the first."""
    share = RankShare(rank=rank, count=count, owners=(0, 1), commit=number, folders=("/nowhere",) * count)
    return replace(SAVED, run=run, step=max(0, number - 1), share=share)


def make(folder: Path, state: str, rank: int) -> None:
    """Leaves what a rank of a run may leave."""
    folder.mkdir(parents=True)
    newest = {"k-1": K - 1, "k": K, "k+1": K + 1, "damaged": K + 1, "alone": K + 1, "loaded": 1}.get(state)
    if newest is not None:
        if state not in ("alone", "loaded"):
            manifests.write(folder, commit(newest - 1, rank))
        manifests.write(folder, commit(newest, rank), keep=(folder / manifests.NAME).exists())
    if state == "damaged":
        (folder / manifests.NAME).write_text("{")
    if state == "loading":
        manifests.write(folder, replace(commit(0, rank), state="loading"))


def offered(folder: Path, rank: int) -> Offer:
    """What a rank offers, as it finds it (`resume.find_saved`)."""
    newest, _ = manifests.newest(folder)
    saved = None if newest is None or newest.state == "loading" else newest
    return offer_of(saved, folder, rank=rank, host=f"box{rank}")


# by pairs of states, in either order: the commit that both go on from, None to begin anew, or what the error names
EXPECTED = {
    ("k", "k"): K,
    ("k", "k+1"): K,
    ("k", "damaged"): K,  # its newest manifest cannot be read: it holds k as the one before
    ("k+1", "k+1"): K + 1,
    ("k+1", "damaged"): K,
    ("damaged", "damaged"): K,
    ("k-1", "k"): K - 1,
    ("k-1", "k-1"): K - 1,
    ("k-1", "k+1"): ("after step 5", "after step 3"),  # two apart: not of one moment
    ("k-1", "damaged"): ("after step 4", "after step 3"),  # the one before k is gone with the manifest that replaced it
    ("alone", "k+1"): K + 1,
    ("alone", "alone"): K + 1,
    ("alone", "k"): ("after step 5", "after step 4"),  # the one before is not there
    ("alone", "damaged"): ("after step 5", "after step 4"),
    ("alone", "k-1"): ("after step 5", "after step 3"),
    ("gone", "gone"): None,
    ("loading", "loading"): None,
    ("gone", "loading"): None,
    ("loaded", "gone"): None,  # nothing was trained yet
    ("loaded", "loading"): None,
    ("loaded", "loaded"): 1,
    ("loaded", "k"): ("after step 4", "after step 0"),
}
GONE = {(state, gone) for state in ("k-1", "k", "k+1", "damaged", "alone") for gone in ("gone", "loading")}
STATES = ("k-1", "k", "k+1", "damaged", "alone", "gone", "loading", "loaded")


@pytest.mark.parametrize(("one", "other"), [*product(STATES, STATES)])
def test_pair_of_local_states(tmp_path: Path, one: str, other: str) -> None:
    for rank, state in enumerate((one, other)):
        make(tmp_path / f"x.r{rank}", state, rank)
    offers = [offered(tmp_path / f"x.r{rank}", rank) for rank in range(2)]
    if (one, other) in GONE or (other, one) in GONE:
        lost = 1 if (one, other) in GONE else 0
        with pytest.raises(UsageError, match=rf"x\.r{lost} \(rank {lost} on box{lost}\) holds no saved state"):
            agreed_commit(offers)
        return
    expected = EXPECTED.get((one, other), EXPECTED.get((other, one), "two apart"))
    if isinstance(expected, tuple | str):
        with pytest.raises(UsageError) as error:
            agreed_commit(offers)
        for words in expected if isinstance(expected, tuple) else (r"rank 0 on box0", "rank 1 on box1"):
            assert words in error.value.message
        return
    assert agreed_commit(offers) == expected
    for rank in range(2) if expected is not None else ():
        goes_back(tmp_path / f"x.r{rank}", expected)


def goes_back(folder: Path, expected: int | None) -> None:
    """A rank finds the commit in its folder, and is at it once it has gone back."""
    saved = saved_store(folder)
    found = saved if saved.manifest.commit == expected else one_back(saved)
    assert found.manifest.commit == expected
    found.check_current()
    if found.problem:
        manifests.go_back(folder, found.manifest)
    assert manifests.newest(folder) == (found.manifest, "")


def test_every_rank_counts(tmp_path: Path) -> None:
    for rank, state in enumerate(("k+1", "k+1", "k")):
        make(tmp_path / str(rank), state, rank)
    offers = [replace(offered(tmp_path / str(rank), rank), count=3) for rank in range(3)]
    assert agreed_commit(offers) == K


def test_other_runs_and_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "0", "k", 0)
    make(tmp_path / "1", "k", 1)
    first, second = (offered(tmp_path / str(rank), rank) for rank in range(2))
    with pytest.raises(UsageError, match=r"1 \(rank 1 on box1\) holds another run than"):
        agreed_commit([first, replace(second, run="b")])
    empty = Offer(rank=2, host="box2", folder="somewhere")
    with pytest.raises(UsageError, match="trained by 2 ranks, not by 3 ranks") as error:
        agreed_commit([first, second, empty])
    assert error.value.hint is not None and error.value.hint.startswith("N was 2: run with --nproc 2, or use")


# ---- another number of ranks ------------------------------------------------------------------------------------------

# What a folder of the new number of ranks may hold, as `Offer` tells it. Another number has saved step 4 of run a at 100 s.
THERE = Elsewhere(folder="x", written=100.0, run="a", step=4)
HERE: dict[str, dict[str, object]] = {
    "gone": {},
    "being brought": {"run": "a", "written": 120.0},
    "brought": {"run": "a", "written": 120.0, "step": 4, "commit": 1},
    "gone on since": {"run": "a", "written": 130.0, "step": 6, "commit": 3},
    "saved before": {"run": "a", "written": 90.0, "step": 2, "commit": 3},  # and not removed since
    "given up": {"run": "b", "written": 90.0, "step": 9, "commit": 10},
    "given up while loaded": {"run": "b", "written": 90.0},
    "started over": {"run": "b", "written": 120.0, "step": 1, "commit": 2},
    "being started over": {"run": "b", "written": 120.0},
}
STAYS = ("gone on since", "started over", "being started over")


@pytest.mark.parametrize(("one", "other"), [*product(HERE, HERE)])
@pytest.mark.parametrize("sees", [(True, True), (True, False), (False, True)])
def test_state_of_another_number_of_ranks(one: str, other: str, sees: tuple[bool, bool]) -> None:
    """It is brought wherever not all ranks have it, or one of a later moment, in their own folders. A rank may not see it."""
    offers = [
        Offer(rank=rank, host="", folder="", elsewhere=THERE if sees[rank] else None, **HERE[here])  # type: ignore[arg-type]
        for rank, here in enumerate((one, other))
    ]
    stays = one in STAYS or other in STAYS or (one, other) == ("brought", "brought")
    assert brought_from(offers) == (None if stays else THERE)


def saved_by(folder: Path, counts: dict[int, str]) -> Path:
    """Leaves, for each number of ranks, what they may leave of one run in folders that name one another."""
    for number, (count, state) in enumerate(counts.items()):
        folders = [folder / f"run.r{rank}of{count}" for rank in range(count)] if count > 1 else [folder / "run"]
        for rank, place in enumerate(folders):
            share = RankShare(rank=rank, count=count, owners=(0,) * count, commit=K, folders=tuple(map(str, folders)))
            files, beside = (str(place / "store.bin"),), tuple(str(place / name) for name in manifests.BESIDE)
            saved = replace(SAVED, step=K, files=files, companions=beside, share=share if count > 1 else None)
            if state == "loading" or (state == "half" and rank == count - 1):
                saved = replace(saved, state="loading")
            place.mkdir()
            if state != "lost" or rank < count - 1:
                manifests.write(place, saved)
                os.utime(place / manifests.NAME, (100.0 + number, 100.0 + number))
    return folder / "run"


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({1: "saved"}, None),
        ({2: "saved"}, "run.r0of2"),
        ({2: "saved", 4: "saved"}, "run.r0of4"),
        ({4: "saved", 2: "saved"}, "run.r0of2"),
        ({2: "saved", 4: "loading"}, "run.r0of2"),
        ({2: "saved", 4: "half"}, "run.r0of2"),  # killed while some had committed what was brought
        ({4: "half"}, None),
        ({2: "saved", 4: "lost"}, "run.r0of4"),  # which is then refused by the name of what is lost
    ],
)
def test_newest_whole_state_of_other_numbers_is_chosen(tmp_path: Path, counts: dict[int, str], found: str | None) -> None:
    seen = elsewhere(saved_by(tmp_path, counts))
    assert (None if seen is None else Path(seen.folder).name) == found
    assert seen is None or bool(seen.problem) == ("lost" in counts.values())
    if seen is not None and seen.problem:
        with pytest.raises(UsageError, match=r"run\.r3of4"):
            saved_by_all(None, None, tmp_path / "run")


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({2: "saved"}, "run.r0of2"),
        ({1: "saved", 2: "saved"}, "run.r0of2"),
        ({2: "saved", 1: "loading"}, "run.r0of2"),  # one process was killed while it brought the state
    ],
)
def test_an_output_folder_without_a_log_knows_its_store(tmp_path: Path, counts: dict[int, str], found: str) -> None:
    (tmp_path / "store").mkdir()
    saved_by(tmp_path / "store", counts)
    assert saved_of(tmp_path) == tmp_path / "store" / found
    (tmp_path / "store" / "other").mkdir()
    manifests.write(tmp_path / "store" / "other", SAVED)
    assert saved_of(tmp_path) is None


def test_what_was_brought_is_removed_where_it_was(tmp_path: Path) -> None:
    """Of the same run and no later step only."""
    folder = saved_by(tmp_path, {1: "saved", 2: "saved", 3: "loading"})
    ahead = saved_store(tmp_path / "run.r0of2").manifest
    manifests.write(tmp_path / "run.r0of2", replace(ahead, step=K + 1), keep=True)  # one commit ahead of rank 1
    remove_elsewhere(folder, "another", K, also=(), say=print)
    remove_elsewhere(folder, "a", K - 1, also=(), say=print)
    assert len(list(tmp_path.iterdir())) == 6
    remove_elsewhere(folder, "a", K, also=(), say=print)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_removal_that_ends_early_leaves_no_rank_ahead(tmp_path: Path) -> None:
    """Of two ranks, the second a commit ahead, the first is removed and the second is not: they go on from what was brought."""
    folder = saved_by(tmp_path, {1: "saved", 2: "saved"})
    ranks = [tmp_path / f"run.r{rank}of2" for rank in range(2)]
    (ranks[1] / "store.bin").touch()
    os.link(ranks[1] / "store.bin", tmp_path / "a second name")  # so it is left alone
    ahead = saved_store(ranks[1]).manifest
    manifests.write(ranks[1], replace(ahead, step=K + 1), keep=True)
    said = list[str]()
    remove_elsewhere(folder, "a", K, also=(), say=said.append)
    assert not ranks[0].exists() and ranks[1].exists() and len(said) == 1, said
    offers = [
        offer_of(None if rank == 0 else saved_store(place).manifest, place, rank=rank, host="")
        for rank, place in enumerate(ranks)
    ]
    source = brought_from(offers)
    assert source is not None and Path(source.folder) == folder and source.step == K


def test_limits_of_writes_are_of_boxes() -> None:
    """Ranks of one box share its limit, and each tells the same of it."""
    told = [(100, 30, 45, 15), (100, 35, 55, 20), (0, 900, 950, 50)]
    (one, other) = box_sums(["a", "a", "b"], told)
    assert (one, other) == ((100, 65, 100, 35), (None, 900, 950, 50))
    assert writes(*one) is None and writes(*other) is None
    assert "65 B were written" in (writes(99, 65, 100, 35) or "")


# ---- environments ------------------------------------------------------------------------------------------------------

WHOLE = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "box", "MASTER_PORT": "29500"}


def test_a_whole_environment_is_joined() -> None:
    assert place_of(WHOLE) == Place(rank=1, count=3, local=0, address="box", port=29500)
    assert place_of({**WHOLE, "RANK": "0", "WORLD_SIZE": "1"}) is None, "one process is not several"
    for alone in ({}, {"MASTER_ADDR": "box"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"NNODES": "1"}):
        assert place_of(alone) is None


@pytest.mark.parametrize("left_out", WHOLE)
def test_half_an_environment_is_told_what_lacks(left_out: str) -> None:
    with pytest.raises(UsageError, match=rf"but not {left_out}$") as error:
        place_of({name: value for name, value in WHOLE.items() if name != left_out})
    assert error.value.hint is not None and "torchrun --nnodes 2" in error.value.hint


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 processes"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "a script for torchrun has started 2 processes"),
        ({**WHOLE, "RANK": "3"}, "RANK is 3, but WORLD_SIZE is 3"),
        ({**WHOLE, "MASTER_PORT": "65536"}, "MASTER_PORT is 65536, and ports end at 65535"),
        ({**WHOLE, "MASTER_PORT": "http"}, "MASTER_PORT in the environment is no number: http"),
    ],
)
def test_other_tools_are_told_what_to_write(environment: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        place_of(environment)


ORPHAN = """
import os, sys, time
from fuyou_cli.training.peers import watched_launcher
look = watched_launcher(os.environ)
look()
print("began", flush=True)
until = time.monotonic() + float(sys.argv[1])
try:
    while time.monotonic() < until:
        look()
        time.sleep(0.01)
    print("was left")
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("started_by", "watches", "said"),
    [("TORCHELASTIC_RUN_ID", 120.0, "the launcher of this rank is gone"), ("NOBODY", 0.5, "was left")],
)
def test_a_rank_sees_that_its_launcher_is_gone(started_by: str, watches: float, said: str) -> None:
    """A shell starts it, and ends when it has begun. Only of a launcher that is one."""
    words = shlex.join([sys.executable, "-c", ORPHAN, str(watches)])
    launcher = subprocess.Popen(
        ["/bin/sh", "-c", f"{words} & read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, started_by: "1"},
    )  # fmt: skip
    assert launcher.stdin is not None and launcher.stdout is not None
    assert launcher.stdout.readline() == "began\n"
    launcher.stdin.close()
    assert launcher.stdout.read() == f"{said}\n"  # ends when the rank does
    launcher.wait()
