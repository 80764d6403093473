"""The mix of synthetic chats: one seeded draw gives one conversation of some skill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiny_model import games, talk, tools
from tiny_model.words import Message, Rng, system_turn

KINDS = {"short": 36, "tools": 36, "tictactoe": 18, "boards": 4, "2048": 3, "system": 3}
"""Each kind of conversation with its share in percent."""

SHORT_SKILLS: dict[Callable[[Rng], list[Message]], float] = {
    talk.yes_no_maybe: 0.42,
    talk.copy: 0.26,
    talk.copy_fields: 0.06,
    talk.pick_field: 0.06,
    talk.small_talk: 0.08,
    talk.fact: 0.06,
    talk.counting: 0.06,
    talk.json_answer: 0.03,
}
"""Skills of short exchanges with their weights. Several can follow one another in a conversation."""

TOOL_SKILLS: dict[Callable[[Rng, bool, list[tools.Tool]], list[Message]], float] = {
    tools.single_call: 0.78,
    tools.parallel_calls: 0.17,
    tools.failed_call: 0.05,
}
"""Kinds of tool use and their weights."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to learn, in OpenAI's form."""

    messages: list[Message]
    tools: list[Any] | None = None  # Any: transformers wants a list of dictionaries or functions


def draw_chat(rng: Rng) -> Chat:
    """A conversation of a random skill."""
    thinking = rng.random() < 0.07
    kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    match kind:
        case "short":
            return Chat(_strip_thoughts(_short_chat(rng), thinking))
        case "tools":
            return _tool_chat(rng, thinking)
        case "tictactoe":
            return Chat(games.tictactoe_chat(rng, thinking))
        case "boards":
            return Chat(games.board_questions(rng))
        case "2048":
            return Chat(games.game_2048_chat(rng, thinking))
        case _:
            return Chat(_strip_thoughts(talk.obeyed_system(rng), thinking))


def _draw_short(rng: Rng) -> list[Message]:
    return rng.choices(list(SHORT_SKILLS), list(SHORT_SKILLS.values()))[0](rng)


def _short_chat(rng: Rng) -> list[Message]:
    """One to three short exchanges after an optional system prompt."""
    messages = system_turn(rng)
    for _ in range(rng.choices((1, 2, 3), (7, 2, 1))[0]):
        messages += _draw_short(rng)
    return messages


def _tool_chat(rng: Rng, thinking: bool) -> Chat:
    """One or more requests among offered tools, some of which need no call."""
    messages = system_turn(rng)
    has_sums = rng.random() < 0.12
    offered = tools.offered_tools(rng, tools.SUM_TOOLS if has_sums else (tools.random_tool(rng),))
    for _ in range(rng.choices((1, 2, 3, 5), (60, 25, 12, 3))[0]):
        if rng.random() < 0.1:
            messages += _strip_thoughts(_draw_short(rng), thinking)
        elif has_sums and rng.random() < 0.5:
            messages += tools.chained_calls(rng, thinking)
        else:
            skill = rng.choices(list(TOOL_SKILLS), list(TOOL_SKILLS.values()))[0]
            messages += skill(rng, thinking, offered)
    return Chat(messages, [tools.tool_schema(rng, tool) for tool in offered])


def _strip_thoughts(messages: list[Message], thinking: bool) -> list[Message]:
    """The messages without their thoughts, unless the chat has thinking on."""
    if thinking:
        return messages
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
