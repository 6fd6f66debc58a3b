"""Tests what of a row is learnt, whatever file holds it and whatever the chat template takes: sixty rows of each format, as
JSON and as parquet, against spans that a search for strings finds, and every kind of trouble by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from drawn import crossed

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.formats import Chat
from fuyou_cli.data.reading import prompt_of
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.tokenise import Conversations, Tokeniser

from .conftest import CHATML, CHATML_MARKED, CHATML_UNMARKED, Tokenise, Write, save_tokenizer
from .test_formats import learnt, whole

Raw = dict[str, Any]
# Writes everything, takes text only, and arguments as objects.
OWN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN_UNMARKED = OWN.replace("{% generation %}", "").replace("{% endgeneration %}", "")
PLACES = ["Torvane", "Sylt", "the northern harbour", "Zwölf Deiche", "漢字", "an island 🙂"]


def _tool(number: int) -> Raw:
    """Describes one of three tools that share no parameter."""
    name, field = (("tide", "port"), ("ferry", "line"), ("oven", "loaves"))[number % 3]
    properties = {field: {"type": "string" if number % 3 == 0 else "integer", "description": f"The {field}"}}
    if number % 3 == 1:
        properties["days"] = {"type": "array", "items": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [field]}
    return {"type": "function", "function": {"name": name, "description": f"Asks for the {name}", "parameters": schema}}


def _arguments(number: int) -> Raw:
    if number % 3 == 0:
        return {"port": PLACES[number % 6]}
    return {"line": number, "days": ["Monday", f'day "{number}"']} if number % 3 == 1 else {"loaves": number}


def _talks() -> list[Raw]:
    """Returns sixty conversations: one answer or several, with blanks around, empty, with calls and with reasoning."""
    made = []
    for number in range(60):
        messages: list[Raw] = [{"role": "system", "content": f"Be brief, {number}."}] if number % 4 == 0 else []
        for turn in range(1 + number % 4):
            place = PLACES[(number + turn) % 6]
            messages.append({"role": "user", "content": f"How is {place} ({number}.{turn})?"})
            answer: Raw = {
                "role": "assistant",
                "content": ["", " ", "\n", "  "][(number + turn) % 4] + f"It is {place}." + " " * (turn % 2),
            }
            if number % 5 == 1:
                answer["reasoning_content"] = f"{place}, so {number}"
            if number % 3 == 0 and turn == 0:
                call = {
                    "type": "function",
                    "function": {"name": _tool(number // 3)["function"]["name"], "arguments": _arguments(number // 3)},
                }
                messages += [
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": f"{number} m"},
                ]
            messages.append(answer)
        made.append({"messages": messages, "tools": [_tool(number // 3)] if number % 3 == 0 else None})
    return made


def _segments(talk: Raw, prompt: int = 0) -> list[tuple[str, bool]]:
    """Writes a conversation by hand, in pieces of which the learnt ones are searched for."""
    tools = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in talk["tools"] or ())
    pieces = [(f"<|im_start|>system\n{tools}<|im_end|>\n", False)] if tools else []
    for place, message in enumerate(talk["messages"]):
        reasoning = f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else ""
        calls = "".join(
            f"<call>{call['function']['name']} {json.dumps(call['function']['arguments'], ensure_ascii=False)}</call>"
            for call in message.get("tool_calls") or ()
        )
        said = f"{reasoning}{message['content']}{calls}<|im_end|>"
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        pieces += [(said, message["role"] == "assistant" and place >= prompt), ("\n", False)]
    return pieces


def _searched(tokenizer: Any, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Returns tokens and mask: every learnt piece is searched for in the text behind the one before."""
    text, at, spans = "".join(piece for piece, _ in pieces), 0, []
    for piece, is_learnt in pieces:
        if is_learnt:
            begin = text.find(piece, at)
            assert begin >= 0
            spans.append((begin, begin + len(piece)))
        at += len(piece)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = encoded["offset_mapping"]
    return encoded["input_ids"], [int(any(a <= begin < b for a, b in spans)) for begin, _ in places]


def _with_nulls(value: Any, keys: frozenset[str] = frozenset()) -> Any:
    """Returns a value whose objects have keys of null beside their own, as another program may write them."""
    if isinstance(value, dict):
        return {**{key: _with_nulls(inner) for key, inner in value.items()}, "unused": None}
    return list(map(_with_nulls, value)) if isinstance(value, list) else value


def _in_other_words(talk: Raw, number: int) -> Raw:
    """Returns a conversation with contents in parts, and arguments and tools as JSON text."""
    told = json.loads(json.dumps(talk))
    for message in told["messages"]:
        text = message["content"]
        message["content"] = [{"type": "text", "text": part} for part in (text[:3], text[3:]) if part]
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], indent=number % 2 or None)
    told["tools"] = told["tools"] and [json.dumps(tool) for tool in told["tools"]]
    return told


def _as_messages(talk: Raw) -> Raw:
    return talk


def _as_sharegpt(talk: Raw) -> Raw:
    names = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    turns = [
        {"from": names[m["role"]], "value": m["content"], **{k: m[k] for k in m if k not in ("role", "content")}}
        for m in talk["messages"]
    ]
    return {"conversations": turns, "tools": talk["tools"]}


def _prompt_of(talk: Raw) -> int:
    """Returns where the completion begins: at the last answer, or at the call that leads to it."""
    roles = [message["role"] for message in talk["messages"]]
    return len(roles) - 3 if roles[-3:] == ["assistant", "tool", "assistant"] else len(roles) - 1


def _as_completion(talk: Raw) -> Raw:
    at = _prompt_of(talk)
    return {"prompt": talk["messages"][:at], "completion": talk["messages"][at:], "tools": talk["tools"]}


def _files(folder: Path, kind: str, rows: list[Raw]) -> list[Path]:
    """Writes the first forty rows to one file and the others to a second, because a column of parquet has one type."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    files = []
    for number, some in enumerate((rows[:40], rows[40:])):
        files.append(folder / f"rows-{number}.{kind}")
        if kind == "jsonl":
            files[-1].write_text("".join(json.dumps(row) + "\n" for row in some))
        else:
            names = {name: None for row in some for name in row}
            write_table(pa.table({name: [row.get(name) for row in some] for name in names}), files[-1])
    return files


@pytest.fixture(scope="module")
def trimming_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose offsets leave out blanks, as those of Llama 3 and GPT-2."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    directory = save_tokenizer(tmp_path_factory.mktemp("trimming"), chat_template=OWN)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save_pretrained(directory)
    assert tokenizer(" boats", return_offsets_mapping=True)["offset_mapping"][0] != (0, 1)
    return directory


def _compare(rows: Rows, expected: list[tuple[list[int], list[int]]]) -> None:
    assert len(rows) == len(expected)
    for index, (tokens, mask) in enumerate(expected):
        assert rows.tokens(index).tolist() == tokens, index
        assert rows.mask(index).tolist() == mask, index
        assert sum(mask) > 1


@crossed(
    4, spelt=[_as_messages, _as_sharegpt, _as_completion],
    taken=[(OWN, True), (OWN_UNMARKED, True), (OWN, False), (OWN_UNMARKED, False)], kind=["jsonl", "parquet"],
)  # fmt: skip
def test_sixty_conversations(
    spelt: Callable[[Raw], Raw], taken: tuple[str, bool], kind: str,
    tmp_path: Path, tokenise: Tokenise, tokenizer: Any, tokenizer_dir: Path, trimming_dir: Path,
) -> None:  # fmt: skip
    (template, trims), talks = taken, _talks()
    told = [_with_nulls(talk) if number % 2 else talk for number, talk in enumerate(talks[:40])]
    told += [_in_other_words(talk, number) for number, talk in enumerate(talks[40:])]
    files = _files(tmp_path, kind, list(map(spelt, told)))
    directory = trimming_dir if trims else tokenizer_dir
    rows = tokenise(*files, chat_template=template, tokenizer_dir=directory, max_seq_len=4096, overlong="error")
    completes = spelt is _as_completion
    _compare(rows, [_searched(tokenizer, _segments(talk, _prompt_of(talk) if completes else 0)) for talk in talks])
    noted = rows.summary.noted
    way = "marks" if template is OWN else "prefixes"
    assert noted[way] == 60 and set(noted) == {way, "nulls", "parts_joined", "arguments_read"}
    assert (noted["parts_joined"], noted["arguments_read"]) == (20, sum(talk["tools"] is not None for talk in talks[40:]))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("format_name", ["alpaca", "prompt_completion"])
def test_sixty_rows_of_text(format_name: str, kind: str, tmp_path: Path, tokenise: Tokenise, tokenizer: Any) -> None:
    rows, expected = [], []
    for number in range(60):
        place, more = PLACES[number % 6], [None, "", f"today, {number}"][number % 3]
        system = f"Be brief, {number}." if number % 4 == 0 else None
        answer = " " * (number % 2) + f"It is {place}.\n" * (1 + number % 3)
        if format_name == "alpaca":
            rows.append({"instruction": f"How is {place}?", "input": more, "output": answer, "system": system})
            prompt = f"{system}\n\n" if system else ""
            prompt += f"### Instruction:\nHow is {place}?\n\n" + (f"### Input:\n{more}\n\n" if more else "") + "### Response:\n"
        else:
            prompt = f"How is {place}, {more}? "
            rows.append({"prompt": prompt, "completion": answer, "tools": None})
        one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        expected.append(([0, *one, *two, 1], [0] * (1 + len(one)) + [1] * (len(two) + 1)))
    made = tokenise(*_files(tmp_path, kind, rows), max_seq_len=4096)
    assert {name for _, name in made.summary.formats} == {format_name}
    _compare(made, expected)


def _chat(*answers: Raw, **row: Any) -> Raw:
    messages: list[Raw] = []
    for number, answer in enumerate(answers):
        messages += [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "", **answer}]
    return {"messages": messages, **row}


def _call(arguments: Any, name: str = "tide") -> Raw:
    return {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


TEXT = '{"port":"Torvane", "at": null}'
VERBATIM = OWN.replace("c.function.arguments | tojson", "c.function.arguments")  # takes text only
ADDING = OWN.replace(
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}",
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments }}",
)
ITEMS = OWN.replace(
    "{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
WHOLE = OWN.replace("{{ c.function.name }} {{ c.function.arguments | tojson }}", "{{ c.function | tojson }}")


@pytest.mark.parametrize(
    ("template", "arguments", "said", "noted"),
    [
        (OWN, TEXT, 'tide {"port": "Torvane", "at": null}', {"arguments_read"}),
        (OWN, json.loads(TEXT), 'tide {"port": "Torvane"}', {"nulls"}),
        (OWN, "{}", "tide {}", {"arguments_read"}),
        (OWN, "Torvane", 'tide "Torvane"', set()),  # no JSON text of an object
        (VERBATIM, TEXT, f"tide {TEXT}", set()),
        (VERBATIM, {"port": "Torvane"}, 'tide {"port": "Torvane"}', {"arguments_written"}),
        (ADDING, TEXT, f"tide {TEXT}", set()),
        (ADDING, {"port": "Torvane"}, 'tide {"port": "Torvane"}', {"arguments_written"}),
        (ITEMS, '{"port": "Torvane"}', "tide port=Torvane", {"arguments_read"}),
        (WHOLE, '{"port": "Torvane"}', '{"name": "tide", "arguments": {"port": "Torvane"}}', {"arguments_read"}),
    ],
)
def test_arguments_are_written_once(
    template: str, arguments: Any, said: str, noted: set[str], write: Write, tokenise: Tokenise, tokenizer: Any
) -> None:
    """Objects and JSON text both, to templates that write JSON and to those that take text."""
    rows = tokenise(write("calls.jsonl", [_chat(_call(arguments))]), chat_template=template, max_seq_len=512)
    assert learnt(rows, tokenizer) == f"<call>{said}</call><|im_end|>"
    assert set(rows.summary.noted) == {"marks", *noted}
    assert len(rows.summary.notes) == len(noted)


def test_what_a_user_says_is_no_fault(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    """A question may quote Python's notation or JSON text."""
    said = [{"role": "user", "content": "{'port': 'Torvane'} or " + json.dumps('{"port": "Torvane"}')}]
    for arguments, template in (({"port": "Torvane"}, OWN), ('{"port": "Torvane"}', VERBATIM)):
        row = {"messages": [*said, {"role": "assistant", "content": "", **_call(arguments)}]}
        rows = tokenise(write("calls.jsonl", [row]), chat_template=template, max_seq_len=512)
        assert learnt(rows, tokenizer) == '<call>tide {"port": "Torvane"}</call><|im_end|>' and set(rows.summary.noted) == {
            "marks"
        }


def test_calls_that_cannot_be_written_are_refused(write: Write, tokenise: Tokenise, tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    from pyarrow.parquet import write_table

    file = write("calls.jsonl", [_chat({"content": "b"}), _chat(_call('{"port": "Torv'))])
    with pytest.raises(UsageError, match=r"calls.jsonl:2: message 2: .* writes the arguments of tide as JSON text inside JSON"):
        tokenise(file, chat_template=OWN, max_seq_len=512)
    file = write("calls.jsonl", [_chat(_call({"port": "Torvane"}))])
    with pytest.raises(UsageError, match=r"calls.jsonl:1: message 2: .* writes the arguments of tide in Python's notation"):
        tokenise(file, chat_template=WHOLE.replace("c.function | tojson", "c"), max_seq_len=512)
    for calls, words in (
        ("[{", "tool_calls: not valid JSON"),
        ({"name": "tide"}, "tool_calls must be a list of objects"),
        ([], "no content"),
    ):
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]}
        with pytest.raises(UsageError, match=f"calls.jsonl:1: message 2 of messages.*{words}"):
            tokenise(write("calls.jsonl", [row]), chat_template=OWN)
    write_table(
        pa.table({"messages": [_chat(_call({"at": datetime.datetime(2026, 1, 1)}))["messages"]]}), tmp_path / "times.parquet"
    )
    with pytest.raises(
        UsageError, match=r"row 1: message 2 of messages: tool_calls: a value is of type datetime, which JSON does"
    ):
        tokenise(tmp_path / "times.parquet", chat_template=OWN)


def test_tools_and_calls_as_json_text_are_read(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    """All of them, one of them, or its parameters, with the nulls that such a text means."""
    tool = {"type": "function", "function": {"name": "tide", "parameters": {"properties": {"port": {"default": None}}}}}
    inner = {**tool, "function": {**tool["function"], "parameters": json.dumps(tool["function"]["parameters"])}}
    calls = json.dumps(_call({"at": None})["tool_calls"])
    told = [_chat({"tool_calls": calls}, tools=tools) for tools in (json.dumps([tool]), [json.dumps(tool)], [inner])]
    rows = tokenise(write("tools.jsonl", told), chat_template=OWN, max_seq_len=512)
    for index in range(3):
        assert json.dumps(tool) in whole(rows, tokenizer, index)
        assert learnt(rows, tokenizer, index) == '<call>tide {"at": null}</call><|im_end|>'
    for tools, words in (("[", ": not valid JSON"), ([5], ": tool 1 must be an object"), (["["], ": tool 1: not valid JSON")):
        with pytest.raises(UsageError, match=f"tools.jsonl:1: the column tools{words}"):
            tokenise(write("tools.jsonl", [_chat({"content": "b"}, tools=tools)]), chat_template=OWN)


PARTED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
PARTED += "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}({{ part.text }}){% endif %}{% endfor %}"
PARTED += "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML_UNMARKED, "one two<|im_end|>"),
        (CHATML_UNMARKED.replace("{{ message['content'] }}", "{{ message['content'] + '' }}"), "one two<|im_end|>"),
        (CHATML_UNMARKED.replace("{{ message['content'] }}", "{{ message['content'] | trim }}"), "one two<|im_end|>"),
        (PARTED, "(one )(two)<|im_end|>"),
    ],
    ids=["as it is", "refuses lists", "trims", "takes parts"],
)
def test_content_in_parts(template: str, said: str, write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "one ", "image": None}, {"type": "text", "text": "two"}]
    rows = tokenise(write("parts.jsonl", [_chat({"content": parts})]), chat_template=template, max_seq_len=512)
    assert learnt(rows, tokenizer) == said
    assert ("parts_joined" in rows.summary.noted) == (template != PARTED)
    image = {"messages": [{"role": "user", "content": [{"type": "image"}, parts[0]]}, {"role": "assistant", "content": "b"}]}
    file = write("parts.jsonl", [image])
    if template == PARTED:
        assert "user\n<image>(one )<" in whole(tokenise(file, chat_template=template), tokenizer)
    else:
        words = "message 1: .* in Python's notation, and not all" if "+" not in template else "refuses this conversation"
        with pytest.raises(UsageError, match=f"parts.jsonl:1: .*{words}"):
            tokenise(file, chat_template=template)


def test_what_a_template_leaves_out_is_noted(write: Write, tokenise: Tokenise) -> None:
    """As a template that knows only texts does."""
    answer = {**_call({"port": "Torvane"}), "content": "asks", "reasoning_content": "why not"}
    rows = [_chat(answer, {"content": "b"}, tools=[_tool(0)]), _chat(answer)]
    summary = tokenise(write("calls.jsonl", rows), chat_template=CHATML_UNMARKED, max_seq_len=512).summary
    assert summary.noted == {"prefixes": 2, "calls_left_out": 2, "tools_left_out": 1, "reasoning_left_out": 1}
    assert any(note.startswith("in 2 of 2 samples the chat template leaves out tool calls") for note in summary.notes)
    assert any(note.endswith("is not learnt; the first is calls.jsonl:2") for note in summary.notes)
    assert set(tokenise(write("calls.jsonl", rows), chat_template=OWN_UNMARKED, max_seq_len=512).summary.noted) == {"prefixes"}


A, B, C = ({"content": text} for text in "abc")
UNLEARNT = {**A, "train": False}
TURN = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
TURN += "{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ENDS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
ENDS += "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
TWO = CHATML_MARKED.replace(
    "{{ message['content'] }}<|im_end|>{% endgen",
    "{{ message['content'] }}{% endgeneration %} {% generation %}<|im_end|>{% endgen", 1,
)  # fmt: skip
# name -> template, rows of answers, what of each is learnt, what is noted of all
FOUND: dict[str, tuple[str, list[list[Raw]], list[str], Raw]] = {
    # `assistant_masks` ends with the first of the tokens of a last character
    "marks end with the last character": (
        CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}\n"), [[{"content": "a<|im_end|> 🙂"}]],
        ["a<|im_end|> 🙂"], {"marks": 1},
    ),
    # transformers takes what a macro writes before a mark for none of its text, so that the mark is too far to the left
    "marks inside a macro": (
        "{% macro turn(m) %}" + TURN + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}" + ASKS,
        [[{"content": "7 apples"}, {"content": "4"}]], ["7 apples<|im_end|>4<|im_end|>"], {"prefixes": 1, "marks_misplaced": 1},
    ),
    # as those do that TRL trains reasoning with
    "marks of what the prompt begins": (
        CHATML_MARKED.replace("{% generation %}", "{% generation %}<think>").replace(
            "assistant\n{% endif", "assistant\n<think>{% endif"
        ),
        [[A, {**B, "train": False}]], ["<think>a<|im_end|>"], {"marks": 1},
    ),
    "marks of the header": (
        CHATML_MARKED.replace("<|im_start|>{{ message['role'] }}\n", "", 1).replace(
            "{% generation %}", "{% generation %}<|im_start|>assistant\n"
        ),
        [[A, B]], ["<|im_start|>assistant\na<|im_end|><|im_start|>assistant\nb<|im_end|>"], {"marks": 1},
    ),
    # what a template marks is its own choice; that it leaves out an answer, or holds others, is said
    "no marks of one answer": (
        CHATML_MARKED.replace("== 'assistant'", "== 'assistant' and message['content'] != 'b'"), [[A, B, C]],
        ["a<|im_end|>c<|im_end|>"], {"marks": 1, "marks_missing": 1},
    ),
    "marks of questions": (
        CHATML_MARKED.replace("== 'assistant'", "!= 'system'"), [[A]], ["0?<|im_end|>a<|im_end|>"],
        {"marks": 1, "marks_of_others": 1},
    ),
    "two marks of an answer": (
        TWO, [[UNLEARNT, B], [A, B]], ["b<|im_end|>", "a<|im_end|>b<|im_end|>"], {"marks": 2},
    ),
    # the end token behind the last message, as of Phi 3, is nowhere once more messages follow
    "an end behind every rendering": (ENDS, [[{"content": "a b"}, C]], ["a b\nc\n<|im_end|>"], {"prefixes": 1}),
    "a token across the border": (
        CHATML_UNMARKED.replace("assistant\n{% endif", "assistant\nth{% endif").replace(
            "}}\n", "}}\n{{ 'th' if message.role == 'assistant' }}", 1
        ),
        [[{"content": "e oven"}], [{"content": "7"}]], [" oven<|im_end|>", "7<|im_end|>"], {"prefixes": 2, "border": 1},
    ),
    "a message with the end of its turn": (
        CHATML, [[A], [{"content": "a<|im_end|>"}]], ["a<|im_end|>", "a<|im_end|><|im_end|>"], {"marks": 2, "doubled": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_what_a_template_has_learnt(case: str, write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    template, answers, said, noted = FOUND[case]
    rows = tokenise(write("chat.jsonl", [_chat(*each) for each in answers]), chat_template=template)
    assert [learnt(rows, tokenizer, number) for number in range(len(said))] == said
    assert rows.summary.noted == noted


def test_marks_that_overlap_are_one(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the library says that they begin and end."""
    found = ["x" * 20], [[(8, 12), (2, 9), (3, 5), (15, 15)]]
    monkeypatch.setattr("transformers.utils.chat_template_utils.render_jinja_template", lambda **_: found)
    chat = Chat(messages=({"role": "user", "content": "a"},))
    assert Conversations(tokenizer, template="any")._marks(chat) == [(2, 12)]


def test_two_marks_of_the_last_answer(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    rows = tokenise(write("chat.jsonl", [_chat(A, B)]), chat_template=TWO, loss_on="last_assistant")
    assert learnt(rows, tokenizer) == "b<|im_end|>"


def test_marks_where_a_token_drops_blanks(write: Write, tokenise: Tokenise, tmp_path: Path) -> None:
    """A mark that ends with a line break, which the tokenizer gives no token: the next question is not learnt."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "<user>", "<bot>", "question", "answer", "one", "two"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }}\n{% else %}<bot> {% generation %}"
        "{{ m.content }} <eos>\n{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "words")
    talk = [
        {"role": role, "content": f"{what} {n}"}
        for n in ("one", "two")
        for role, what in (("user", "question"), ("assistant", "answer"))
    ]
    rows = tokenise(write("chat.jsonl", [{"messages": talk}]), tokenizer_dir=tmp_path / "words")
    assert rows.tokens(0).tolist() == [2, 4, 6, 3, 5, 6, 1, 2, 4, 7, 3, 5, 7, 1]
    assert rows.mask(0).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_a_template_that_takes_parts_only_and_asks_for_nothing(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    template = "{% for m in messages %}{% for part in m.content %}{{ '[' + part.text + ']' }}{% endfor %}<|im_end|>{% endfor %}"
    silent = template.replace("part in m.content", "part in m.content if part.type == 'text'")  # of a text it writes nothing
    for said, noted in ((lambda text: [{"type": "text", "text": text}], set()), (str, {"parts_made"})):
        row = {"messages": [{"role": role, "content": said(role)} for role in ("user", "assistant")]}
        for each in (template, silent):
            rows = tokenise(write("chat.jsonl", [row]), chat_template=each)
            assert learnt(rows, tokenizer) == "assistant]<|im_end|>"
            assert set(rows.summary.noted) == {"prefixes", "unasked", *noted}


def test_a_template_for_tools_without_marks(
    write: Write, tokenise: Tokenise, tokenizer: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Of several templates, the one that a conversation gets says how its mask is found."""
    from transformers import AutoTokenizer

    several = AutoTokenizer.from_pretrained(tokenizer_dir)
    several.chat_template = {"default": OWN, "tool_use": OWN_UNMARKED}
    several.save_pretrained(tmp_path / "several")
    rows = tokenise(
        write("chat.jsonl", [_chat({"content": "a"}), _chat({"content": "b"}, tools=[_tool(0)])]),
        tokenizer_dir=tmp_path / "several", max_seq_len=512,
    )  # fmt: skip
    assert [learnt(rows, tokenizer, n) for n in range(2)] == ["a<|im_end|>", "b<|im_end|>"]
    assert rows.summary.noted == {"marks": 1, "prefixes": 1}


def test_a_template_that_asks_for_no_answer(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    """What it writes before one is no part of it, whether it never asks or not behind a tool: the label of the first answer's
    token is kept. Blanks before an answer are the model's to write."""
    never = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    some = never + "{% if add_generation_prompt and messages[-1].role == 'user' %}ASSISTANT:{% endif %}"
    talk = [*_chat({"content": "a"})["messages"], {"role": "tool", "content": "12"}, {"role": "assistant", "content": "x y"}]
    for template in (never, some):
        rows = tokenise(write("chat.jsonl", [{"messages": talk}]), chat_template=template)
        assert [said.strip() for said in learnt(rows, tokenizer).split("<|im_end|>")] == ["a", "x y", ""]
        assert rows.summary.noted == {"prefixes": 1, "unasked": 1}
        assert "ignores add_generation_prompt" in rows.summary.notes[0]
    blank = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %} {{ m.content }}<|im_end|>"
    blank += "{% endif %}{% endfor %}"
    rows = tokenise(write("chat.jsonl", [_chat({"content": "7"})]), chat_template=blank)
    assert learnt(rows, tokenizer) == " 7<|im_end|>" and rows.summary.noted == {"prefixes": 1}


def test_a_refusal_advises_what_helps(write: Write, tokenise: Tokenise) -> None:
    """Where the last answer cannot be found either, to learn it alone is no way out."""
    begun = CHATML_UNMARKED.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    for number, advised in ((1, False), (2, True)):
        talk = _chat({"content": "a"})["messages"] * number
        with pytest.raises(UsageError, match="differently") as refused:
            tokenise(write("chat.jsonl", [{"messages": talk}]), chat_template=begun)
        assert ("last_assistant" in refused.value.message) == advised


@pytest.mark.parametrize(
    ("row", "text", "said", "noted"),
    [
        ({"text": "<|bos|>a b<|im_end|>"}, "<|bos|>a b<|im_end|>", None, {"own_start", "own_end"}),
        ({"text": "a b<|im_end|>\n"}, "<|bos|>a b<|im_end|>\n", None, {"own_end"}),
        ({"text": "a<|im_end|>b"}, "<|bos|>a<|im_end|>b<|im_end|>", None, set()),
        ({"prompt": "<|bos|>a ", "completion": "b<|im_end|>"}, "<|bos|>a b<|im_end|>", "b<|im_end|>", {"own_start", "own_end"}),
        ({"prompt": "", "completion": "<|bos|>b"}, "<|bos|>b<|im_end|>", None, {"own_start"}),
        ({"prompt": "a<|im_end|>", "completion": " b"}, "<|bos|>a<|im_end|> b<|im_end|>", " b<|im_end|>", set()),
        ({"instruction": "a", "output": "b<|im_end|>"}, None, "b<|im_end|>", {"own_end"}),
    ],
)
def test_start_and_end_tokens_of_a_text_are_not_doubled(
    row: Raw, text: str | None, said: str | None, noted: set[str], write: Write, tokenise: Tokenise, tokenizer: Any
) -> None:
    rows = tokenise(write("rows.jsonl", [row]))
    assert text is None or whole(rows, tokenizer) == text
    assert said is None or learnt(rows, tokenizer) == said
    assert set(rows.summary.noted) == noted
    assert len([note for note in rows.summary.notes if "no second one is added" in note]) == len(noted)


def test_ids_above_a_hole_of_the_vocabulary(
    write: Write, tokenise: Tokenise, tokenizer: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "holed"
    tokenizer.save_pretrained(folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    words = told["model"]["vocab"]
    last = max(words, key=words.get)
    words[last] += 20
    (folder / "tokenizer.json").write_text(json.dumps(told))
    rows = tokenise(write("ids.jsonl", [{"input_ids": [5, words[last], 1]}]), tokenizer_dir=folder)
    assert rows.tokens(0).tolist() == [5, words[last], 1]
    with pytest.raises(UsageError, match=rf"ids.jsonl:1: token 2 is {words[last] + 1}, outside .* \(0 to {words[last]}\)"):
        tokenise(write("ids.jsonl", [{"input_ids": [5, words[last] + 1, 1]}]), tokenizer_dir=folder)


def test_prompt_and_completion_as_conversations(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    """Beside texts in one file. The assistant's messages of the prompt are not learnt; with `loss_on: all` everything is."""
    asked = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "2?"}]
    answer = [{"role": "assistant", "content": "two"}]
    file = write(
        "pairs.jsonl",
        [{"prompt": "a ", "completion": "b"}, {"prompt": asked, "completion": answer}, {"prompt": "c ", "completion": "d"}],
    )
    for template in (CHATML_MARKED, CHATML_UNMARKED):
        rows = tokenise(file, chat_template=template)
        assert [learnt(rows, tokenizer, n) for n in range(3)] == ["b<|im_end|>", "two<|im_end|>", "d<|im_end|>"]
        assert whole(rows, tokenizer, 1) == tokenizer.apply_chat_template(
            asked + answer, chat_template=template, tokenize=False
        )
        assert tokenise(file, chat_template=template, loss_on="all").mask(1).all()
    for row, words in (
        ({"prompt": asked, "completion": "two"}, "the column completion must be a list of messages"),
        ({"prompt": "2?", "completion": answer}, "the column prompt must be a list of messages"),
        ({"prompt": asked, "completion": asked[:1]}, "the column completion has no message of the assistant"),
        ({"prompt": asked, "completion": [{"role": "assistant"}]}, "message 1 of completion has no content"),
    ):
        with pytest.raises(UsageError, match=f"pairs.jsonl:1: {words}"):
            tokenise(write("pairs.jsonl", [row]), chat_template=CHATML_UNMARKED)


def test_a_prompt_to_answer_takes_the_same_forms(tokenizer: Any, tokenizer_dir: Path) -> None:
    """Of a row with or without its completion."""
    asked = [{"role": "user", "content": [{"type": "text", "text": "2?"}]}]
    given = Tokeniser(tokenizer, directory=tokenizer_dir)
    for row in ({"prompt": asked}, {"prompt": asked, "completion": [{"role": "assistant", "content": "4"}]}):
        prompt = prompt_of(row, chat=True)
        assert isinstance(prompt, Chat) and prompt.messages == tuple(asked)
        assert tokenizer.decode(given.prompt(prompt)) == "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_row_sets_variables_of_the_template(write: Write, tokenise: Tokenise, tokenizer: Any) -> None:
    """In TRL's column."""
    template = "{% if brief %}Be brief.\n{% endif %}" + CHATML_MARKED
    rows = tokenise(
        write("chat.jsonl", [_chat({"content": "a"}, chat_template_kwargs=given) for given in ({"brief": True}, None)]),
        chat_template=template,
    )
    assert [whole(rows, tokenizer, n).startswith("Be brief.") for n in range(2)] == [True, False]
    assert learnt(rows, tokenizer) == learnt(rows, tokenizer, 1) == "a<|im_end|>"
    for given, words in (({"tokenize": True}, "has tokenize"), ([1], "must be an object")):
        with pytest.raises(UsageError, match=f"chat.jsonl:1: .*chat_template_kwargs {words}"):
            tokenise(write("chat.jsonl", [_chat({"content": "a"}, chat_template_kwargs=given)]), chat_template=template)
