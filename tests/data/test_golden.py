"""Twenty rows of every format, and what of each is learnt: golden/FORMAT.jsonl and golden/FORMAT.txt, ⟦...⟧ carries loss.

A person has read every line. The rule is that of axolotl and TRL: the assistant's text and its stop token. Where theirs differ:
- messages, sharegpt: as axolotl with `roles_to_train: [assistant]`, `train_on_eos: turn`, `message_field_training: train`, and
  as TRL's `assistant_only_loss`. What a template itself writes into a turn before the content, such as an empty `<think>`
  block, is learnt here and in TRL, not in axolotl. TRL's default learns every token: here `loss_on: all`.
- prompt_completion: as TRL with text columns. TRL tokenises prompt and completion together, and warns where that joins tokens
  across the border; here they are tokenised apart, as they meet at generation.
- alpaca: the response and the end token, as axolotl; axolotl puts a sentence of its own before the instruction.
- text: every token and the end token, as both.
- tokenized: `labels` as both; masks as TRL, all of them at once where there are several; padding is left out.
- input_output: as axolotl.

`FUYOU_GOLDEN=write` writes the text files anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.data.formats import FORMATS
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.tokenise import decode_pieces

from .conftest import CHATML_MARKED, CHATML_UNMARKED

GOLDEN = Path(__file__).with_name("golden")
CASES = [(name, CHATML_UNMARKED) for name in FORMATS] + [("messages", CHATML_MARKED), ("sharegpt", CHATML_MARKED)]


@pytest.mark.parametrize(("name", "template"), CASES)
def test_what_is_learnt(tokenise: Callable[..., Rows], tokenizer: Any, name: str, template: str) -> None:
    rows = tokenise(GOLDEN / f"{name}.jsonl", chat_template=template, max_seq_len=1024, overlong="error")
    assert rows.summary.formats[0][1] == name and len(rows) == 20
    told = "".join(f"--- {number + 1}\n{_shown(tokenizer, rows, number)}\n" for number in range(len(rows)))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("FUYOU_GOLDEN") == "write":
        file.write_text(told, encoding="utf-8")
    assert told == file.read_text(encoding="utf-8")


def test_sharegpt_is_messages_by_other_names() -> None:
    assert (GOLDEN / "sharegpt.txt").read_bytes() == (GOLDEN / "messages.txt").read_bytes()


def _shown(tokenizer: Any, rows: Rows, number: int) -> str:
    pieces = decode_pieces(tokenizer, (rows.tokens(number), rows.mask(number)), at_most=1024)
    return "".join(f"⟦{text}⟧" if learnt else text for text, learnt in pieces)
