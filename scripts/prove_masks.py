#!/usr/bin/env python3
"""Compares the tokens and labels of fuyou's rows with TRL's and axolotl's, for the golden rows of every format that they have.

    pip install 'trl>=1.16' accelerate; pip install --no-deps axolotl colorama addict
    python scripts/prove_masks.py
    half a minute on two cores; the lines of a library that is not installed are not measured

The rows are those of tests/data/golden and the tokenizer is that of the tests. Rows that use what a library does not have
(`train` or `weight` of a message, a `system` column, roles of other names, `loss_mask`) are left out and counted. TRL tokenises
a prompt together with its completion, fuyou apart, as they meet at generation: rows where that joins tokens across the border
are counted too. Of alpaca only the tokens that are learnt are compared, because axolotl writes a prompt of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.verdicts import ROOT, Row, conclude, holds, missing, plain_parser

from fuyou_cli.data.cache import RowsRequest, prepare
from fuyou_cli.data.rows import LABEL, NO_LOSS
from fuyou_cli.recipe.schema import DatasetEntry, DatasetSection
from tests.data.conftest import CHATML_MARKED, CHATML_UNMARKED, save_tokenizer

LONGEST = 1024
Raw = dict[str, Any]
Labelled = tuple[list[int], list[int]]  # tokens, and a label for each
Prepared = Callable[[Sequence[Raw], Any, Path], list[Labelled]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Describes one way of a library to prepare rows of a format."""

    format: str
    library: str
    prepared: Prepared
    takes: Callable[[Raw], bool] = lambda row: True
    learnt_only: bool = False  # the prompts are other ones
    told: Callable[[Raw], Raw] = lambda row: row  # how a golden row is written here


def by_trl(**options: Any) -> Prepared:
    def prepared(rows: Sequence[Raw], tokenizer: Any, work: Path) -> list[Labelled]:
        """Returns the rows as TRL's trainer prepares them. It wants a model, so it gets a tiny one."""
        import datasets
        import transformers
        import trl

        size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **size))
        asked = trl.SFTConfig(str(work), max_length=LONGEST, report_to=[], use_cpu=True, bf16=False, **options)
        told = datasets.Dataset.from_list([trl.maybe_convert_to_chatml(row) for row in rows])
        made = trl.SFTTrainer(model, asked, train_dataset=told, processing_class=tokenizer).train_dataset
        return [(row["input_ids"], row["labels"]) for row in made]

    return prepared


def by_axolotl(strategy: Callable[[Any], Any]) -> Prepared:
    def prepared(rows: Sequence[Raw], tokenizer: Any, work: Path) -> list[Labelled]:
        made = strategy(tokenizer)
        found = [made.tokenize_prompt(row) for row in rows]
        return [(row["input_ids"], row["labels"]) for row in found]

    return prepared


def axolotl_chat(tokenizer: Any) -> Any:
    from axolotl.prompt_strategies import chat_template

    prompter = chat_template.ChatTemplatePrompter(tokenizer, CHATML_UNMARKED, message_field_training="train")
    options = {"train_on_inputs": False, "sequence_len": LONGEST, "roles_to_train": ["assistant"], "train_on_eos": "turn"}
    return chat_template.ChatTemplateStrategy(prompter, tokenizer, **options)


def axolotl_alpaca(tokenizer: Any) -> Any:
    from axolotl import prompt_tokenizers, prompters

    return prompt_tokenizers.AlpacaPromptTokenizingStrategy(prompters.AlpacaPrompter(), tokenizer, False, LONGEST)


def axolotl_segments(tokenizer: Any) -> Any:
    from axolotl.prompt_strategies import input_output

    return input_output.RawInputOutputStrategy(input_output.RawInputOutputPrompter(), tokenizer, False, LONGEST)


def _has_messages(*known: str) -> Callable[[Raw], bool]:
    return lambda row: row.keys() == {"messages"} and all(message.keys() <= set(known) for message in row["messages"])


def _ends_with_answer(row: Raw) -> bool:
    return _has_messages("role", "content")(row) and len(row["messages"]) > 1 and row["messages"][-1]["role"] == "assistant"


def _as_pair(row: Raw) -> Raw:
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


def _has_turns(row: Raw) -> bool:
    roles = {"system", "user", "assistant", "tool"}  # TRL renames the keys, not the roles
    turns = row["conversations"] if row.keys() == {"conversations"} else [{}]
    return all(turn.keys() == {"from", "value"} and turn["from"] in roles for turn in turns)


TRL, AXOLOTL = "trl", "axolotl"
ASSISTANT, COMPLETION = by_trl(assistant_only_loss=True), by_trl(completion_only_loss=True)
CASES = [
    Case(format="messages", library=TRL, prepared=ASSISTANT, takes=_has_messages("role", "content")),
    Case(format="sharegpt", library=TRL, prepared=ASSISTANT, takes=_has_turns),
    Case(format="prompt_completion", library=TRL, prepared=COMPLETION),
    Case(
        format="messages", library=TRL, prepared=by_trl(completion_only_loss=True, assistant_only_loss=True),
        takes=_ends_with_answer, told=_as_pair,
    ),
    Case(format="text", library=TRL, prepared=by_trl()),
    Case(format="tokenized", library=TRL, prepared=by_trl(), takes=lambda row: "labels" in row),
    Case(format="tokenized", library=TRL, prepared=COMPLETION, takes=lambda row: "completion_mask" in row),
    Case(
        format="messages", library=AXOLOTL, prepared=by_axolotl(axolotl_chat),
        takes=_has_messages("role", "content", "train"),
    ),
    Case(format="alpaca", library=AXOLOTL, prepared=by_axolotl(axolotl_alpaca), learnt_only=True),
    Case(format="input_output", library=AXOLOTL, prepared=by_axolotl(axolotl_segments)),
]  # fmt: skip


def by_fuyou(rows: Sequence[Raw], tokenizer_dir: Path, work: Path) -> list[Labelled]:
    file = work / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entry = DatasetEntry(path=str(file))
    dataset = DatasetSection(train=(entry,), max_seq_len=LONGEST, num_workers=1, overlong="error")
    made = prepare(RowsRequest(dataset=dataset, tokenizer_dir=tokenizer_dir), work / "cache")
    found = []
    for index in range(len(made)):
        tokens, mask = made.tokens(index).tolist(), made.mask(index)
        labels = [token if bit & LABEL else NO_LOSS for token, bit in zip(tokens, mask, strict=True)]
        found.append((tokens, labels))
    return found


def alike(ours: Labelled, theirs: Labelled, *, learnt_only: bool) -> bool:
    """Tells whether a model sees the same tokens and learns the same: a row's first token is never learnt, and padding at its
    end is left out here."""
    if learnt_only:
        return [label for label in ours[1] if label != NO_LOSS] == [label for label in theirs[1] if label != NO_LOSS]
    tokens, labels = theirs
    many = len(ours[0])
    return ours[0] == tokens[:many] and ours[1][1:] == labels[1:many] and set(labels[many:]) <= {NO_LOSS}


def joins(row: Raw, tokenizer: Any) -> bool:
    """Tells whether tokens of a prompt and its completion join across the border."""
    if not isinstance(row.get("prompt"), str):
        return False
    alone, together = (tokenizer(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["completion"]))
    after = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    return bool(together != alone + after)


def compared(case: Case, tokenizer_dir: Path, tokenizer: Any, work: Path) -> list[Row]:
    what = f"{case.format}{' as prompt and completion' * (case.told is _as_pair)}: {case.library}"
    if find_spec(case.library) is None:
        return [missing(what, "all rows it has", "not installed")]
    golden = (ROOT / "tests" / "data" / "golden" / f"{case.format}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in golden]
    taken = [case.told(row) for row in rows if case.takes(row)]
    ours, theirs = by_fuyou(taken, tokenizer_dir, work), case.prepared(taken, tokenizer, work)
    joined = [joins(row, tokenizer) for row in taken]
    pairs = [pair for pair, is_joined in zip(zip(ours, theirs, taken, strict=True), joined, strict=True) if not is_joined]
    other = [row for one, two, row in pairs if not alike(one, two, learnt_only=case.learnt_only)]
    same, counted = len(pairs) - len(other), "learnt tokens" if case.learnt_only else "tokens and labels"
    left = {"it does not have": len(rows) - len(taken), "whose tokens join": sum(joined)}
    note = ", ".join(f"{count} rows {why}" for why, count in left.items() if count)
    values = {"differing": other}
    return [holds(f"{what}, {counted}", f"{len(pairs)} rows", f"{same}", same == len(pairs) > 0, note=note, values=values)]


def main() -> int:
    options = plain_parser(__doc__).parse_args()
    import transformers

    rows, found = list[Row](), [name for name in (TRL, AXOLOTL) if find_spec(name)]
    with tempfile.TemporaryDirectory(prefix="fuyou-proof-") as scratch:
        directory = save_tokenizer(Path(scratch, "tokenizer"), chat_template=CHATML_MARKED)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        for number, case in enumerate(CASES):
            (work := Path(scratch, str(number))).mkdir()
            rows += compared(case, directory, tokenizer, work)
    name = f"{time.strftime('%Y-%m-%d')}-prove_masks"
    return conclude(name, rows, results=options.results, settings={name: metadata.version(name) for name in found})


if __name__ == "__main__":
    sys.exit(main())
