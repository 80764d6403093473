"""A turn without sampled tokens, as the chat template writes it: a demonstration, or a choice that nobody recorded."""

from art_server.errors import InvalidInput
from art_server.jobs import reasons
from art_server.jobs.token_sources import TokenSources
from art_server.jobs.turns import UnusableTurn
from art_server.jobs.written_messages import (
    calls_of,
    check_answer,
    messages_for_engine,
    thinking_of,
    without_calls,
    without_thinking,
)
from art_server.jobs.written_tools import Tools, tools_for_engine
from art_server.ledger.conversation import Message

PART_OF_CHARACTER = "\ufffd"
"""The text of tokens that end inside a character."""


class TemplateTurns:
    """Renders turns."""

    def __init__(self, sources: TokenSources):
        self._sources = sources
        self.num_without_thinking = 0
        """Answers whose thinking the template does not write."""

    def write(self, message: Message, messages: list[Message], tools: Tools | None) -> tuple[list[int], list[int]]:
        """A prompt, and the tokens that the chat template writes for the answer, to the end of the turn.

        Raises:
            UnusableTurn: a message has no form that templates render, or the template writes the answer elsewhere than
                behind the prompt, without its tool calls, or without an end.
        """
        check_answer(message, f"messages_and_choices[{len(messages)}]")
        prompt = self._prompt(messages, tools)
        whole = self._render([*messages, message], tools)
        if whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) :]
        else:  # the prompt's last characters may have merged with the answer's first ones
            answer = self._behind(prompt, whole)
        if calls_of(message) and self._renders(whole, [*messages, without_calls(message)], tools):
            raise UnusableTurn(reasons.NO_CALLS_WRITTEN)
        if thinking_of(message) and self._renders(whole, [*messages, without_thinking(message)], tools):
            self.num_without_thinking += 1
        end = self._last_of_turn(answer)
        if end is not None:
            return prompt, answer[: end + 1]
        return prompt, [*answer, self._end_behind(whole, message, messages, tools)]

    def _prompt(self, messages: list[Message], tools: Tools | None) -> list[int]:
        try:
            return self._render(messages, tools, has_header=True)
        except UnusableTurn as error:
            if messages:
                raise
            raise UnusableTurn(reasons.NO_PROMPT_WRITTEN) from error

    def _render(self, messages: list[Message], tools: Tools | None, *, has_header: bool = False) -> list[int]:
        of_engine = messages_for_engine(messages, tools), tools_for_engine(tools)
        try:
            return self._sources.render(*of_engine, has_header)
        except InvalidInput as error:  # the chat template refuses the messages
            raise UnusableTurn(error.message) from error

    def _renders(self, whole: list[int], messages: list[Message], tools: Tools | None) -> bool:
        """Whether a conversation is rendered as `whole`. False if the template refuses the conversation."""
        try:
            return self._render(messages, tools) == whole
        except UnusableTurn:
            return False

    def _behind(self, prompt: list[int], whole: list[int]) -> list[int]:
        """The tokens behind a prompt in a rendering that begins with the prompt's text, where the prompt's last tokens merged
        with the tokens behind. Only the text of the merged token is tokenised again: the rest may contain texts that spell
        control tokens."""
        pairs = zip(prompt, whole, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(whole)))
        before = self._sources.decode(prompt[same:])
        for end in range(same + 1, len(whole) + 1):
            text = self._sources.decode(whole[same:end])
            if before is None or text is None:
                break
            if text.startswith(before):
                rest = text[len(before) :]
                return [*(self._sources.tokenize(rest) if rest else ()), *whole[end:]]
            if not before.startswith(text.rstrip(PART_OF_CHARACTER)):
                break
        raise UnusableTurn(reasons.NOT_BEHIND_PROMPT)

    def _last_of_turn(self, answer: list[int]) -> int | None:
        """The index of the token that ends the turn: the first token at which the engine stops, else the last token that ends
        a turn. Behind the first, some templates close the whole conversation; before the last, gpt-oss's template ends the
        thinking."""
        stops = [index for index, token in enumerate(answer) if token in self._sources.stop_ids]
        if stops:
            return stops[0]
        ends = [index for index, token in enumerate(answer) if token in self._sources.end_ids]
        return ends[-1] if ends else None

    def _end_behind(self, whole: list[int], message: Message, messages: list[Message], tools: Tools | None) -> int:
        """The token that ends a turn whose own rendering has no end: in some families the header of the next role is the
        end."""
        following: Message = {"role": "user", "content": "x"}
        if calls := calls_of(message):
            following = {"role": "tool", "content": "x", "tool_call_id": calls[0].get("id") or "call_0"}
        more = self._render([*messages, message, following], tools)
        is_behind = more[: len(whole)] == whole and len(more) > len(whole)
        end = more[len(whole)] if is_behind else self._sources.end_id
        if end is None or (is_behind and end not in self._sources.end_ids):
            raise UnusableTurn(reasons.NO_END_WRITTEN)
        return end
