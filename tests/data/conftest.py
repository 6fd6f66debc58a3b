"""Makes a small tokenizer, a recipe's section, and a way to tokenise in this process (by the worker's own entry) where starting
the worker's process is not the point: loading the libraries takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.data.rows import Rows
from fuyou_cli.data.worker import build
from fuyou_cli.recipe.schema import DatasetEntry, DatasetSection

Write = Callable[[str, list[dict[str, Any]]], Path]
Tokenise = Callable[..., Rows]
SAMPLE_TEXT = [
    "The ferry leaves the northern harbour at nine and reaches the island before noon.",
    "A baker needs flour, water, salt and time; the oven does the rest.",
    "Question: how many apples are left? Answer: 7 apples. user assistant system tool",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. 漢字かな交じり文 🙂",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# A line break after a block is dropped.
CHATML_MARKED = CHATML.replace("{% endgeneration %}\n", "{% endgeneration %}{{ '\\n' }}")


def section(*paths: Path | str, max_seq_len: int = 64, entry: dict[str, Any] | None = None, **options: Any) -> DatasetSection:
    """The `dataset` section of a recipe. `entry`: what is said of each path."""
    train = tuple(DatasetEntry(path=str(path), **(entry or {})) for path in paths)
    return DatasetSection(train=train, max_seq_len=max_seq_len, num_workers=1, **options)


def save_tokenizer(directory: Path, *, chat_template: str = CHATML) -> Path:
    """Makes the tokenizer of these tests in a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|im_end|>", "<|im_start|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(SAMPLE_TEXT, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows as JSON lines and gives the file."""

    def to_file(name: str, rows: list[dict[str, Any]]) -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return file

    return to_file


@pytest.fixture
def tokenise(tokenizer_dir: Path, tmp_path: Path) -> Tokenise:
    """The rows of one source, made by the worker's entry in this process; `apart`: of a mixture, each file an entry."""
    made = 0

    def rows_of(
        *files: Path, chat_template: str | None = None, pad_token: str | None = None, apart: bool = False, **options: Any
    ) -> Rows:
        nonlocal made
        made += 1
        out = tmp_path / f"rows-{made}"
        out.mkdir()
        source: dict[str, Any] = {"files": [str(file) for file in files]}
        source |= {name: options.pop(name, value) for name, value in SOURCE_DEFAULTS.items()}
        sources = [source] if not apart else [{**source, "files": [file]} for file in source["files"]]
        request = {"sources": sources, "out": str(out), "mixed": apart}
        request |= {"tokenizer_dir": str(options.pop("tokenizer_dir", tokenizer_dir))}
        request |= {"chat_template": chat_template, "pad_token": pad_token, "seconds": 60}
        request |= {name: options.pop(name, value) for name, value in OPTION_DEFAULTS.items()}
        request |= {"part": options.pop("part")} if "part" in options else {}
        assert not options, options
        build(request)
        return Rows(out, paths=[str(file) for file in (files if apart else files[:1])])

    return rows_of


SOURCE_DEFAULTS: dict[str, Any] = {"format": "auto", "columns": {}, "max_samples": None}
OPTION_DEFAULTS: dict[str, Any] = {"max_seq_len": 64, "overlong": "truncate", "packing": False, "loss_on": "auto"}
