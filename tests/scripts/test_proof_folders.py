"""The proof scripts work in a folder that somebody names: what is in it already is not theirs to remove."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from proof import both_sides
from proof.both_sides import Case, fresh, profile, write_recipe
from proof.setting import RunFailed, Setting
from proof.verdicts import Progress

CASE = Case(shape="1m", budget=1 << 30, steps=1)


def _setting(work: Path) -> Setting:
    return Setting(
        work=work, shape="1m", micro=4, text=work / "text", entry={"path": "rows.jsonl"}, text_name="text",
        progress=Progress(work / "state.jsonl"), results=work,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def made(tmp_path: Path) -> None:
    """Makes a checkpoint, so that none is made later."""
    folder = tmp_path / "models" / "1m"
    folder.mkdir(parents=True)
    (folder / "made").touch()


@pytest.mark.parametrize("name", ["run", "store"])
def test_a_folder_of_somebodys_is_refused(tmp_path: Path, name: str) -> None:
    precious = tmp_path / name / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(RunFailed, match="was not made by these scripts"):
        write_recipe(_setting(tmp_path), CASE)
    assert precious.read_text() == "mine"


def test_own_folders_are_emptied_and_a_recipe_beside_them_is_kept(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    for _ in range(2):
        recipe = write_recipe(_setting(tmp_path), CASE)
        left = tmp_path / "store" / "left"
        assert not left.exists()
        left.touch()
    assert yaml.safe_load(recipe.read_text())["train"]["max_steps"] == 1
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    assert sorted(path.name for path in fresh(tmp_path / "store").iterdir()) == [".fuyou-proof"]


def test_the_machine_is_measured_with_the_keys_of_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = "import sys; sys.exit(sys.argv[1:] != ['bench', 'recipe.yaml', 'adapter.r=8'])"
    monkeypatch.setattr(both_sides, "FUYOU", (sys.executable, "-c", takes))
    monkeypatch.setattr(both_sides, "NOISE_CORES", 1e9)
    with_keys = replace(CASE, overrides=("adapter.r=8",))
    assert "XDG_CACHE_HOME" in profile(_setting(tmp_path), Path("recipe.yaml"), None, with_keys)
    with pytest.raises(RunFailed, match="fuyou bench failed"):
        profile(_setting(tmp_path), Path("recipe.yaml"), None, CASE)
