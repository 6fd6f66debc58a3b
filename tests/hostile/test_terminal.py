"""Nothing that came from outside drives the terminal: control, bidirectional and invisible characters are spelt out, in plain
lines, errors, tables and live displays; letters of every script stay."""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from fuyou_cli.cli import console as consoles
from fuyou_cli.cli.app import main
from fuyou_cli.cli.error_screen import report
from fuyou_cli.cli.render.progress import TransferDisplay
from fuyou_cli.cli.render.theme import SafeConsole, column, pairs, ruled, safe, say, show, symbols
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import one_line, printable

from .conftest import Run

C0 = "".join(map(chr, range(1, 32))) + "\x7f"
C1 = "".join(map(chr, range(0x80, 0xA0)))
BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
INVISIBLE = "\u00ad\u200b\u200c\u200d\u2028\u2029\u2060\ufeff"
HOSTILE = C0 + C1 + BIDI + INVISIBLE
LETTERS = "naïve Ελληνικά 模型 العربية हिन्दी 🙂"
RETITLED = "\x1b]0;t\x07"

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

hostile = st.text(st.sampled_from(HOSTILE) | st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


def drives_nothing(written: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in written)


@given(hostile)
def test_text_is_spelt_and_can_be_read_back(text: str) -> None:
    assert one_line(text).isprintable()
    assert [line.isprintable() for line in printable(text).split("\n")].count(False) == 0
    if "\\" not in text and text.isascii():
        assert one_line(text).encode().decode("unicode_escape") == text


def test_letters_of_every_script_stay() -> None:
    assert one_line(LETTERS) == printable(LETTERS) == LETTERS
    assert one_line(RETITLED + "\u202e") == r"\x1b]0;t\x07\u202e"


@given(hostile)
def test_every_way_to_print(text: str) -> None:
    """Prints plain lines, a paragraph, a grid, a table with cells of its own, a bar, and a bare string by Rich."""
    out, err, drawn = io.StringIO(), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        consoles.write_result(text)
        consoles.write_last_result(text)
        consoles.write_document(text)
        consoles.write_status(text)
    console = SafeConsole(file=drawn, width=60, highlight=False, markup=False)
    say(console, text)
    pairs(console, [("name", text)])
    table = ruled(symbols(console))
    column(table, "what", wrap=True)
    table.add_row(Text(text))
    table.add_row(text)
    show(console, table)
    console.print(text, soft_wrap=True)
    console.print(Text(text, style="bold"))
    for written in (out, err, drawn):
        assert drives_nothing(written.getvalue())


def test_styles_still_cover_what_they_did() -> None:
    text = Text.assemble("a", ("b\x1bc", "bold"), "d")
    spelt = safe(text)
    assert spelt.plain == r"ab\x1bcd"
    assert [spelt.plain[span.start : span.end] for span in spelt.spans] == [r"b\x1bc"]
    assert safe(Text("plain")).plain == "plain"


def test_a_bar_of_a_hostile_name_is_drawn() -> None:
    """Draws neither its controls nor what Rich would take for markup of its own."""
    drawn = io.StringIO()
    console = SafeConsole(file=drawn, width=80, force_terminal=True, color_system=None)
    with TransferDisplay(console) as transfers:
        transfers(f"[/red]{RETITLED}", 1, 2)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())  # Rich's own, to move the cursor
    assert "\x1b" not in plain and "\x07" not in plain and r"[/red]\x1b]0;t\x07" in plain


# ---- through the commands --------------------------------------------------------------------------------------------


def recipe(path: Path, **changes: object) -> Path:
    keys: dict[str, object] = {
        "output_dir": "out", "model": {"name_or_path": "tiny"}, "dataset": {"train": [{"path": "rows.jsonl"}]}, **changes,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


@examples(20)
@given(hostile.filter(str.strip), st.sampled_from(["file", "value", "override", "key"]))
def test_validate(text: str, place: str) -> None:
    """Checks a file's own name with a wrong value and an unknown key in it, a right value, a wrong override, an unknown one."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        out, err = io.StringIO(), io.StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        if place == "file":
            named = Path(folder) / (re.sub("[/\0]", "", text)[:40].strip(". ") or "x")
            words = [str(recipe(named, output_dir=text, train={"batch_size": text}, **{f"key{text}": 1}))]
        else:
            others = {"value": "--show-config", "override": f"train.batch_size={text}", "key": f"{text}=1"}
            words = [str(recipe(Path(folder) / "right.yaml", output_dir=text)), others[place]]
        with pytest.raises(SystemExit):
            main(["validate", *words])
        assert drives_nothing(out.getvalue()) and drives_nothing(err.getvalue())


def test_a_config_with_controls_loads_again(run: Run, tmp_path: Path) -> None:
    path = recipe(tmp_path / "recipe.yaml", output_dir=f"out{RETITLED}\u202e{LETTERS}")
    code, out, _ = run("validate", str(path), "--show-config")
    assert code == 0 and drives_nothing(out)
    assert yaml.safe_load(out)["output_dir"] == f"out{RETITLED}\u202e{LETTERS}"


def test_plan_and_finetune(run: Run, tmp_path: Path) -> None:
    """Names of folders with every such character: of the model, the output, the store and the data."""
    name = HOSTILE[:80]
    model = tmp_path / f"model{name}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    changes = {
        "model": {"name_or_path": str(model)},
        "output_dir": f"out{HOSTILE[80:]}",
        "offload": {"dir": f"store{name}", "device": "cpu", "max_memory": {"cpu": "2GiB"}},
        "dataset": {"train": [{"path": f"rows{RETITLED}\n.jsonl"}], "max_seq_len": 64},
        "train": {"max_steps": 2},
    }
    path = str(recipe(tmp_path / "recipe.yaml", **changes))
    code, out, err = run("plan", path, "--dry-run", "-v")
    assert code == 0 and drives_nothing(out) and drives_nothing(err)
    shown = "".join(out.split())
    assert one_line(f"model{name}") in shown and r"rows\x1b]0;t\x07\n.jsonl" in shown
    code, out, err = run("finetune", path)
    assert code == 2 and drives_nothing(out) and drives_nothing(err) and r"\x0b\x0c\r" in err


def test_doctor(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE[:60].replace("/", "")
    folder.mkdir()
    for place in (folder, folder / "absent"):
        _, out, err = run("doctor", "--dir", str(place))
        assert drives_nothing(out) and drives_nothing(err)


def test_unknown_commands_and_options(run: Run) -> None:
    for arguments in ((f"do{RETITLED}",), ("plan", f"--{RETITLED}"), ("validate", f"absent{HOSTILE}.yaml")):
        code, out, err = run(*arguments)
        assert code == 2 and drives_nothing(out) and drives_nothing(err)


# ---- errors --------------------------------------------------------------------------------------------------------------


def test_what_is_quoted_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(UsageError("a\x1b[2J\x07\r\udc80é\nb\tc", hint="d\x9b")) == 2
    assert capsys.readouterr().err == "error: a\\x1b[2J\\x07\\r\\udc80é\n  b\\tc\n  help: d\\x9b\n"
