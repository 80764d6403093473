"""What the report of a changed turn names, with prompts in the forms of several families."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from art_protocol.wire import HistoryBody
from art_server.jobs.differences import (
    ANSWER,
    TEMPLATE,
    TOOLS,
    FirstDifference,
    OtherHistory,
    of_histories,
    of_prompt,
)
from art_server.jobs.turns import TurnSpan
from art_server.ledger import conversation

SYSTEM = {"role": "system", "content": "You are a careful assistant."}
USER = {"role": "user", "content": "What is the weather in Paris?"}
RESULT = {"role": "tool", "content": "sunny"}
ANSWERS = ("I will look.", "It is sunny.")


def tool(name: str, about: str = "Current weather in a city", unit: str = "city") -> dict[str, Any]:
    schema = {"type": "object", "properties": {unit: {"type": "string"}}, "required": [unit]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def qwen(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), date: str = "1 May") -> str:
    """Definitions behind the system message, a line each."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else f"Today is {date}."
    text = f"<|im_start|>system\n{system}"
    if tools:
        lines = "".join(f"\n{json.dumps(definition)}" for definition in tools)
        text += f"\n\n# Tools\n\nYou may call functions:\n<tools>{lines}\n</tools>\n\nFor each call, return JSON."
    text += "<|im_end|>\n"
    for message in messages:
        if message["role"] != "system":
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n"


def llama(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), date: str = "1 May") -> str:
    """A date before the system message, definitions in several lines before the user's."""
    rest = list(messages)
    system = rest.pop(0)["content"] if rest[0]["role"] == "system" else ""
    text = f"<|start|>system\nToday Date: {date}\n\n{system}<|eot|>"
    for number, message in enumerate(rest):
        listed = ""
        if tools and not number:
            listed = "\n\n".join(json.dumps(definition, indent=4) for definition in tools) + "\n\n"
        text += f"<|start|>{message['role']}\n{listed}{message['content']}<|eot|>"
    return f"{text}<|start|>assistant\n"


def gpt_oss(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), date: str = "1 May") -> str:
    """Definitions as TypeScript."""
    text = f"<|start|>system<|message|>Current date: {date}<|end|>"
    rest = list(messages)
    text += "<|start|>developer<|message|>"
    text += rest.pop(0)["content"] if rest[0]["role"] == "system" else ""
    if tools:
        functions = [definition["function"] for definition in tools]
        types = "".join(
            f"// {function['description']}\ntype {function['name']} = (_: object) => any;\n" for function in functions
        )
        text += f"\n\n# Tools\n\nnamespace functions {{\n{types}}}"
    text += "<|end|>"
    for message in rest:
        text += f"<|start|>{message['role']}<|message|>{message['content']}<|end|>"
    return f"{text}<|start|>assistant"


FAMILIES = {"qwen": qwen, "llama": llama, "gpt-oss": gpt_oss}
WEATHER, TIME = tool("get_weather"), tool("get_time", "Current time in a city")
Case = tuple[dict[str, Any], dict[str, Any], str]
CHANGES: dict[str, Case] = {
    "a tool more": ({"tools": [WEATHER]}, {"tools": [WEATHER, TIME]}, TOOLS),
    "a tool less": ({"tools": [WEATHER, TIME]}, {"tools": [TIME]}, TOOLS),
    "tools in another order": ({"tools": [WEATHER, TIME]}, {"tools": [TIME, WEATHER]}, TOOLS),
    "first tools": ({}, {"tools": [WEATHER]}, TOOLS),
    "no tools": ({"tools": [WEATHER]}, {}, TOOLS),
    "another description": ({"tools": [WEATHER]}, {"tools": [tool("get_weather", "Weather")]}, TOOLS),
    "another date": ({}, {"date": "2 May"}, TEMPLATE),
    "another date beside tools": ({"tools": [WEATHER]}, {"tools": [WEATHER], "date": "2 May"}, TEMPLATE),
    "another system message": ({"system": "You are careless."}, {}, "the system message"),
    "another question": ({"user": "What is the time in Paris?"}, {}, "the user message"),
    "another question beside tools": (
        {"user": "What is the time in Paris?", "tools": [WEATHER]}, {"tools": [WEATHER]}, "the user message",
    ),
    "no question": ({"user": None}, {}, "the user message"),
}  # fmt: skip


def opening(system: str | None, user: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return [message for message in messages if message["content"] is not None]


def compared(
    family: str, first: dict[str, Any], second: dict[str, Any], has_system: bool = True
) -> FirstDifference | None:
    """Of a second turn, whose request was rendered differently. The history has the messages of the second."""
    render = FAMILIES[family]
    system = SYSTEM["content"] if has_system else None

    def rendered(options: dict[str, Any], *more: dict[str, Any]) -> str:
        fields = dict(options)
        start = opening(fields.pop("system", system), fields.pop("user", USER["content"]))
        return render([*start, *more], **fields)

    answer = {"role": "assistant", "content": ANSWERS[0]}
    choice = {"finish_reason": "stop", "message": answer}
    before = rendered(first)
    sequence = before + ANSWERS[0]
    prompt = rendered(second, answer, RESULT)
    entries = [*opening(system, USER["content"]), choice, RESULT, choice]
    history = HistoryBody.model_validate({"messages_and_choices": entries, "tools": second.get("tools")})
    turns = [(len(entries) - 3, TurnSpan(0, len(before), len(sequence), False))]
    return of_prompt(history, turns, [*map(ord, sequence)], [*map(ord, prompt)], lambda ids: "".join(map(chr, ids)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_turn_names_what_changed(family: str, change: str) -> None:
    first, second, whose = CHANGES[change]
    if whose == TEMPLATE:  # Qwen has a date where there is no system message
        difference = compared(family, first, second, has_system=family != "qwen")
    else:
        difference = compared(family, first, second)
    assert difference is not None and difference.whose == whose, difference
    assert difference.expected != difference.actual


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_system_message_neither_tools_nor_a_date_are_the_users_message(family: str) -> None:
    for change in ("a tool more", "first tools", "no tools", "another date beside tools"):
        first, second, whose = CHANGES[change]
        difference = compared(family, first, second, has_system=False)
        assert difference is not None and difference.whose == whose, (change, difference)


def test_an_edited_answer_is_an_answer() -> None:
    render = FAMILIES["qwen"]
    before = render([SYSTEM, USER])
    edited = {"role": "assistant", "content": "I will search."}
    prompt = render([SYSTEM, USER, edited, RESULT])
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": ANSWERS[0]}}
    history = HistoryBody.model_validate({"messages_and_choices": [SYSTEM, USER, choice, RESULT, choice]})
    sequence = before + ANSWERS[0]
    turns = [(2, TurnSpan(0, len(before), len(sequence), False))]
    difference = of_prompt(
        history, turns, [*map(ord, sequence)], [*map(ord, prompt)], lambda ids: "".join(map(chr, ids))
    )
    assert difference is not None and difference.whose == ANSWER
    assert difference.num_tokens == len("look."), "a character is a token here"


def test_histories_with_other_tools_differ_in_their_tools() -> None:
    choices = [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}} for text in ANSWERS]
    plain = {"role": "assistant", "content": ANSWERS[0]}

    def history(entries: list[Any], *tools: dict[str, Any]) -> HistoryBody:
        return HistoryBody.model_validate({"messages_and_choices": entries, "tools": list(tools)})

    def digests(entries: list[Any]) -> list[bytes]:
        return conversation.prefix_digests([entry.get("message", entry) for entry in entries])

    first, second = [USER, choices[0]], [USER, plain, RESULT, choices[1]]
    for tools, whose in (([TIME], TOOLS), ([WEATHER], "the tool message")):
        earlier = [OtherHistory(history(first, WEATHER), digests(first), [[1, 2, 3, 4], [1, 5]])]
        difference = of_histories(earlier, history(second, *tools), digests(second), 3, [1, 2, 9, 4, 5])
        assert difference is not None and (difference.whose, difference.num_tokens) == (whose, 2)
