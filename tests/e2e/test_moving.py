"""A state that another number of ranks has saved comes here whole, or stays where it is. All in this process: the stores of two
ranks are made of one process's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.core.errors import DamagedStateError
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import saved_store
from fuyou_cli.training.state.manifest import TENSORS, RankShare
from fuyou_cli.training.state.store_folders import of_rank

from .conftest import NewProject
from .running import loaded_run, run_of, store_of, sums, train


def as_of_two_ranks(alone: Path) -> list[Path]:
    """Makes two stores of one: the first has every second stage, and the other those between."""
    folders = [alone.with_name(alone.name + of_rank(rank, 2)) for rank in range(2)]
    saved = saved_store(alone).manifest
    owners = tuple(number % 2 for number in range(len(saved.stages)))
    nothing = {"params": 0, "trained": 0, "tensors": (), **dict.fromkeys(TENSORS)}
    for rank, folder in enumerate(folders):
        shutil.copytree(alone, folder)
        share = RankShare(rank=rank, count=2, owners=owners, commit=3, folders=tuple(map(str, folders)))
        stages = tuple(
            stage if owner == rank else replace(stage, **nothing)  # type: ignore[arg-type]
            for stage, owner in zip(saved.stages, owners, strict=True)
        )
        named = {
            name: tuple(str(folder / Path(path).relative_to(alone)) for path in getattr(saved, name))
            for name in ("files", "parts", "companions")
        }
        manifests.write(folder, replace(saved, stages=stages, share=share, **named))  # type: ignore[arg-type]
    shutil.rmtree(alone)
    return folders


def spoil(store: Path) -> None:
    """Changes a byte in every page that holds something."""
    with store.open("r+b") as file:
        content = bytearray(file.read())
        for begin in range(0, len(content), 4096):
            content[begin] ^= any(content[begin : begin + 4096])
        file.seek(0)
        file.write(content)


@pytest.mark.parametrize("verifies_reads", [True, False])
def test_the_source_stays_until_the_target_was_read(verifies_reads: bool, new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": 2, "offload.verify_reads": verifies_reads})
    losses, alone = train(project)
    whole, folders = sums(alone), as_of_two_ranks(alone)
    with run_of(project) as run, pytest.raises(DamagedStateError, match="does not read back as it was written: ") as error:
        run.load(lambda size: spoil(run.store.paths[0]))
    assert error.value.hint is not None and error.value.hint.startswith("nothing is removed where it was")
    assert all((folder / manifests.NAME).exists() for folder in folders)
    with loaded_run(project) as run:
        assert run.step == 2 and run.losses == losses
    assert store_of(project) == alone and sums(alone) == whole
    assert not any(folder.exists() for folder in folders)
