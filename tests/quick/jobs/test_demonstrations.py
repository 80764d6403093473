"""A table of what demonstrations train: each shape of messages that OpenAI's API or a data set has, over ten templates.

A row of `SHAPES` says what the assistant says, turn by turn, and how many tokens of that are trained with Qwen3's template,
counted by hand: `<think>`, a line break, two line breaks, `</think>` and the end of the turn are one token each there. A
function of `TEMPLATES` says how a family writes an answer; None is an answer that the family cannot be taught. With each
template as many tokens are trained as this text has.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from art_server.errors import InvalidInput
from tests.quick.jobs.written_turns import train_demonstrations
from tests.quick.ledger.chat_families import FAMILIES, THINKING, Family
from tests.refusals import refused

Message = dict[str, Any]


class Call(NamedTuple):
    arguments: dict[str, Any]
    name: str = "add"


class Says(NamedTuple):
    """An answer."""

    content: str = ""
    thinking: str | None = None
    calls: tuple[Call, ...] = ()
    in_content: str | None = None
    """Thinking with its marks in the content, as the demonstration spells it."""


class Shape(NamedTuple):
    """Messages, and what is trained of them."""

    messages: list[Message]
    says: list[Says]
    tools: Any = None
    num_tokens: int | None = None
    """With Qwen3's template."""


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}}},
    },
}
FILLED = {
    "type": "function",
    "strict": None,
    "function": {
        "name": "add",
        "description": None,
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "enum": None, "items": None, "default": None},
                "b": {"type": ["integer", "null"], "enum": None},
                "of_another_row": None,
            },
        },
    },
}
BOTH = Call({"a": 2, "b": 3})
TEXT = '{"a": 2, "b": 3}'


def user(content: Any = "q", **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def said(**fields: Any) -> Message:
    return {"role": "assistant", **fields}


def call(arguments: Any = TEXT, identity: Any = "call12345", **more: Any) -> Message:
    return {"id": identity, "type": "function", "function": {"name": "add", "arguments": arguments}, **more}


def result(**more: Any) -> Message:
    return {"role": "tool", "tool_call_id": "call12345", "content": "5", **more}


def choice(message: Message) -> Message:
    """Of another server, as its client keeps it."""
    return {"index": 0, "finish_reason": "stop", "logprobs": None, "message": message}


def asked(*answer: Message) -> list[Message]:
    return [user(), *answer]


NULLS = dict.fromkeys(
    ("name", "tool_calls", "reasoning_content", "refusal", "function_call", "audio", "annotations", "weight")
)
FIVE = Says("5")
CALLS = Says(calls=(BOTH,))
MARKED = "<think>\nplan\n</think>\n\n5"
PLANNED = Says("5", "plan", in_content=MARKED)
TIGHT = "<think>plan</think>5"

SHAPES = {
    # --- content
    "text": Shape(asked(said(content="5")), [FIVE], num_tokens=6),
    "one part": Shape(asked(said(content=[{"type": "text", "text": "5"}])), [FIVE], num_tokens=6),
    "two parts": Shape(
        asked(said(content=[{"type": "text", "text": "5"}, {"type": "text", "text": "6"}])), [Says("5\n6")]
    ),
    "parts filled with null": Shape(asked(said(content=[{"type": "text", "text": "5", "image_url": None}])), [FIVE]),
    "a part without type": Shape(asked(said(content=[{"text": "5"}])), [FIVE], num_tokens=6),
    "a refusal": Shape(asked(said(content=None, refusal="no")), [Says("no")], num_tokens=6),
    "a part that refuses": Shape(
        asked(said(content=[{"type": "refusal", "refusal": "no"}])), [Says("no")], num_tokens=6
    ),
    "an empty text": Shape(asked(said(content="")), [Says("")], num_tokens=5),
    "fields filled with null": Shape([user(**NULLS), said(content="5", **NULLS)], [FIVE], num_tokens=6),
    "other columns": Shape(
        [user(id=7, audio="a", task=3), said(content="5", score=0.5, audio=1)], [FIVE], num_tokens=6
    ),
    "no calls": Shape(asked(said(content="5", tool_calls=[])), [FIVE], num_tokens=6),
    "a spelled end": Shape(asked(said(content="a<|im_end|>b")), [Says("a<|im_end|>b")]),
    # --- the conversation around
    "the question in parts": Shape(
        [user([{"type": "text", "text": "q", "image_url": None}]), said(content="5")], [FIVE]
    ),
    "an answer first": Shape([said(content="5"), user(), said(content="6")], [FIVE, Says("6")]),
    "a question last": Shape([user(), said(content="5"), user("bye")], [FIVE], num_tokens=6),
    "two turns": Shape([*asked(said(content="5")), *asked(said(content="6"))], [FIVE, Says("6")], num_tokens=12),
    "instructions": Shape(
        [{"role": "system", "content": "Add.", "name": None, "tool_calls": None}, *asked(said(content="5"))], [FIVE]
    ),
    # --- calls
    "call, content null": Shape(asked(said(content=None, tool_calls=[call()])), [CALLS], [ADD]),
    "call, content absent": Shape(asked(said(tool_calls=[call()])), [CALLS], [ADD]),
    "call, content empty": Shape(asked(said(content="", tool_calls=[call()])), [CALLS], [ADD]),
    "call, no parts": Shape(asked(said(content=[], tool_calls=[call()])), [CALLS], [ADD]),
    "call, content": Shape(asked(said(content="I add.", tool_calls=[call()])), [Says("I add.", calls=(BOTH,))], [ADD]),
    "call, content in parts": Shape(
        asked(said(content=[{"type": "text", "text": "I add."}], tool_calls=[call()])), [Says("I add.", calls=(BOTH,))]
    ),
    "call, as OpenAI dumps it": Shape(asked(said(content=None, **NULLS | {"tool_calls": [call()]})), [CALLS], [ADD]),
    "call, arguments as object": Shape(asked(said(content=None, tool_calls=[call({"a": 2, "b": 3})])), [CALLS], [ADD]),
    "call, without id": Shape(asked(said(content=None, tool_calls=[call(identity=None)])), [CALLS], [ADD]),
    "call, filled with null": Shape(
        asked(said(content=None, tool_calls=[call(type=None, index=None, custom=None)])), [CALLS]
    ),
    "call, arguments null": Shape(asked(said(content=None, tool_calls=[call(None)])), [Says(calls=(Call({}),))]),
    "call, arguments empty": Shape(asked(said(content=None, tool_calls=[call("")])), [Says(calls=(Call({}),))]),
    "call, arguments that a table filled": Shape(
        asked(said(content=None, tool_calls=[call({"a": 2, "b": 3, "city": None})])), [CALLS], [ADD]
    ),
    "call, an argument that may be null": Shape(
        asked(said(content=None, tool_calls=[call({"a": 2, "b": None})])),
        [Says(calls=(Call({"a": 2, "b": None}),))],
        [ADD],
    ),
    "call, a null in arguments as text": Shape(
        asked(said(content=None, tool_calls=[call('{"city": null}')])), [Says(calls=(Call({"city": None}),))], [ADD]
    ),
    "call, no schema": Shape(
        asked(said(content=None, tool_calls=[call({"city": None})])), [Says(calls=(Call({"city": None}),))]
    ),
    "two calls": Shape(
        asked(said(content=None, tool_calls=[call(), call('{"a": 1}', "call12346")])),
        [Says(calls=(BOTH, Call({"a": 1})))],
        [ADD],
    ),
    "one call in the older form": Shape(
        asked(said(content=None, function_call={"name": "add", "arguments": TEXT})), [CALLS], [ADD]
    ),
    "older form, its result and an answer": Shape(
        [
            *asked(said(content=None, function_call={"name": "add", "arguments": TEXT})),
            {"role": "function", "name": "add", "content": "5"},
            said(content="5"),
        ],
        [CALLS, FIVE],
    ),
    "call, result and answer": Shape(
        [*asked(said(content=None, tool_calls=[call()]), result(), said(content="5"))], [CALLS, FIVE]
    ),
    "result filled with null": Shape(
        [*asked(said(content=None, tool_calls=[call()]), result(name=None, tool_calls=None), said(content="5"))],
        [CALLS, FIVE],
    ),
    "result in parts": Shape(
        asked(said(tool_calls=[call()]), result(content=[{"type": "text", "text": "5"}]), said(content="5")),
        [CALLS, FIVE],
    ),
    # --- tools
    "tools filled with null": Shape(asked(said(content=None, tool_calls=[call()])), [CALLS], [FILLED]),
    "tools as text": Shape(asked(said(content=None, tool_calls=[call()])), [CALLS], json.dumps([ADD])),
    "each tool as text": Shape(asked(said(content=None, tool_calls=[call()])), [CALLS], [json.dumps(ADD)]),
    # --- thinking
    "reasoning_content": Shape(asked(said(content="5", reasoning_content="plan")), [Says("5", "plan")], num_tokens=8),
    "reasoning": Shape(asked(said(content="5", reasoning="plan")), [Says("5", "plan")], num_tokens=8),
    "thinking": Shape(asked(said(content="5", thinking="plan")), [Says("5", "plan")], num_tokens=8),
    "thoughts before a call": Shape(
        asked(said(content=None, reasoning_content="plan", tool_calls=[call()])), [Says("", "plan", (BOTH,))], [ADD]
    ),
    "thoughts in two turns": Shape(
        [*asked(said(content="5", reasoning_content="plan")), *asked(said(content="6", reasoning_content="plan"))],
        [Says("5", "plan"), Says("6", "plan")],
        num_tokens=16,
    ),
    "thoughts in content": Shape(asked(said(content=MARKED)), [PLANNED], num_tokens=8),
    "thoughts in content, tight": Shape(
        asked(said(content=TIGHT)), [Says("5", "plan", in_content=TIGHT)], num_tokens=8
    ),
    "thoughts in content and a call": Shape(
        asked(said(content=MARKED, tool_calls=[call()])), [Says("5", "plan", (BOTH,), in_content=MARKED)], [ADD]
    ),
    # --- weights
    "weights 0 and 1": Shape(
        [*asked(said(content="5", weight=0)), *asked(said(content="6", weight=1))], [Says("6")], num_tokens=6
    ),
    "weights as a table has them": Shape(
        [
            *asked(said(content="5", weight=0.0)),
            user(weight=None),
            said(content="6", weight=1.0),
            user(),
            said(content="7"),
        ],
        [Says("6"), Says("7")],
    ),
    # --- a teacher's choices
    "a choice": Shape(asked(choice(said(content="5"))), [FIVE], num_tokens=6),
    "a choice that calls": Shape(asked(choice(said(content=None, refusal=None, tool_calls=[call()]))), [CALLS], [ADD]),
    "a choice that thinks": Shape(
        asked(choice(said(content="5", reasoning_content="plan"))), [Says("5", "plan")], num_tokens=8
    ),
}

# --- what the families write ----------------------------------------------------------------------------------------


def hermes(call: Call) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}\n</tool_call>'


def qwen3(says: Says) -> str:
    text = f"<think>\n{says.thinking or ''}\n</think>\n\n{says.content}"
    return joined(text, says, hermes) + "<|im_end|>"


def joined(text: str, says: Says, write: Callable[[Call], str]) -> str:
    """With each call on its own lines."""
    for number, call in enumerate(says.calls):
        text += ("\n" if number or says.content else "") + write(call)
    return text


def qwen2_5(says: Says) -> str:
    return joined(says.in_content or says.content, says, hermes) + "<|im_end|>"


def smollm3(says: Says) -> str:
    return "\n".join([says.in_content or says.content, *map(hermes, says.calls)]) + "<|im_end|>"


def in_xml(call: Call) -> str:
    values = {key: value if isinstance(value, str) else written(value) for key, value in call.arguments.items()}
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call.name}>\n{lines}</function>\n</tool_call>"


def written(value: Any) -> str:
    """As Jinja writes it."""
    return str(value)


def qwen3_5(says: Says) -> str:
    """Its prompt opens the thinking."""
    text = f"{says.thinking or ''}\n</think>\n\n{says.content}"
    for number, call in enumerate(says.calls):
        if number:
            text += "\n"
        elif says.content:
            text += "\n\n"
        text += in_xml(call)
    return text + "<|im_end|>"


def nemotron(says: Says) -> str | None:
    """Its prompt opens the thinking, and an answer without any begins with other tokens than this prompt."""
    if says.thinking is None or says.in_content == TIGHT:
        return None
    text = f"plan\n</think>\n{says.content}" if says.in_content is None else says.in_content.removeprefix("<think>\n")
    calls = "".join(f"{in_xml(call)}\n" for call in says.calls)
    return (text.strip() + "\n" + calls if calls else text) + "<|im_end|>"


def glm(says: Says) -> str:
    content = "\n" + says.content if says.content else ""
    calls = "".join(
        f"\n<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{json.dumps(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in says.calls
    )
    return f"\n<think>{says.thinking or ''}</think>{content}{calls}" + ("<|observation|>" if calls else "<|user|>")


def seed(says: Says) -> str:
    thinking = "" if says.in_content or says.thinking is None else f"<seed:think>\n{says.thinking}\n</seed:think>\n"
    calls = "".join(
        f"\n<seed:tool_call>{call.name}{json.dumps(call.arguments)}</seed:tool_call>" for call in says.calls
    )
    return f"{thinking}{says.in_content or says.content}{calls}<seed:eos>"


def magistral(says: Says) -> str:
    thinking = "" if says.in_content or says.thinking is None else f"[THINK]{says.thinking}[/THINK]"
    calls = "".join(f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(call.arguments)}" for call in says.calls)
    return f"{thinking}{says.in_content or says.content}{calls}</s>"


def llama3(says: Says) -> str | None:
    return None if says.calls else f"{says.in_content or says.content}<|eot_id|>"


def phi4(says: Says) -> str | None:
    return None if says.calls else f"{says.in_content or says.content}<|im_end|>"


TEMPLATES: dict[str, tuple[Family, Callable[[Says], str | None]]] = {
    "Qwen3": (FAMILIES["Qwen3"], qwen3),
    "Qwen3.5": (THINKING["Qwen3.5"], qwen3_5),
    "Qwen2.5": (FAMILIES["Qwen2.5"], qwen2_5),
    "GLM-4.5": (FAMILIES["GLM-4.5"], glm),
    "Nemotron 3 Nano": (THINKING["Nemotron 3 Nano"], nemotron),
    "SmolLM3": (THINKING["SmolLM3"], smollm3),
    "Seed-OSS": (THINKING["Seed-OSS"], seed),
    "Magistral": (THINKING["Magistral"], magistral),
    "Llama 3": (FAMILIES["Llama 3"], llama3),
    "Phi-4": (FAMILIES["Phi-4"], phi4),
}


NEEDS_A_QUESTION = {"Qwen3", "Qwen3.5", "Qwen2.5"}
"""Their templates read the first message, so they render no prompt for an answer that comes first."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_shape_is_trained_whole(template: str, shape: str) -> None:
    family, write = TEMPLATES[template]
    messages, says, tools, num_tokens = SHAPES[shape]
    expected = [text for text in map(write, says) if text is not None]
    if messages[0]["role"] == "assistant" and template in NEEDS_A_QUESTION:
        del expected[0]
    if not expected:
        with refused(InvalidInput, "no_trainable_turn", "groups[0].trajectories[0]"):
            train_demonstrations(family, messages, tools=tools)
        return
    trained = train_demonstrations(family, messages, tools=tools)
    assert trained.texts == expected
    has_letters = shape == "a spelled end" or (
        any(answer.in_content for answer in says) and "<think>" not in family.text
    )
    if not has_letters:  # which spell control tokens
        assert trained.num_tokens == sum(len(family.encode(text)) for text in expected)
    assert sum(dropped.count for dropped in trained.report.dropped) == len(says) - len(expected)
    if template == "Qwen3":
        assert num_tokens in (None, trained.num_tokens)


@pytest.mark.parametrize(("template", "num"), [("Qwen3", 0), ("SmolLM3", 2), ("Llama 3", 2)])
def test_thinking_that_a_template_does_not_write_is_counted(template: str, num: int) -> None:
    thought = asked(said(content="5", reasoning_content="plan"))
    trained = train_demonstrations(TEMPLATES[template][0], thought, asked(said(content="6")), thought)
    assert [f" {num} " in note for note in trained.report.notes] == ([True] if num else [])


UNTRAINED: dict[str, tuple[list[Message], str]] = {
    "no answer": ([user()], "'assistant'"),
    "no messages": ([], "'assistant'"),
    "ShareGPT": ([{"from": "human", "value": "q"}, {"from": "gpt", "value": "5"}], "ShareGPT"),
    "ShareGPT's roles": ([{"role": "human", "content": "q"}, said(content="5")], "messages_and_choices[0] "),
    "no role": ([{"content": "q"}, said(content="5")], "messages_and_choices[0].role"),
    "weight 0 alone": (asked(said(content="5", weight=0)), "weight"),
    "nothing said": (asked(said(content=None)), "messages_and_choices[1] "),
    "a number for content": (asked(said(content=5)), "messages_and_choices[1].content"),
    "a number for a part": (asked(said(content=[5])), "messages_and_choices[1].content[0]"),
    "a number in a part": (
        [user([{"type": "text", "text": 5}]), said(content="5")],
        "messages_and_choices[0].content[0].text",
    ),
    "calls as text": (asked(said(tool_calls="[]")), "messages_and_choices[1].tool_calls"),
    "a call as text": (asked(said(tool_calls=["add"])), "messages_and_choices[1].tool_calls[0]"),
    "a call without function": (
        asked(said(tool_calls=[{"name": "add", "arguments": {}}])),
        "messages_and_choices[1].tool_calls[0]",
    ),
    "a call of another type": (
        asked(said(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "a", "input": "b"}}])),
        "messages_and_choices[1].tool_calls[0]",
    ),
    "arguments that are no JSON": (
        asked(said(tool_calls=[call('{"a": 2')])),
        "messages_and_choices[1].tool_calls[0].function.arguments",
    ),
    "arguments that are no object": (
        asked(said(tool_calls=[call("[2, 3]")])),
        "messages_and_choices[1].tool_calls[0].function.arguments",
    ),
    "an image": (
        [user([{"type": "image_url", "image_url": {"url": "data:"}}]), said(content="5")],
        "image_url",
    ),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_demonstration_without_a_trained_token_is_an_error_that_names_its_index(name: str) -> None:
    messages, field = UNTRAINED[name]
    good = asked(said(content="5"))
    with refused(InvalidInput, "no_trainable_turn", "groups[1].trajectories[0]") as caught:
        train_demonstrations(FAMILIES["Qwen3"], good, messages, good, messages)
    message = str(caught.value)
    assert message.startswith("2 of 4 demonstrations ") and field in message
    assert "demonstration 1 (groups[1].trajectories[0]" in message and "demonstration 3 (groups[3]" in message


def test_held_out_demonstrations_are_not_trained_and_not_counted() -> None:
    answers = [asked(said(content=str(number))) for number in range(5, 9)]
    trained = train_demonstrations(FAMILIES["Qwen3"], *answers, held_out=1)
    alone = train_demonstrations(FAMILIES["Qwen3"], *answers[:3])
    assert trained.texts == alone.texts and len(trained.texts) == 3
    counts = "num_groups", "num_trajectories", "num_groups_trained", "num_trajectories_trained", "num_trained_tokens"
    assert [getattr(trained.report, name) for name in counts] == [getattr(alone.report, name) for name in counts]
    with refused(InvalidInput, "no_trainable_turn", "groups[3].trajectories[0]"):
        train_demonstrations(FAMILIES["Qwen3"], *answers[:3], [{"role": "user", "content": "?"}], held_out=1)


@pytest.mark.parametrize("tool", [ADD["function"], {"type": "web_search"}, {"type": "function", "function": {}}])
def test_what_is_no_tool_is_named(tool: Message) -> None:
    with refused(InvalidInput, "no_trainable_turn", "groups[0].trajectories[0]") as caught:
        train_demonstrations(FAMILIES["Qwen3"], asked(said(content="5")), tools=[ADD, tool])
    assert "tools[1]" in str(caught.value)


@pytest.mark.parametrize("weight", [0.5, 2, -1, "1", [1]])
def test_a_weight_is_0_or_1(weight: Any) -> None:
    where = "groups[0].trajectories[0].messages_and_choices[1].weight"
    with refused(InvalidInput, "bad_turns", where):
        train_demonstrations(FAMILIES["Qwen3"], asked(said(content="5", weight=weight)))


def test_what_is_left_out_beside_trained_turns_is_counted() -> None:
    broken = said(tool_calls=[call('{"a": 2')])
    trained = train_demonstrations(FAMILIES["Qwen3"], [*asked(broken), result(), said(content="5")])
    assert trained.texts == [qwen3(FIVE)]
    (dropped,) = trained.report.dropped
    assert dropped.count == 1 and dropped.examples == ["groups[0].trajectories[0].messages_and_choices[1]"]
