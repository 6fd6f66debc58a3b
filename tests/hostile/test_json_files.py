"""The reader of JSON files: whole, plain, of bounded size and depth, each key once, or refused by name. What is no plain file
is refused by every reader: none waits for the writer of a pipe, or for the end of a device that has none."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core import json_files
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import DEEPEST, MOST_DIGITS, find_object, is_deeper, parsed, read_object
from fuyou_cli.core.paths import read_plain
from fuyou_cli.data.cache import read_template
from fuyou_cli.data.sources import MissingDataError, locate
from fuyou_cli.machine.described import described
from fuyou_cli.recipe.diagnostics import RecipeErrors
from fuyou_cli.recipe.load import load_recipe

from .conftest import Run

LIMIT = 1 << 16


def _nested(depth: int, kind: str = "[]") -> str:
    opening, closing = ("[", "]") if kind == "[]" else ('{"a":', "}")
    return opening * depth + ("" if kind == "[]" else "0") + closing * depth


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON: Expecting value"),
        ('{"a": 1', "not valid JSON: Expecting ',' delimiter"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' occurs twice"),
        ('{"a": 1, "\\u0061": 2}', "the key 'a' occurs twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("[1e999]", "1e999 is too large for a number"),
        ("7" * (MOST_DIGITS + 1), "a number has 301 digits"),
        ("-" + "7" * 100_000, "a number has 100,001 digits"),
        ("0." + "7" * MOST_DIGITS, "a number has 302 characters"),
        (_nested(DEEPEST + 1), "nested too deeply"),
        (_nested(DEEPEST + 1, "{}"), "nested too deeply"),
        (_nested(100_000), "nested too deeply"),
        ('["\\ud800"]', r"\ud800 is half of a character"),
        ('{"\\uDfff": 1}', r"\udfff is half of a character"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(text)
    assert words in refused.value.message and len(refused.value.message) < 500


def test_what_is_taken() -> None:
    assert parsed('{"a": [1, -2.5, true, null, "\\ud83d\\ude42 \\\\ud800"]}') == {"a": [1, -2.5, True, None, "🙂 \\ud800"]}
    assert parsed("7" * MOST_DIGITS) == int("7" * MOST_DIGITS) and math.isfinite(float(parsed("9" * MOST_DIGITS)))
    assert json.dumps(parsed(_nested(DEEPEST))) == _nested(DEEPEST)
    assert parsed("[-Infinity, 1e999]", finite=False) == [-math.inf, math.inf]
    assert parsed(json.dumps(os.fsdecode(b"/a/\xff")), names=True) == os.fsdecode(b"/a/\xff")
    with pytest.raises(UsageError, match="half of a character"):
        parsed('"\\ud800"', names=True)


def test_more_values_than_any_file_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MOST_VALUES", 10)
    assert parsed("[1,2,3]") == [1, 2, 3]
    with pytest.raises(UsageError, match="more than 10 values"):
        parsed("[" + "[]," * 10 + "[]]")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(value=_JSON)
def test_what_python_writes_is_what_is_read(value: object) -> None:
    assert parsed(json.dumps(value)) == value
    assert parsed(json.dumps(value, ensure_ascii=False)) == value


@given(value=_JSON, depth=st.integers(0, 5))
def test_depth_is_counted_as_one_would(value: object, depth: int) -> None:
    def deep(one: object) -> int:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inner is None else 1 + max(map(deep, inner), default=0)

    assert is_deeper(value, depth) == (deep(value) > depth)


def _refusal(path: Path) -> str:
    with pytest.raises(UsageError) as refused:
        read_object(path, limit=LIMIT, hint="what to do")
    assert refused.value.hint == "what to do" and refused.value.exit_code == 2
    return refused.value.message


def test_files_that_are_none(tmp_path: Path) -> None:
    """Refuses a pipe that nobody writes to, which would be waited for, for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, what in ((pipe, "it is a pipe, not a plain file"), (tmp_path, "Is a directory"), (Path("/dev/zero"), "a device")):
        assert _refusal(path).startswith(f"{path}: cannot be read: ") and what in _refusal(path)
    (tmp_path / "loop").symlink_to("loop")
    assert "Too many levels" in _refusal(tmp_path / "loop")
    assert "File name too long" in _refusal(tmp_path / ("x" * 300))
    assert "null byte" in _refusal(tmp_path / "a\0b")
    assert "No such file" in _refusal(tmp_path / "absent")
    assert "Not a directory" in _refusal(_written(tmp_path, b"{}") / "below")
    assert find_object(tmp_path / "absent", limit=LIMIT) is None


def _written(folder: Path, content: bytes) -> Path:
    path = folder / "file.json"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{" + b" " * LIMIT, "is larger than 65,536 bytes"),
        (b'{"a": "\xff"}', "is not valid JSON: not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "is not valid JSON: not UTF-8 at byte 0"),
        (b"\0" * 64, "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"a": 1, "a": 1}', "is not valid JSON: the key 'a' occurs twice"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, content: bytes, words: str) -> None:
    path = _written(tmp_path, content)
    assert _refusal(path).startswith(f"{path}: {words}")


def test_a_linked_file_is_the_file(tmp_path: Path) -> None:
    """Follows a link as in the hub's cache. What may not lead out of a folder is looked at by whoever reads from one."""
    (tmp_path / "link").symlink_to(_written(tmp_path, b'{"a": 1}').name)
    assert read_object(tmp_path / "link", limit=8) == {"a": 1}


def test_a_name_is_told_so_that_a_terminal_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J"
    path.write_text("[]")
    assert "\x1b" not in _refusal(path)


# ---- what is no plain file -----------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(180)  # what it is about waits for ever; a busy machine imports torch for 20 s


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Makes places by what they are: nobody writes to the pipe, and the device never ends."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    listening = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(tmp_path)  # the name of a socket is short
    try:
        listening.bind("socket.jsonl")
    finally:
        os.chdir(here)
        listening.close()
    return {"a pipe": tmp_path / "pipe.jsonl", "a socket": tmp_path / "socket.jsonl", "a device": Path("/dev/zero")}


def test_each_reader_says_what_is_there(places: dict[str, Path]) -> None:
    for what, path in places.items():
        says = f"it is {what}, not a plain file"
        for read in (load_recipe, described, read_template):
            with pytest.raises(UsageError) as refused:
                read(path)
            assert says in refused.value.message and str(path) in refused.value.message
        with pytest.raises(OSError, match=says):
            read_plain(path, limit=1)
        with pytest.raises(UsageError) as refused:
            locate(str(path), "train")
        assert says in refused.value.message and not isinstance(refused.value, MissingDataError)


def test_a_link_to_a_plain_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "link", limit=3) == b"123"
    assert read_plain(tmp_path / "link", limit=9) == b"12345"


def test_a_folder_and_a_large_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeErrors, match="Is a directory"):
        load_recipe(tmp_path)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # nothing of it on the disk
    with pytest.raises(RecipeErrors, match="this is not a recipe: more than"):
        load_recipe(large)
    with pytest.raises(UsageError, match="larger than 4 MiB, so not a template"):
        read_template(large)


def test_every_command_that_reads_a_recipe(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    for command in (
        ("validate",),
        ("plan",),
        ("finetune", "recipe.yaml"),
        ("bench", "recipe.yaml"),
        ("export", "recipe.yaml", "x"),
    ):
        code, _, err = run(*command)
        assert code == 2 and "recipe.yaml: error[unreadable]: cannot be read: it is a pipe, not a plain file" in err, command
