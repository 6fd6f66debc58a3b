"""Tests what a person is told: place, caret, suggestion; everything at once; no traceback whatever the input."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fuyou_cli.recipe.diagnostics import RecipeErrors
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.rules import ALIASES, known_keys, suggest_key


def test_the_whole_report_as_a_person_sees_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(
        "output_dir: out\nmodel:\n  nmae: tiny\ndataset:\n  train: [{path: x.jsonl}]\n  max_seq_len: 4k\nlr: 2e-5\n"
    )
    with pytest.raises(RecipeErrors) as caught:
        load_recipe("bad.yaml", ["train.epoch=3"])
    assert caught.value.message == (
        "bad.yaml:2:1: error[missing-key]: `model.name_or_path` is missing\n"
        "   |\n"
        " 2 | model:\n"
        "   | ^^^^^\n"
        "  help: write the folder of a model, or its hub id\n"
        "bad.yaml:3:3: error[unknown-key]: unknown key `model.nmae`\n"
        "   |\n"
        " 3 |   nmae: tiny\n"
        "   |   ^^^^\n"
        "  help: did you mean `model.name_or_path`?\n"
        "bad.yaml:6:16: error[wrong-type]: `dataset.max_seq_len`: expected a whole number, got '4k'\n"
        "   |\n"
        " 6 |   max_seq_len: 4k\n"
        "   |                ^^\n"
        "bad.yaml:7:1: error[unknown-key]: unknown key `lr`\n"
        "   |\n"
        " 7 | lr: 2e-5\n"
        "   | ^^\n"
        "  help: `lr` belongs at `optimizer.lr`\n"
        "<command line>: error[unknown-key]: unknown key `train.epoch`\n"
        "    train.epoch=3\n"
        "  help: did you mean `train.epochs`?\n"
        "\n"
        "Found 5 errors in bad.yaml. Nothing was run."
    )


def test_references_are_few(refused):
    """Each may double a text that another has doubled."""
    assert set(refused("x: '" + "${seed}" * 9 + "'\n")) == {"too-large"}


@pytest.mark.parametrize(
    ("text", "key", "code", "line", "column"),
    [
        ("seed: x\n", "seed", "wrong-type", 7, 7),
        ("seed: true\n", "seed", "wrong-type", 7, 7),
        ("seed: -1\n", "seed", "out-of-range", 7, 7),
        ("train: {epochs: 1.5}\n", "train.epochs", "wrong-type", 7, 17),
        ("train: [1]\n", "train", "wrong-type", 7, 8),
        ("train:\n  batch_size: 0\n", "train.batch_size", "out-of-range", 8, 15),
        ("train:\n  batch_size: 200000000\n", "train.batch_size", "out-of-range", 8, 15),
        ("optimizer:\n  betas: [0.9]\n", "optimizer.betas", "out-of-range", 8, 10),
        ("optimizer:\n  betas: [0.9, 1.0]\n", "optimizer.betas[1]", "out-of-range", 8, 16),
        ("optimizer:\n  lr: .inf\n", "optimizer.lr", "wrong-type", 8, 7),
        ("lr_scheduler:\n  name: cosin\n", "lr_scheduler.name", "not-a-choice", 8, 9),
        ("offload:\n  device: no\n", "offload.device", "not-a-choice", 8, 11),
        ("train: {max_time: 8}\n", "train.max_time", "wrong-type", 7, 19),
        ("train: {max_time: 8x}\n", "train.max_time", "wrong-type", 7, 19),
        ("train:\n  max_time: 0h\n", "train.max_time", "out-of-range", 8, 13),
        ("offload: {ssd_write_limit: 0}\n", "offload.ssd_write_limit", "out-of-range", 7, 28),
        ("offload: {max_memory: {cpu: 64}}\n", "offload.max_memory.cpu", "out-of-range", 7, 29),
        ("offload: {ssd_write_limit: '2000'}\n", "offload.ssd_write_limit", "out-of-range", 7, 28),
        ("train: {skip_nonfinite: -1}\n", "train.skip_nonfinite", "out-of-range", 7, 25),
        ("offload: {io: {block_size: 1000}}\n", "offload.io.block_size", "out-of-range", 7, 28),
        ("offload: {io: {block_size: 1TiB}}\n", "offload.io.block_size", "out-of-range", 7, 28),
        ("offload: {io: {queue_depth: 257}}\n", "offload.io.queue_depth", "out-of-range", 7, 29),
        ("train:\n  threads: 100000\n", "train.threads", "out-of-range", 8, 12),
        ("  max_seq_len: 1073741824\n", "dataset.max_seq_len", "out-of-range", 7, 16),
        ("version: 2\n", "version", "not-a-choice", 7, 10),
        ("seed: ???\n", "seed", "missing-key", 7, 7),
        ("seed: ${nothing}\n", "seed", "reference", 7, 7),
        ("seed: ${seed}\n", "seed", "reference", 7, 7),
        ("seed: 1\nseed: 2\n", "seed", "duplicate-key", 8, 1),
        ("train: &t {epochs: x}\n", "syntax", "syntax", 7, 8),
        ("optimizer:\n  <<: {lr: x}\n", "bad-key", "bad-key", 8, 3),
    ],
)
def test_places(refused, text, key, code, line, column):
    found = refused(text)
    assert list(found) == [key]
    shown = found[key].as_dict()
    assert (shown["code"], shown["line"], shown["column"]) == (code, line, column)


def test_a_key_that_only_the_loader_takes_for_a_number(refused):
    assert "0.0" in refused("0E0: auto\n")


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("train: {epochs: 1\n", 8, 1),
        ("\ttrain: 1\n", 7, 1),
        ("a: 'x\n", 8, 1),
        ("a: b: c\n", 7, 5),
        ("a: *nowhere\n", 7, 4),
        ("a: \a\n", 7, 4),
        ("---\na: 1\n", 7, 1),
        ("%\n", 7, 2),
    ],
)
def test_broken_yaml_has_a_place_and_a_snippet(refused, text, line, column):
    found = refused(text)["syntax"]
    assert (found.place.line + 1, found.place.column + 1) == (line, column)
    assert found.place.source is not None
    assert (found.message == "found a tab where YAML allows only spaces") == text.startswith("\t")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("learning_rate", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("dataset.sample_packing", "dataset.packing"),
        ("train.batchsize", "train.batch_size"),
        ("offload.max_memory.ram", "cpu"),
        ("max_steps", "train.max_steps"),
        ("ofload.weights", "offload"),
        ("dataset.train[0].fromat", "dataset.train[0].format"),
    ],
)
def test_suggestions(refused, written, meant):
    found = refused("", f"{written}=1")
    assert all(meant in (diagnostic.help or "") for diagnostic in found.values())


def test_only_choices_that_are_built_are_offered(refused):
    found = refused("optimizer: {state_dtype: fp8}\n", "dataset.train[0].format=csv", "precision.compute=fp8")
    offered = found["dataset.train[0].format"].message + str(found["dataset.train[0].format"].help)
    assert "auto, messages, sharegpt, alpaca, prompt_completion, text, tokenized or input_output" in offered
    assert "float32, bfloat16 or int8" in found["optimizer.state_dtype"].message
    assert "bfloat16 or float32" in found["precision.compute"].message  # no float16


def test_every_alias_leads_to_a_key_there_is():
    assert set(ALIASES.values()) <= set(known_keys())
    for name, key in ALIASES.items():
        assert f"`{key}`" in suggest_key(name, shown_section=""), name
    own = {key.rpartition(".")[2] for key in known_keys()}
    # elsewhere dtype means what computes, here what is exported; type means a data set's format, here an adapter's kind
    assert own & set(ALIASES) == {"dtype", "type"}


def test_what_yaml_makes_of_a_word_is_explained(refused):
    assert "quote" in refused("tokenizer: {pad_token: no}\n")["tokenizer.pad_token"].help
    assert "concat" in refused("", "dataset.packing=true")["dataset.packing"].help
    assert "null" in refused("train: {clip_grad_norm: none}\n")["train.clip_grad_norm"].help
    found = refused('optimizer: {lr: "1e-5"}\ntrain: {max_steps: "five"}\n')
    assert found["optimizer.lr"].help == "write it without quotes" and found["train.max_steps"].help is None


def test_a_missing_file_and_a_folder(tmp_path):
    for path, code in ((tmp_path / "none.yaml", "not-found"), (tmp_path, "unreadable"), (Path("a\0b"), "unreadable")):
        with pytest.raises(RecipeErrors, match=rf"error\[{code}\]: cannot be read"):
            load_recipe(path)


def test_a_drive_that_does_not_give_the_file():
    """Reads a process's own memory at 0, which answers with an I/O error, like a drive that is broken."""
    with pytest.raises(RecipeErrors, match="cannot be read: Input/output error") as refused:
        load_recipe("/proc/self/mem")
    assert "help: " in str(refused.value)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00\x01\x02",
        b"\xff\xfe" + "a: 1".encode("utf-16-le"),
        b"a: \xc3\x28\n",
        b"a: 1\n" * 100_000,
        b"a: 1\n" * 50_000,
        b"".join(b"k%d: 1\n" % i for i in range(9_000)),
        b"- 1\n" * 60_000,
        b"[" * 100_000,
        b"{a: " * 5000,
        b"- " * 20_000,
        b"&a [*a]",
        b"a: &a [1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"b%d: &b%d [%s]\n" % (i, i, b",".join([b"*a" if i == 0 else b"*b%d" % (i - 1)] * 9)) for i in range(9)),
        b"".join(b"b%d: &b%d [%s]\n" % (i, i, b"1" if i == 0 else b"*b%d" % (i - 1)) for i in range(3000)),
        b"a: !!python/object/apply:os.system [false]",
        b'a: "\\UFFFFFFFF"',
        b'a: "\\ud800"',
        b"a: 0x_",
        b"a: " + b"9" * 5000,
        b"seed: 0x" + b"f" * 9000,
        b"a: ${a}",
        b"a: {b: ${a}}",
        b"a: '${'",
        b"a: ${oc.decode:'{'}",
        b"\n".join(b'k%d: "${k%d}${k%d}"' % (i, i + 1, i + 1) for i in range(60)) + b"\nk60: xxxxxxxx",
        b"? [a, b]\n: 1",
        b"1: 2\ntrue: 3\nnull: 4",
        b"<<: 3",
        b"5",
        b"just words",
        b"\xef\xbb\xbf",
        b"a: 2020-99-99\nb: 1:99:99",
        b"a\x1b[31m: 1",
    ],
)
def test_hostile_input_is_refused_quickly_and_in_words(tmp_path, raw):
    path = tmp_path / "hostile.yaml"
    path.write_bytes(raw)
    start = time.process_time()
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(path)
    assert time.process_time() - start < 5
    assert len(caught.value.message) < 20_000
    assert "\x1b" not in caught.value.message


def test_escape_sequences_in_a_source_line_are_not_sent_to_the_terminal(errors):
    assert "\x1b" not in RecipeErrors(errors('"a\\e[31m": 1\n').diagnostics, name="x\x1b[31m").message


def test_carets_stand_under_wide_characters_and_long_lines_are_cut_around_them(errors):
    source, carets = errors("tokenizer: {chat_template: 日本, pad: 1}\n").message.splitlines()[2:4]
    assert carets.index("^") == source.index("pad") + 2  # two wide characters before it
    source, carets = errors(f"tokenizer: {{chat_template: {'x' * 5000}, pad: 1}}\n").message.splitlines()[2:4]
    assert len(source) < 120 and source[carets.index("^") :].startswith("pad")


def test_many_errors_are_counted_and_the_first_shown(errors):
    last = errors("".join(f"k{i}: 1\n" for i in range(300))).message.splitlines()[-1]
    assert last.startswith("Found 300 errors in ") and "(260 more not shown)" in last


@pytest.mark.parametrize(
    ("written", "help_"),
    [
        ("learning_rate: 1e-5", "fuyou calls this `optimizer.lr`"),
        ("num_epochs: 3", "fuyou calls this `train.epochs`"),
        ("gradient_accumulation_steps: 8", "fuyou calls this `train.batch_size`: the rows of one optimizer step"),
        ("per_device_train_batch_size: 8", "fuyou calls this `train.micro_batch_size`: the rows computed at once"),
        ("val_set_size: 0.1", "fuyou calls this `dataset.eval_fraction`"),
        ("optim: adamw_torch", "fuyou calls this `optimizer.name`"),
        ("lora_r: 16", "fuyou calls this `adapter.r`"),
        ("adapter: {lora_target: q_proj}", "fuyou calls this `adapter.target_modules`"),
        ("lora_alpha: 16", "`lora_alpha` belongs at `adapter.lora_alpha`"),
        ("checkpoint: {seed: 1}", "`seed` belongs in no section: do not indent it"),
        ("adapter: {rank: 4}", "fuyou calls this `adapter.r`"),
        ("load_in_4bit: true", "fuyou calls this `model.quantize`: nf4 or int8, of the weights below an adapter"),
        ("optimizer: {name: adamw_8bit}", "write `name: adamw` and `optimizer.state_dtype: int8`"),
        ("optimizer: {name: adamw8bit}", "write `name: adamw` and `optimizer.state_dtype: int8`"),
        ("optimizer: {name: Adafactor}", "write `name: adamw` and `optimizer.state_dtype: int8` for small states: a factored"),
        ("optimizer: {name: lion, state_dtype: int8}", "use float32, or `optimizer.name: adamw`"),
        ("lr_scheduler: cosine", "write `lr_scheduler: {name: 'cosine'}`"),
        ("adapter: lora", "write `adapter: {type: 'lora'}`"),
        ("adapter: qlora", "write `adapter: {type: lora}` and `model.quantize: nf4`"),
        ("optimizer: adamw", "write `optimizer: {name: 'adamw'}`"),
    ],
)
def test_what_other_trainers_call_it_names_ours(errors, written, help_):
    assert f"help: {help_}" in errors(written + "\n").message
