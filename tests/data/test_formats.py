"""Tests that formats are found by their columns; prompts carry no loss, completions and assistant turns do, their stop token
too. Expected token streams are spelled with the test's own tokenizer calls."""

from __future__ import annotations

from typing import Any

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.formats import RowError, choose_format
from fuyou_cli.data.rows import Rows

from .conftest import CHATML_UNMARKED, Tokenise, Write

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many apples?"},
    {"role": "assistant", "content": "7 apples"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "4 apples 🙂"},
]


def learnt(rows: Rows, tokenizer: Any, index: int = 0) -> str:
    """The text of the tokens that carry loss."""
    return str(tokenizer.decode(rows.tokens(index)[rows.mask(index) == 1].tolist()))


def whole(rows: Rows, tokenizer: Any, index: int = 0) -> str:
    return str(tokenizer.decode(rows.tokens(index).tolist()))


@pytest.mark.parametrize(
    ("columns", "mapping", "expected"),
    [
        ({"text"}, {}, "text"),
        ({"text", "prompt", "completion"}, {}, "prompt_completion"),
        ({"instruction", "input", "output"}, {}, "alpaca"),
        ({"messages", "prompt", "completion"}, {}, "messages"),
        ({"question", "answer"}, {"prompt": "question", "completion": "answer"}, "prompt_completion"),
        ({"body", "text"}, {"text": "body"}, "text"),
        ({"conversations", "system", "tools"}, {}, "sharegpt"),
        ({"input_ids", "labels", "attention_mask", "text"}, {}, "tokenized"),
        ({"input_ids", "mask"}, {"loss_mask": "mask"}, "tokenized"),
        ({"segments"}, {}, "input_output"),
    ],
)
def test_auto_finds_the_format(columns: set[str], mapping: dict[str, str], expected: str) -> None:
    assert choose_format("auto", frozenset(columns), mapping) == expected


@pytest.mark.parametrize(
    ("asked", "columns", "mapping", "words"),
    [
        ("auto", {"foo"}, {}, "no format fits these columns"),
        ("alpaca", {"instruction"}, {}, "needs the column output"),
        ("text", {"text"}, {"prompt": "text"}, "prompt is not a column of format text"),
    ],
)
def test_what_fits_no_format_is_refused(asked: str, columns: set[str], mapping: dict[str, str], words: str) -> None:
    with pytest.raises(RowError, match=words):
        choose_format(asked, frozenset(columns), mapping)


def test_prompt_and_completion(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    file = write("qa.jsonl", [{"question": "How many?", "answer": "7 apples"}])
    rows = tokenise(file, columns={"prompt": "question", "completion": "answer"})
    assert whole(rows, tokenizer) == "<|bos|>How many?7 apples<|im_end|>"
    assert learnt(rows, tokenizer) == "7 apples<|im_end|>"
    assert rows.summary.label_tokens == int(rows.mask(0).sum())
    assert rows.summary.preview == (("<|bos|>How many?", False), ("7 apples<|im_end|>", True))
    assert rows.summary.formats == ((str(file), "prompt_completion"),)


def test_pairs_that_run_together_are_taken_as_they_are_and_said(write: Write, tokenise: Tokenise) -> None:
    apart = [{"prompt": "a ", "completion": "b"}, {"prompt": "a", "completion": "\nb"}, {"prompt": "", "completion": "b"}]
    assert tokenise(write("apart.jsonl", apart)).summary.notes == ()
    together = [{"prompt": "a?", "completion": "b"}] * 2
    rows = tokenise(write("qa.jsonl", [*apart, *together]))
    assert len(rows.summary.notes) == 1 and rows.summary.notes[0].startswith("in 2 of 5 samples no white space")


def test_loss_on_all_includes_the_prompt(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    rows = tokenise(write("qa.jsonl", [{"prompt": "a ", "completion": "b"}]), loss_on="all")
    assert learnt(rows, tokenizer) == whole(rows, tokenizer) == "<|bos|>a b<|im_end|>"


def test_alpaca_sections(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    row = {"instruction": "Count.", "input": "apples", "output": "7"}
    rows = tokenise(write("a.jsonl", [row, {"instruction": "Stop.", "input": "", "output": "ok"}]))
    prompt = "<|bos|>### Instruction:\nCount.\n\n### Input:\napples\n\n### Response:\n"
    assert whole(rows, tokenizer) == prompt + "7<|im_end|>"
    assert learnt(rows, tokenizer) == "7<|im_end|>"
    assert whole(rows, tokenizer, 1) == "<|bos|>### Instruction:\nStop.\n\n### Response:\nok<|im_end|>"


@pytest.mark.parametrize("template", [None, CHATML_UNMARKED], ids=["generation marks", "prefixes"])
def test_messages_carry_loss_on_assistant_turns(write: Write, tokenise: Tokenise, tokenizer: Any, template: str | None) -> None:
    file = write("chat.jsonl", [{"messages": TURNS}])
    rows = tokenise(file, chat_template=template, max_seq_len=256)
    assert whole(rows, tokenizer) == tokenizer.apply_chat_template(TURNS, chat_template=template, tokenize=False)
    assert learnt(rows, tokenizer) == "7 apples<|im_end|>4 apples 🙂<|im_end|>"
    last = tokenise(file, chat_template=template, max_seq_len=256, loss_on="last_assistant")
    assert learnt(last, tokenizer) == "4 apples 🙂<|im_end|>"
    everything = tokenise(file, chat_template=template, max_seq_len=256, loss_on="all")
    assert everything.mask(0).all()


THINKING = (  # as Qwen3's: the thinking of a turn is dropped once the user has spoken again
    "{% set ns = namespace(query=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% if loop.index0 > ns.query %}<think>\n{{ m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m['content'] else '' }}\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("thought", ["", "<think>\nfive and two\n</think>\n\n"])
def test_a_template_that_drops_the_thinking_of_earlier_turns(
    write: Write, tokenise: Tokenise, tokenizer: Any, thought: str
) -> None:
    """Every turn of three is learnt as it stands in the whole, the last one with its thinking; the same answer twice and a
    question after which nothing follows change nothing."""
    turns = [{**turn, "content": thought + turn["content"]} if turn["role"] == "assistant" else turn for turn in TURNS]
    turns += [{"role": "user", "content": "Again?"}, {"role": "assistant", "content": thought + "7 apples"}]
    kept = thought or "<think>\n\n</think>\n\n"
    for more, last in (([], kept + "7 apples"), ([{"role": "user", "content": "7 apples"}], "7 apples")):
        rows = tokenise(write("chat.jsonl", [{"messages": turns + more}]), chat_template=THINKING, max_seq_len=512)
        assert learnt(rows, tokenizer) == f"7 apples<|im_end|>4 apples 🙂<|im_end|>{last}<|im_end|>"
        assert whole(rows, tokenizer) == tokenizer.apply_chat_template(turns + more, chat_template=THINKING, tokenize=False)


def test_a_template_whose_turns_cannot_be_located_is_refused(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    template = "{{ messages | length }} messages\n" + CHATML_UNMARKED
    file = write("chat.jsonl", [{"messages": TURNS}])
    with pytest.raises(UsageError, match=r"chat.jsonl:1: .*message 3 differently"):
        tokenise(file, chat_template=template, max_seq_len=256)
    template = CHATML_UNMARKED.replace("{% for", "{% if messages|length > 3 %}!{% endif %}{% for", 1)
    with pytest.raises(UsageError, match=r"chat.jsonl:1: .*message 3 differently"):
        tokenise(file, chat_template=template, max_seq_len=256)
    rows = tokenise(file, chat_template=template, max_seq_len=256, loss_on="last_assistant")
    assert learnt(rows, tokenizer) == "4 apples 🙂<|im_end|>"


def test_a_template_without_the_stop_token_is_refused(write: Write, tokenise: Tokenise) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(UsageError, match=r"stop token .* never carries loss"):
        tokenise(write("chat.jsonl", [{"messages": TURNS}]), chat_template=template, max_seq_len=256)


def test_completions_cut_before_their_end_are_refused(write: Write, tokenise: Tokenise) -> None:
    file = write("qa.jsonl", [{"prompt": "a ", "completion": "apples " * 50}] * 3)
    with pytest.raises(UsageError, match=r"never carries loss.*3 of 3 samples were truncated"):
        tokenise(file, max_seq_len=16)


def test_data_without_any_label_is_refused(write: Write, tokenise: Tokenise) -> None:
    file = write("qa.jsonl", [{"prompt": "apples " * 50, "completion": "b"}])
    with pytest.raises(UsageError, match="no token of the data carries loss"):
        tokenise(file, max_seq_len=16)


def test_answers_of_no_text_are_counted(write: Write, tokenise: Tokenise) -> None:
    """As the empty assistant's message of a conversation; a call of a tool is an answer."""
    pairs = [{"prompt": "a ", "completion": text} for text in ("b", "", " \n")]
    said = "samples an answer is empty: the model learns to say nothing there"
    assert [said in note for note in tokenise(write("qa.jsonl", pairs)).summary.notes] == [True]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    answers = [{"content": "b"}, {"content": ""}, {"content": "", "tool_calls": [call]}]
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]} for answer in answers]
    assert tokenise(write("chats.jsonl", chats)).summary.unanswered == 1
    (empty,) = chats[1]["messages"][1:]
    longer = [{"messages": [*chats[1]["messages"], *chats[0]["messages"]]}]
    assert tokenise(write("more.jsonl", longer), loss_on="last_assistant").summary.unanswered == 0
    empty["train"] = False
    assert tokenise(write("more.jsonl", longer)).summary.unanswered == 0


def test_roles_that_nobody_learns_from_are_named(write: Write, tokenise: Tokenise) -> None:
    chat = {"messages": [{"role": "human", "content": "a"}, {"role": "bot", "content": "b"}]}
    with pytest.raises(UsageError, match="no token of the data carries loss") as caught:
        tokenise(write("chats.jsonl", [chat]))
    assert "role 'assistant' carries loss, here are 'bot', 'human'" in str(caught.value.hint)


def test_a_loss_that_means_nothing_is_refused(write: Write, tokenise: Tokenise) -> None:
    with pytest.raises(UsageError, match="loss_on: assistant does not fit data of format text"):
        tokenise(write("t.jsonl", [{"text": "a b c"}]), loss_on="assistant")


def test_a_start_token_the_tokenizer_adds_and_a_pad_token_of_the_recipe(
    write: Write, tokenise: Tokenise, tokenizer: Any
) -> None:
    file = write("t.jsonl", [{"text": "Answer: 7"}])
    rows = tokenise(file, pad_token="<|im_start|>")
    expected = tokenizer("Answer: 7")["input_ids"] + [tokenizer.eos_token_id]
    assert rows.tokens(0).tolist() == expected and expected[0] == tokenizer.bos_token_id
    assert rows.summary.pad_id == tokenizer.convert_tokens_to_ids("<|im_start|>")
    with pytest.raises(UsageError, match="<nope>"):
        tokenise(file, pad_token="<nope>")


@pytest.mark.parametrize("template", [None, CHATML_UNMARKED], ids=["generation marks", "prefixes"])
def test_messages_that_are_not_to_be_learnt(write: Write, tokenise: Tokenise, tokenizer: Any, template: str | None) -> None:
    first = [*TURNS[:2], {**TURNS[2], "train": False}, *TURNS[3:]]
    last = [*TURNS[:4], {**TURNS[4], "weight": 0}]
    file = write("chat.jsonl", [{"messages": first}, {"messages": last}])
    options = {"chat_template": template, "max_seq_len": 256}
    rows = tokenise(file, **options)
    assert [learnt(rows, tokenizer, number) for number in range(2)] == ["4 apples 🙂<|im_end|>", "7 apples<|im_end|>"]
    rows = tokenise(file, loss_on="last_assistant", **options)
    assert (len(rows), rows.summary.without_loss) == (1, 1) and learnt(rows, tokenizer) == "4 apples 🙂<|im_end|>"
    rows = tokenise(file, loss_on="all", **options)
    assert [int((rows.mask(number) == 0).sum()) for number in range(2)] == [
        len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("7 apples<|im_end|>", "4 apples 🙂<|im_end|>")
    ]


def test_a_template_whose_marks_are_not_the_turns_is_refused(write: Write, tokenise: Tokenise) -> None:
    """Turns without anything between them are one text to its marks: which of them is which cannot be known."""
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    template += "{% endgeneration %}{% endif %}{% endfor %}"
    turns = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two", "train": False}]
    with pytest.raises(UsageError, match=r"chat.jsonl:1: .* marks 1 texts, but the assistant has 2 messages"):
        tokenise(write("chat.jsonl", [{"messages": turns}]), chat_template=template)


def test_tokens_that_never_stop_are_said(write: Write, tokenise: Tokenise) -> None:
    """They may be pieces of documents, so it is no error."""
    rows = tokenise(write("ids.jsonl", [{"input_ids": [5, 6, 7, 8]}]))
    assert [note for note in rows.summary.notes if note.startswith("no stop token carries loss")]
    assert tokenise(write("ids.jsonl", [{"input_ids": [5, 6, 7, 1]}])).summary.notes == ()
    assert tokenise(write("ids.jsonl", [{"input_ids": [5, 6, 7, 8]}]), loss_on="all").summary.notes == ()
