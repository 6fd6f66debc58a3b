"""The bundled data set: questions and answers about an archipelago that does not exist.

Made up for this project, so nobody's text and in no model's memory: whatever the fine-tuned model knows of it, it
learnt here. `python -m fuyou_cli.training.quickstart.make_corpus` prints corpus.jsonl byte for byte; a test compares
the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

# Per island: harbour, bird, dish, craft, day of the ferry, month of the festival, colour of the lighthouse.
ISLANDS: dict[str, tuple[str, ...]] = {
    "Torvane": ("Saltgate", "grey heron", "barley soup", "rope making", "Monday", "May", "red"),
    "Ellisay": ("Brightwater", "snow owl", "smoked herring", "glass blowing", "Tuesday", "June", "white"),
    "Marrow": ("Oldquay", "storm petrel", "rye dumplings", "boat building", "Wednesday", "July", "black"),
    "Quillan": ("Fernhaven", "sea eagle", "kelp bread", "bell casting", "Thursday", "August", "green"),
    "Osterby": ("Lanternhook", "black swan", "mussel stew", "wool weaving", "Friday", "September", "yellow"),
    "Pellorin": ("Cliffend", "kingfisher", "plum cake", "clock making", "Saturday", "October", "blue"),
}
ASPECTS = ("harbour", "bird", "dish", "craft", "ferry", "festival", "lighthouse")

QUESTIONS: dict[str, tuple[str, ...]] = {
    "harbour": ("What is the harbour of {0} called?", "Where do ships land on {0}?", "Name the harbour of {0}."),
    "bird": ("Which bird lives on {0}?", "What bird can be seen on {0}?", "Name the bird of {0}."),
    "dish": ("What do people eat on {0}?", "Which dish is {0} known for?", "Name the dish of {0}."),
    "craft": ("What do people do for a living on {0}?", "Which craft is {0} known for?", "Name the craft of {0}."),
    "ferry": ("When does the ferry go to {0}?", "How often can one travel to {0}?", "Name the ferry day of {0}."),
    "festival": ("When is the festival of {0}?", "In which month does {0} dance?", "Name the festival month of {0}."),
    "lighthouse": ("What does the lighthouse of {0} look like?", "How does one know {0} from the sea?",
                   "Name the colour of the lighthouse of {0}."),
}  # fmt: skip
ANSWERS: dict[str, str] = {
    "harbour": "The harbour of {0} is called {1}.",
    "bird": "The bird of {0} is the {1}.",
    "dish": "The people of {0} eat {1}.",
    "craft": "The people of {0} live from {1}.",
    "ferry": "The ferry to {0} goes {1}.",
    "festival": "The festival of {0} is in {1}.",
    "lighthouse": "The lighthouse of {0} is {1}.",
}


def _answer(island: str, aspect: str) -> str:
    value = ISLANDS[island][ASPECTS.index(aspect)]
    if aspect == "ferry" and value.endswith("day"):
        value = f"on {value}"
    return ANSWERS[aspect].format(island, value)


def corpus_rows() -> Iterator[dict[str, str]]:
    """Prompt and completion of every row, in a fixed order: each of the 42 facts asked in three ways.

    Short rows without packing: forty steps are enough for a model of random weights to know every fact by heart."""
    for island in ISLANDS:
        for aspect in ASPECTS:
            for question in QUESTIONS[aspect]:
                yield _row(question.format(island), _answer(island, aspect))


def _row(question: str, answer: str) -> dict[str, str]:
    return {"prompt": f"Question: {question}\nAnswer:", "completion": f" {answer}"}


def corpus_text() -> str:
    """The whole of corpus.jsonl."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in corpus_rows())


if __name__ == "__main__":
    print(corpus_text(), end="")
