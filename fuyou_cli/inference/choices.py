"""Scores multiple-choice questions by the log-likelihood of each choice after its question, as lm-eval-harness does.

`acc` takes the choice with the highest log-likelihood, `acc_norm` the one with the highest per character of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.reading import read_rows
from fuyou_cli.data.rows import NO_LOSS
from fuyou_cli.training.evaluation import Losses

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Holds a question, its choices, and the number of the right one."""

    text: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """Holds the tokens of a question with one choice. `scored`: how many of the last ones are the choice's."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Says how many questions were answered right."""

    questions: int
    acc: float
    acc_norm: float
    cut: int  # sequences whose question lost its beginning


def read_questions(file: Path) -> list[Question]:
    """Reads rows of `question` (or `prompt`), `choices` and `answer` (a number from 0, a letter from A, or the choice's text).
    Raises UsageError that names the line."""
    if not file.is_file():
        raise UsageError(f"--choices: {file} does not exist", hint="name a JSONL file of question, choices and answer")
    found = [_question(place, row) for place, row in read_rows(file)]
    if not found:
        raise UsageError(f"--choices: {file} has no rows")
    return found


def _question(place: str, row: Any) -> Question:
    text = row.get("question", row.get("prompt"))
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(text, str) or not text:
        raise UsageError(f"{place}: has no text as question or prompt")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise UsageError(f"{place}: choices must be a list of at least two texts")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer in _LETTERS:
        answer = _LETTERS.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UsageError(f"{place}: answer must be the number of a choice (from 0), its letter (from A) or its text")
    return Question(text=text, choices=tuple(choices), answer=answer)


def encoded(questions: Sequence[Question], encode: Callable[[str], list[int]]) -> list[Continued]:
    """Tokenises every choice after its question and a space, without start token. The question's tokens are those it has
    alone; white space at its end goes to the choice, as harness and models expect it there."""
    found = []
    for question in questions:
        text = question.text.rstrip()
        between = question.text[len(text) :] or " "
        alone = len(encode(text))
        for choice in question.choices:
            ids = encode(text + between + choice)
            found.append(Continued(ids=tuple(ids), scored=max(1, len(ids) - alone)))
    return found


def scored(
    questions: Sequence[Question], sequences: Sequence[Continued], losses: Losses, *, at_once: int, max_len: int,
    progress: Callable[[int], None] = lambda rows: None,
) -> Score:  # fmt: skip
    """Scores the questions, `at_once` sequences in a pass. One longer than `max_len` loses its beginning."""
    order = sorted(range(len(sequences)), key=lambda number: len(sequences[number].ids))
    likelihoods = [0.0] * len(sequences)
    for first in range(0, len(order), at_once):
        chosen = order[first : first + at_once]
        ids, labels = _batch([sequences[number] for number in chosen], max_len)
        sums = losses(ids, labels, last=first + at_once >= len(order)).tolist()
        for number, total in zip(chosen, sums, strict=True):
            likelihoods[number] = -total
        progress(len(chosen))
    right = normalised = first = 0
    for question in questions:
        found = likelihoods[first : (first := first + len(question.choices))]
        each = [likelihood / len(choice) for likelihood, choice in zip(found, question.choices, strict=True)]
        right += found.index(max(found)) == question.answer
        normalised += each.index(max(each)) == question.answer
    cut = sum(len(one.ids) > max_len for one in sequences)
    return Score(questions=len(questions), acc=right / len(questions), acc_norm=normalised / len(questions), cut=cut)


def _batch(rows: Sequence[Continued], max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and labels (rows, tokens), padded on the right."""
    width = min(max_len, max(len(row.ids) for row in rows))
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), NO_LOSS, dtype=torch.long)
    for number, row in enumerate(rows):
        kept = torch.tensor(row.ids[-width:])
        ids[number, : len(kept)] = kept
        begin = max(0, len(kept) - row.scored)
        labels[number, begin : len(kept)] = kept[begin:]
    return ids, labels
