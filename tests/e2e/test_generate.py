"""Tests that `fuyou generate` writes what transformers writes with the same model in memory."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every

from fuyou_cli.cli.app import main
from fuyou_cli.data import sandbox
from fuyou_cli.engine.processor import has_fast_bfloat16

from .conftest import WholeOf, write_llama
from .running import exported

PROMPTS = ["The road", "The road from the mill to the tower takes", "From"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def fuyou(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def in_memory(folder: Path, prompts: Sequence[str], new: int) -> list[str]:
    """Returns what transformers makes of the prompts, padded on the left."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = tokenizer(list(prompts), return_tensors="pt", padding=True)
    found = model.generate(
        input_ids=given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=new, do_sample=False,
        tokenizer=tokenizer,
    )  # fmt: skip
    return [tokenizer.decode(row, skip_special_tokens=True) for row in found[:, given["input_ids"].shape[1] :]]


def test_a_file_a_store_and_one_prompt(whole: WholeOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = whole({"precision.compute": "float32"}), tmp_path / "prompts.jsonl"
    exported(run.store, tmp_path / "out" / "model")
    expected = in_memory(tmp_path / "out" / "model", PROMPTS, 10)
    file.write_text("".join(json.dumps({"prompt": prompt, "number": i}) + "\n" for i, prompt in enumerate(PROMPTS)))
    for source in (tmp_path / "out", run.store):
        assert fuyou("generate", source, "--file", file, "--max-new-tokens", "10") == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["generated"] for row in rows] == expected, source
        assert [(row["prompt"], row["number"]) for row in rows] == list(zip(PROMPTS, range(3), strict=True))
    both = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert fuyou("generate", run.store, *both, "--batch-size", "2", "--max-new-tokens", "10") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["prompt"], row["generated"]) for row in rows] == list(zip(PROMPTS, expected, strict=True))
    assert fuyou("generate", run.store, "--prompt", PROMPTS[1], "--max-new-tokens", "10") == 0
    alone = capsys.readouterr()
    assert alone.out == in_memory(tmp_path / "out" / "model", PROMPTS[1:2], 10)[0] + "\n"
    assert "that is all" in alone.err and "tokens/s" in alone.err
    assert fuyou("generate", run.store, "--prompt", PROMPTS[1], "--max-new-tokens", "10", "--json") == 0
    assert json.loads(capsys.readouterr().out)["generated"] == alone.out.removesuffix("\n")
    assert "AVX-512" not in alone.err
    assert fuyou("generate", run.store, "--prompt", PROMPTS[0], "--max-new-tokens", "1", "--dtype", "bfloat16") == 0
    assert ("without AVX-512" in capsys.readouterr().err) == (not has_fast_bfloat16())


def with_settings(materials: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """Makes a copy of the model whose generation_config.json has these keys."""
    shutil.copytree(materials / "model", folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_stop_strings(materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row ends by a stop string, another goes on, as transformers writes them; a single prompt too."""
    whole = in_memory(materials / "model", PROMPTS, 10)
    stop = whole[0][13:16]  # in two tokens; what crosses the end of a prompt would stop its row at once
    settings = {"stop_strings": ["never there", stop], "eos_token_id": 0, "pad_token_id": 0}  # without them a row goes on
    folder, file = with_settings(materials, tmp_path / "model", settings), tmp_path / "p.jsonl"
    expected = in_memory(folder, PROMPTS, 10)
    ends = [stop in text for text in expected]
    assert len(stop) == 3 and ends[0] and False in ends and expected[0] != whole[0], expected
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    assert fuyou("generate", folder, "--file", file, "--max-new-tokens", "10") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["generated"] for row in rows] == expected
    assert [row["ended"] == "end" for row in rows] == ends and [row["tokens"] < 10 for row in rows] == ends
    alone = PROMPTS[ends.index(True)]
    assert fuyou("generate", folder, "--prompt", alone, "--max-new-tokens", "10") == 0
    assert capsys.readouterr().out == in_memory(folder, [alone], 10)[0] + "\n"


@pytest.mark.parametrize(
    "settings",
    every(3, [
        {"eos_token_id": "<|end|>"}, {"eos_token_id": 10**30}, {"repetition_penalty": -1.0}, {"repetition_penalty": "high"},
        {"bad_words_ids": [[-1]]}, {"bad_words_ids": 7}, {"stop_strings": 7},
        {"stop_strings": []}, {"stop_strings": ["x", ""]}, {"stop_strings": ""},
        {"min_new_tokens": "many"}, {"prompt_lookup_num_tokens": 4}, {"max_time": "8h"},
        {"watermarking_config": {"context_width": "a"}}, {"guidance_scale": 2.0}, {"logits_processor": 1},
    ]),
    ids=str,
)  # fmt: skip
def test_settings_that_transformers_refuses(
    settings: dict[str, Any], materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_settings(materials, tmp_path / "model", settings)
    assert fuyou("generate", folder, "--prompt", "The road", "--max-new-tokens", "4") == 2
    said = capsys.readouterr()
    assert said.out == "" and str(folder / "generation_config.json") in said.err and "internal" not in said.err
    assert next(iter(settings)) in said.err


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"exponential_decay_length_penalty": [3, "x"]}, "ExponentialDecay"), ({"token_healing": True, "bos_token_id": "x"}, "")],
    ids=str,
)
def test_settings_that_fail_at_a_later_token_or_together(
    settings: dict[str, Any], named: str, materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_settings(materials, tmp_path / "model", {**settings, "eos_token_id": 0})
    assert fuyou("generate", folder, "--prompt", "The road", "--max-new-tokens", "6") == 2
    said = capsys.readouterr().err
    assert f"{folder / 'generation_config.json'}: {named}" in said and "internal" not in said


@pytest.mark.parametrize("key", ["min_length", "min_new_tokens"])
def test_a_least_length_beyond_what_is_asked_for(
    key: str, materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Is no matter for a warning of the library's, which names a place in it."""
    folder = with_settings(materials, tmp_path / "model", {key: 1000})
    assert fuyou("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 4
    assert not [one for one in recwarn if "Unfeasible" in str(one.message)]


def test_a_prompt_that_is_read_in_pieces(materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is read at once, which memory is planned for: the text is the same."""
    folder = with_settings(materials, tmp_path / "model", {"prefill_chunk_size": 2})
    assert fuyou("generate", folder, "--prompt", PROMPTS[0], "--max-new-tokens", "6") == 0
    assert capsys.readouterr().out == in_memory(materials / "model", PROMPTS[:1], 6)[0] + "\n"


def test_positions_of_each_rows_own_length(longrope: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some rows stay short, one becomes long on the way, and others are long at once. Expects what each forward over all of a
    row gives, by a model that has seen no other."""
    prompts = ["The", "The road from the", "The road from the mill", "mill tower " * 5, "The road from the mill takes " * 3]
    new, file = 6, tmp_path / "prompts.jsonl"
    expected, lengths = alone(longrope, prompts, new)
    assert min(lengths) + new <= 16 < max(lengths) and any(length <= 16 < length + new - 2 for length in lengths), lengths
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    assert fuyou("generate", longrope, "--file", file, "--max-new-tokens", str(new)) == 0
    assert [json.loads(line)["generated"] for line in capsys.readouterr().out.splitlines()] == expected


def test_positions_that_stretch_have_no_limit(materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of rope type dynamic goes beyond the length that it was made for."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = write_llama(
        materials, "dynamic", hidden_size=32, intermediate_size=64, rope_parameters=rope, initializer_range=0.5
    )  # fmt: skip
    prompts, new = ["The road", "mill tower " * 29, "mill tower " * 40], 4
    expected, lengths = alone(folder, prompts, new)
    assert lengths[0] < 64 - new < lengths[1] < 64 < lengths[2], lengths
    told = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert fuyou("generate", folder, *told, "--max-new-tokens", str(new)) == 0
    assert [json.loads(line)["generated"] for line in capsys.readouterr().out.splitlines()] == expected


def alone(folder: Path, prompts: Sequence[str], new: int) -> tuple[list[str], list[int]]:
    """Returns what follows each prompt, and how many tokens the prompts have: every token by a fresh model, without a cache."""
    import transformers

    tokenizer, texts, lengths = transformers.AutoTokenizer.from_pretrained(folder), list[str](), list[int]()
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        lengths.append(ids.shape[1])
        for _ in range(new):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        texts.append(tokenizer.decode(ids[0, lengths[-1] :], skip_special_tokens=True))
    return texts, lengths


def test_a_conversation(
    materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line is answered with all that was said before, until there is no room for it."""
    folder = tmp_path / "model"
    shutil.copytree(materials / "model", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("the mill\n\nthe tower\n" + "bridge " * 12 + "\n" + "word " * 60))
    assert fuyou("generate", folder, "--chat", "--max-new-tokens", "4") == 0
    first = in_memory(folder, ["user: the mill\nassistant:"], 4)[0]
    second = in_memory(folder, [f"user: the mill\nassistant: {first}\nuser: the tower\nassistant:"], 4)[0]
    third = in_memory(folder, [f"user: {'bridge ' * 12}".rstrip() + "\nassistant:"], 4)[0]
    said = capsys.readouterr()
    assert said.out == f"{first}\n{second}\n{third}\n"
    assert "begins anew" in said.err
    assert "write a shorter one" in said.err


LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    "words", [("--prompt", "a"), pytest.param((), marks=pytest.mark.slow)], ids=["one prompt", "a conversation"]
)
def test_a_template_that_never_ends(
    words: tuple[str, ...], materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 2.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("the mill\n"))
    folder = tmp_path / "model"
    shutil.copytree(materials / "model", folder)
    (folder / "chat_template.jinja").write_text(LOOPS)
    assert fuyou("generate", folder, "--chat", *words) == 2
    told = f"{'--prompt' if words else '--chat'}: the chat template of {folder} takes more than 2 s of the processor"
    assert f"error: {told}\n" in capsys.readouterr().err


@pytest.mark.usefixtures("worker")
def test_a_tokenizer_that_takes_all_memory(
    materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes a petabyte of one letter: loaded in this process, it would end it."""
    monkeypatch.setattr(sandbox, "BYTES", 1 << 30)
    folder = tmp_path / "model"
    shutil.copytree(materials / "model", folder)
    inner = json.loads((folder / "tokenizer.json").read_text())
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}
    inner["normalizer"] = {"type": "Sequence", "normalizers": [grows] * 4}
    (folder / "tokenizer.json").write_text(json.dumps(inner))
    assert fuyou("generate", folder, "--prompt", "The road") == 2
    assert f"error: tokenizer: loading {folder} takes more than 1.00 GiB of memory\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "nothing to continue"),
        (["--prompt", "a", "--file", "b.jsonl"], 2, "cannot be used together"),
        (["--prompt", "a", "--top-p", "1.5"], 2, "--top-p: 1.5 is not between"),
        (["--prompt", "a", "--temperature", "0", "--top-k", "5"], 2, "--temperature 0 takes the likeliest"),
        (["--prompt", "a", "--memory", "much"], 2, "--memory: expected auto, a size"),
        (["--prompt", ""], 2, "the prompt is empty"),
        (["--prompt", "\udcff"], 2, "--prompt: not valid UTF-8"),
        (["--prompt", "a", "--max-new-tokens", "64"], 2, "the model has 64 positions"),
        (["--prompt", "a", "--chat"], 2, "no chat template"),
        (["--file", "nothing.jsonl"], 2, "no such file"),
        (["--prompt", "a", "--memory", "100MiB"], 3, "the process itself takes"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], code: int, says: str, materials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuyou("generate", materials / "model", *words) == code
    assert says in capsys.readouterr().err


def test_tokens_without_an_embedding(materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer is of a larger model. What only pads a row is no matter."""
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(materials / "model", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["beyond"])
    tokenizer.add_special_tokens({"pad_token": "<|filler|>"})
    tokenizer.save_pretrained(folder)
    both = ("--prompt", PROMPTS[0], "--prompt", PROMPTS[1])
    assert fuyou("generate", folder, *both, "--max-new-tokens", "4") == 0
    found = [json.loads(line)["generated"] for line in capsys.readouterr().out.splitlines()]
    assert found == in_memory(materials / "model", PROMPTS[:2], 4)
    (file := tmp_path / "p.jsonl").write_text('{"prompt": "The road"}\n{"prompt": "The beyond"}\n')
    for words, place in ((("--prompt", "The beyond"), "--prompt"), (("--file", file), f"{file}:2")):
        assert fuyou("generate", folder, *words, "--max-new-tokens", "2") == 2
        said = capsys.readouterr()
        assert f"error: {place}: the tokenizer gives the token id" in said.err and said.out == ""


def test_a_conversation_of_bytes_or_of_nothing(materials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(materials / "model", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for stdin in (io.TextIOWrapper(io.BytesIO(b"the \xff mill\n"), encoding="utf-8"), None):
        monkeypatch.setattr("sys.stdin", stdin)
        assert fuyou("generate", folder, "--chat", "--max-new-tokens", "2") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(materials: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuyou("generate", materials / "model", "--prompt", "a", "--device", "cuda") == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_a_file_without_rows(materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "prompts.jsonl").write_text("\n\n")
    assert fuyou("generate", materials / "model", "--file", file) == 2
    assert "the file has no rows" in capsys.readouterr().err


@pytest.mark.usefixtures("worker")
def test_a_row_of_parquet_keeps_its_date(materials: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datetime import date

    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["The road"], "on": [date(2024, 5, 6)]}), file := tmp_path / "prompts.parquet")
    assert fuyou("generate", materials / "model", "--file", file, "--max-new-tokens", "1") == 0
    assert json.loads(capsys.readouterr().out)["on"] == "2024-05-06"
