"""Scores multiple-choice questions by the log-likelihood of each choice after its question, as lm-eval-harness does.

`acc` takes the choice with the highest log-likelihood, `acc_norm` the one with the highest per character of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.batches import Sequences, passes
from fuyou_cli.data.reading import read_rows
from fuyou_cli.spec.plan import Numerics
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
    questions: Sequence[Question], sequences: Sequence[Continued], losses: Losses, numerics: Numerics, *,
    progress: Callable[[int], None] = lambda rows: None,
) -> Score:  # fmt: skip
    """Scores the questions, as many sequences in a pass as `numerics` have tokens for. One that is longer than a row loses its
    beginning."""
    max_len = numerics.max_seq_len
    rows = Sequences([one.ids[-max_len:] for one in sequences], [min(one.scored, max_len) for one in sequences])
    likelihoods, done = [0.0] * len(sequences), 0
    for chosen, batch in passes(rows, range(len(sequences)), pad_id=0, numerics=numerics, most=numerics.micro_batches):
        done += len(chosen)
        of_tokens = losses(batch, last=done == len(sequences))
        for number, place in zip(chosen, batch.places, strict=True):
            likelihoods[number] = -float(of_tokens[place.row, place.begin : place.end].sum())
        progress(len(chosen))
    right = normalised = first = 0
    for question in questions:
        found = likelihoods[first : (first := first + len(question.choices))]
        each = [likelihood / len(choice) for likelihood, choice in zip(found, question.choices, strict=True)]
        right += found.index(max(found)) == question.answer
        normalised += each.index(max(each)) == question.answer
    cut = sum(len(one.ids) > max_len for one in sequences)
    return Score(questions=len(questions), acc=right / len(questions), acc_norm=normalised / len(questions), cut=cut)
