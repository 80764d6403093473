"""Streams with the same content as the whole answer: vLLM's parsers of whole answers, for streams too.

vLLM's incremental parsers give other messages than its parsers of whole answers: invalid JSON as a call's arguments,
no text of a call that was cut. Here a stream sends text as it comes up to the first mark that can begin a call, or that
a parser might read differently. The rest, with complete calls, comes at the choice's end from the parser of whole answers.

`Opening` decides from the text alone what is sent early, however a stream divides the text, and a whole answer runs through
the same code. Where vLLM's parser contradicts what a stream has sent by then, `reconciled` decides for both.
"""

import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
)
from vllm.entrypoints.openai.chat_completion import serving
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser import HarmonyParser, ParserManager
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.renderers.chat_utils import make_tool_call_id

from art_server.engine.vllm_process import hidden_tokens
from art_server.shared.engine_messages import CutText, whole_characters
from art_server.shared.parser_families import CALL_ENDS, CALL_MARKS, THINKING_MARKS, UNKNOWN_CALL_MARKS

PLAIN_STATES = (ParserState.CONTENT, ParserState.REASONING)
CALL_STATES = (ParserState.TOOL_NAME, ParserState.TOOL_ARGS)
MAX_READINGS = 64
TAIL_TOKENS = 16
"""The number of tokens at a prompt's end that contain the marks of thinking which a template writes there."""


class ParsedAnswer(NamedTuple):
    """The parts of an answer."""

    reasoning: str | None
    content: str | None
    calls: list[FunctionCall] | None


@dataclass(frozen=True)
class Marks:
    """The texts that a parser does not pass on unchanged."""

    call: frozenset[str]
    other: frozenset[str]
    think_start: str | None
    think_end: str | None

    @functools.cached_property
    def first_characters(self) -> frozenset[str]:
        return frozenset(mark[0] for mark in self._all)

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._all, key=len, reverse=True)
        return re.compile("|".join(re.escape(mark) for mark in longest_first) or r"(?!)")

    @functools.cached_property
    def beginnings(self) -> frozenset[str]:
        """The beginnings of each mark: '[ARGS]' -> '[', '[A' ... '[ARGS'."""
        return frozenset(mark[:size] for mark in self._all for size in range(1, len(mark)))

    @functools.cached_property
    def longest(self) -> int:
        return max((len(mark) for mark in self._all), default=0)

    @functools.cached_property
    def _all(self) -> frozenset[str]:
        thinking = {mark for mark in (self.think_start, self.think_end) if mark}
        return self.call | self.other | thinking

    def find(self, text: str) -> tuple[int, str | None]:
        """The position of the first mark of a text, and the mark. None in place of the mark: the text from the position on, if
        there is any, may still become a mark."""
        match = self.pattern.search(text)
        for size in range(min(self.longest - 1, len(text)), 0, -1):
            begin = len(text) - size
            if match is not None and match.start() < begin:
                break
            if text[begin:] in self.beginnings:
                return begin, None
        return (match.start(), match.group()) if match else (len(text), None)


@dataclass(frozen=True)
class ParserRules:
    """How a parser reads the texts of a kind of request."""

    marks: Marks
    thinks_unasked: bool
    """Whether the parser takes a text without a mark for thinking."""
    keeps_space: bool
    """Whether the parser keeps the white space at the end of thinking."""
    must_open: bool = False
    """Whether only the mark of thinking begins thinking, although vLLM's parser would take any text for thinking."""


class Opening:
    """The part of an answer's text that a stream sends before the answer's end.

    The part depends on the text, not on how a stream divides the text: white space and the beginning of a mark wait for what
    follows.
    """

    def __init__(self, marks: Marks, is_thinking: bool, keeps_space: bool, sends_content: bool):
        self._marks = marks
        self._keeps_space = keeps_space
        self._sends_content = sends_content
        self.is_thinking = is_thinking
        """Whether the text so far is thinking."""
        self.reasoning = ""
        self.content = ""
        self.rest = ""
        """The text that waits."""
        self.is_call = not sends_content
        """Whether the text that waits may be a call."""
        self.has_thought = False
        """Whether the text has ended its thinking."""
        self._is_open = is_thinking or sends_content
        self._is_fresh = True

    def add(self, text: str) -> None:
        marks = self._marks
        is_plain = not self.rest and marks.first_characters.isdisjoint(text)
        self.rest += text
        if self._is_open and is_plain:
            self._send(len(text), keep=bool(marks.first_characters))
            return
        while self._is_open and self.rest:
            begin, mark = self._marks.find(self.rest)
            if mark is None:
                self._send(begin, keep=True)
                return
            if self.is_thinking and mark == self._marks.think_end:
                self._send(begin, keep=not self._keeps_space)
                self.rest = self.rest.lstrip() if not self._keeps_space else self.rest
                self.rest = self.rest.removeprefix(mark)
                self.is_thinking = self._is_fresh = False
                self.has_thought = True
                self._is_open = self._sends_content
            elif mark == self._marks.think_start and not begin and self._is_fresh:
                self.rest = self.rest[len(mark) :]
                self.is_thinking = True
                self._is_fresh = False
            else:
                self._send(begin, keep=True)
                self.is_call = self.is_call or mark in self._marks.call
                self._is_open = False

    def _send(self, end: int, keep: bool) -> None:
        """Sends the text before `end`. With `keep`, the white space at the end of this text waits."""
        text = self.rest[:end]
        text = text.rstrip() if keep else text
        self.rest = self.rest[len(text) :]
        self._is_fresh = self._is_fresh and not text
        if self.is_thinking:
            self.reasoning += text
        else:
            self.content += text


def reconciled(opening: Opening, whole: ParsedAnswer) -> ParsedAnswer:
    """An answer that begins with what a stream has sent, and otherwise is the answer of vLLM's parser, where it can be.

    A call is complete or is text: no call has arguments that are not a JSON object, and no text of a call is lost. Half a
    surrogate pair in a call is replaced, because such a half can be neither sent nor tokenized.
    """
    reasoning, content, calls = whole
    calls = _complete_calls(calls or [])
    if opening.is_thinking:
        reasoning, content = _reconciled_thinking(opening, reasoning, content, bool(calls))
    else:
        if opening.reasoning or opening.content:
            reasoning = opening.reasoning or None
        content = _reconciled_content(opening, content or "", bool(calls))
    return ParsedAnswer(reasoning, content or None, calls or None)


def _complete_calls(calls: list[FunctionCall]) -> list[FunctionCall]:
    """The calls with distinct ids. No calls at all if the arguments of a call are no JSON object."""
    if not all(is_object(call.arguments) for call in calls):
        return []
    ids: set[str | None] = set()
    for call in calls:
        call.name, call.arguments = whole_characters(call.name), whole_characters(call.arguments)
        if call.id in ids:  # Kimi K2 writes ids itself; vLLM makes a new id for None
            call.id = None
        ids.add(call.id)
    return calls


def _reconciled_thinking(
    opening: Opening, reasoning: str | None, content: str | None, has_calls: bool
) -> tuple[str | None, str | None]:
    """Thinking and content of an answer of which a stream has only sent thinking."""
    if not (reasoning or "").startswith(opening.reasoning):
        return opening.reasoning + ("" if has_calls else opening.rest), None
    if opening.is_call and not has_calls and (reasoning or "").rstrip() == opening.reasoning:
        return reasoning, opening.rest.lstrip()
    return reasoning, content


def _reconciled_content(opening: Opening, content: str, has_calls: bool) -> str:
    """The content of an answer whose thinking has ended."""
    sent = opening.content
    if opening.is_call and not has_calls:
        text = sent + opening.rest
        return text if text.strip() else ""
    if content.startswith(sent):
        return content
    space = leading_space(sent)
    if content.startswith(sent[len(space) :]):
        return space + content
    return sent if has_calls else sent + opening.rest


def leading_space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def is_object(text: str) -> bool:
    """Whether a text is a JSON object. A text with NaN is none: Python reads NaN, other clients cannot."""
    try:
        return isinstance(json.loads(text, parse_constant=int), dict)  # int("NaN") is a ValueError
    except (ValueError, RecursionError):
        return False


class WholeAnswers(DelegatingParser):
    """Comes before a parser class of vLLM in the order of inheritance. vLLM makes a parser for each choice."""

    _readings: dict[Any, ParserRules]
    """An attribute of the class that `whole_parser` makes: how the parser reads, by kind of request."""
    _opening: Opening | None = None
    _is_streaming = False
    _is_answering = False
    """Whether the prompt's end has ended the thinking."""
    _opened = ""
    """The beginning of thinking at the prompt's end."""
    _must_open = False
    """Whether the answer itself has to open its thinking."""
    _is_at_limit = False
    """Whether the limit of tokens ended the answer."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        kwargs = options.get("chat_template_kwargs")
        self._template_kwargs = repr(kwargs)
        self._thinks = bool((kwargs or {}).get("enable_thinking"))

    def adjust_request(self, request: Any) -> Any:
        has_skipped = request.skip_special_tokens is not False  # None, in vLLM 0.33, is the default: True
        adjusted = super().adjust_request(request)
        if has_skipped and adjusted.skip_special_tokens is False:
            parsers = [parser for parser in (self._tool_parser, self._reasoning_parser) if parser is not None]
            hidden_tokens.hide(adjusted, self.model_tokenizer, parsers)
        return adjusted

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        # vLLM 0.33 would tell the parser of thinking, which then reads the same text in several ways.
        reasoning_parser, self._reasoning_parser = self._reasoning_parser, None
        super().set_prompt_token_ids(prompt_token_ids)
        self._reasoning_parser = reasoning_parser
        start, end = self._think_marks()
        if end is None:
            return
        tail = self._begun_answer(list(prompt_token_ids[-TAIL_TOKENS:]))
        self._is_answering = tail.rstrip().endswith(end)
        if start is not None and tail.rfind(start) > tail.rfind(end):
            self._opened = tail[tail.rfind(start) :]
        is_told = self._is_answering or bool(self._opened) or self._thinks
        self._must_open = start is not None and not is_told

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """Whether a grammar applies from the first token on. Otherwise vLLM waits for the end of the thinking."""
        self.set_prompt_token_ids(input_ids)
        return self._must_open or super().is_reasoning_end(input_ids)

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        self._is_at_limit = isinstance(model_output, CutText)
        opening = self._make_opening(request)
        opening.add(model_output)
        return self._read(opening, model_output, request, enable_auto_tools)

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        if self._opening is None:
            if prompt_token_ids is not None:
                self.set_prompt_token_ids(prompt_token_ids)
            self._opening = self._make_opening(request)
            self._texts: list[str] = []
            self._num_thinking = 0
        opening = self._opening
        sent = len(opening.reasoning), len(opening.content)
        opening.add(delta_text)
        self._texts.append(delta_text)
        if opening.is_thinking:
            self._num_thinking += len(delta_token_ids)
        message = ParsedAnswer(opening.reasoning, opening.content, None)
        self._is_streaming = not finished
        if finished:
            self._is_at_limit = isinstance(delta_text, CutText)
            has_tools = self._tool_parser is not None
            message = self._read(opening, "".join(self._texts), request, has_tools)
        return delta_of(message, *sent, request)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """In a stream, the number of tokens of thinking so far: vLLM would read all tokens again with each event of a
        Messages stream."""
        if self._is_streaming:
            return self._num_thinking
        return super().count_reasoning_tokens(token_ids)

    def _read(self, opening: Opening, text: str, request: Any, auto_tools: bool) -> ParsedAnswer:
        """The parts of a whole answer."""
        reasoning_parser, reading = self._reasoning_parser, self._reading(request)
        if self._is_answering or (reading.must_open and not self._has_opened(text)):
            # vLLM's parser of thinking does not know the prompt, and would take such an answer for thinking.
            self._reasoning_parser = None
        elif opening.has_thought and self._drops_calls():
            self._reasoning_parser = None
            text = opening.content + opening.rest
        elif self._opened and not reading.thinks_unasked:
            # vLLM's parser gets the answer without the mark that the prompt ends with.
            text = self._opened + text
        try:
            whole = super().parse(text, request, auto_tools)
        finally:
            self._reasoning_parser = reasoning_parser
        reasoning, content, calls = whole
        if calls and self._is_cut(opening.rest, request):
            calls = None
        return reconciled(opening, ParsedAnswer(reasoning, content, calls))

    def _drops_calls(self) -> bool:
        """Whether the parser of thinking drops marks of calls: its grammar does not know the marks of a tool parser without a
        grammar."""
        tool: Any = self._tool_parser
        reasoning: Any = self._reasoning_parser
        return tool is not None and not tool.engine_based_streaming and reasoning.engine_based_streaming

    def _has_opened(self, text: str) -> bool:
        start, _ = self._think_marks()
        return start is not None and text.lstrip().startswith(start)

    def _is_cut(self, rest: str, request: Any) -> bool:
        """Whether a stop text or the limit of tokens ended the answer inside a call. Some parsers would complete
        the call."""
        stops = getattr(request, "stop", None) or ()
        stops = (stops,) if isinstance(stops, str) else stops
        tool: Any = self._tool_parser  # Any: vLLM has no class for parsers with a grammar
        begin, end = CALL_ENDS.get(type(tool).__name__, ("", ""))
        has_grammar = getattr(tool, "engine_based_streaming", False)
        if not (has_grammar or end) or not (stops or self._is_at_limit):
            return False

        def is_open(text: str) -> bool:
            if not has_grammar:
                return text.rfind(end) < text.rfind(begin)
            parser = tool._parser_engine
            parser._reset(initial_state=ParserState.CONTENT)
            parser._feed(text, [])
            return parser._engine.state in CALL_STATES

        return is_open(rest) and (self._is_at_limit or all(is_open(rest + stop) for stop in stops))

    def _make_opening(self, request: Any) -> Opening:
        reading = self._reading(request)
        is_thinking = reading.thinks_unasked or bool(self._opened and not self._is_answering)
        return Opening(reading.marks, is_thinking, reading.keeps_space, not self._is_forced(request))

    def _is_forced(self, request: Any) -> bool:
        return self._tool_parser is not None and request.tool_choice not in (None, "auto", "none")

    def _reading(self, request: Any) -> ParserRules:
        """How the parser reads this kind of request. Remembered, because vLLM makes a parser for each choice, and a parser needs
        milliseconds to show how it reads."""
        key = (
            self._template_kwargs,
            self._is_answering,
            self._must_open,
            self._is_forced(request),
            request.tool_choice == "none",
        )
        if key not in self._readings:
            # A request chooses the template's arguments, so there are any number of kinds.
            if len(self._readings) >= MAX_READINGS:
                self._readings.clear()
            self._readings[key] = self._find_reading(request)
        return self._readings[key]

    def _find_reading(self, request: Any) -> ParserRules:
        reasoning = self._reasoning_parser
        call, other = self._call_marks(request)
        if reasoning is None or self._is_answering:
            return ParserRules(Marks(call, other, None, None), False, True)

        def thinking(text: str) -> str | None:
            return reasoning.extract_reasoning(text, request)[0]

        if reasoning.engine_based_streaming:
            calls, others = grammar_marks(reasoning)
            call, other = call | calls, other | others
        start, end = self._think_marks()
        other |= {mark for mark in (start, end) if mark}
        other |= set(THINKING_MARKS.get(type(reasoning).__name__, ()))
        opening = opening_mark(thinking, start, end)
        takes_all = thinking("x") == "x"
        must_open = takes_all and self._must_open
        unasked = takes_all and not must_open
        begin = "" if unasked else opening or ""
        keeps_space = thinking(f"{begin}x\n{end}y") == "x\n"
        return ParserRules(Marks(call, other, opening, end), unasked, keeps_space, must_open)

    def _call_marks(self, request: Any) -> tuple[frozenset[str], frozenset[str]]:
        """The texts that begin a call in answers to this request, and the other texts that the tool parser does not pass on."""
        tool = self._tool_parser
        if tool is None or self._is_forced(request):
            return frozenset(), frozenset()
        if tool.engine_based_streaming:
            return grammar_marks(tool)
        if request.tool_choice == "none":
            return frozenset(), frozenset()
        return frozenset(CALL_MARKS.get(type(tool).__name__, UNKNOWN_CALL_MARKS)), frozenset()

    def _begun_answer(self, tail: list[int]) -> str:
        """The text of a prompt's end after the last mark of a turn: an earlier turn may contain a mark of thinking."""
        others = other_marks(self.model_tokenizer, *self._think_marks())
        begin = next((position for position in range(len(tail), 0, -1) if tail[position - 1] in others), 0)
        return self.model_tokenizer.decode(tail[begin:])

    def _think_marks(self) -> tuple[str | None, str | None]:
        parser = self._reasoning_parser
        return (parser.reasoning_start_str, parser.reasoning_end_str) if parser else (None, None)


def opening_mark(thinking: Callable[[str], str | None], start: str | None, end: str | None) -> str | None:
    """The text with which thinking begins, if a parser reads such a text. `thinking` is the thinking that the parser reads in a text;
    `start` and `end` are the parser's marks."""
    if not start:
        return None
    endings = ("", f"{end}y") if end else ("",)  # some parsers recognise thinking only by its end
    for opening in (f"{start}thought\n", start):  # Gemma 4's thinking has a title
        if any(thinking(f"{opening}x{ending}") == "x" for ending in endings):
            return opening
    return None


@functools.lru_cache(maxsize=8)
def other_marks(tokenizer: Any, start: str | None, end: str | None) -> frozenset[int]:
    """Added tokens, such as the tokens between turns, that are no part of a mark of thinking."""
    marks = f"{start} {end}"
    added = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    return frozenset(token_id for token_id in added if tokenizer.decode([token_id]).strip() not in marks)


def grammar_marks(parser: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The texts that begin a call in a parser with a grammar of vLLM, and the other texts that the parser does not pass on."""
    config = parser._parser_engine.parser_engine_config
    call: set[str] = set()
    other = set(parser.model_tokenizer.all_special_tokens) - config.preserve_tokens
    for (state, terminal), transition in config.transitions.items():
        if state in PLAIN_STATES:
            spellings = config.terminals.get(terminal, ())
            marks = call if transition.next_state not in PLAIN_STATES else other
            marks.update((spellings,) if isinstance(spellings, str) else spellings)
            if terminal in config.token_id_terminals:
                marks.add(config.token_id_terminals[terminal])
    return frozenset(call), frozenset(other - call)


class HeldAnswers(Parser):
    """Comes before a parser class of vLLM that parses whole answers from tokens, such as the class for gpt-oss: an answer with
    tools is sent at its end. Without tools the stream is vLLM's own."""

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        answer = super().parse(model_output, request, enable_auto_tools, model_output_token_ids)
        if not request.tools:
            return answer
        reasoning, content, calls = answer
        if isinstance(self, HarmonyParser) and not any(map(get_encoding().is_special_token, model_output_token_ids)):
            content = model_output  # an answer without the frame of gpt-oss, of which vLLM leaves tokens out
        # A call that was cut is text.
        cut = [call.arguments for call in calls or () if not is_object(call.arguments)]
        content = "\n".join(filter(None, [content, *cut]))
        calls = [call for call in calls or () if is_object(call.arguments)]
        return reasoning, content or None, calls or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        if not request.tools:
            return super().parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)
        held: list[tuple[str, list[int]]] = self.__dict__.setdefault("_held", [])
        if not held and prompt_token_ids is not None:
            self.set_prompt_token_ids(prompt_token_ids)
        held.append((delta_text, delta_token_ids))
        if not finished:
            return None
        text = "".join(part for part, _ in held)
        ids = [token for _, tokens in held for token in tokens]
        return delta_of(ParsedAnswer(*self.parse(text, request, True, ids)), 0, 0, request)


def delta_of(message: ParsedAnswer, sent_reasoning: int, sent_content: int, request: Any) -> DeltaMessage | None:
    """The part of a message that was not sent yet."""
    fields: dict[str, Any] = {}
    if request.include_reasoning and (reasoning := (message.reasoning or "")[sent_reasoning:]):
        fields["reasoning"] = reasoning
    if content := (message.content or "")[sent_content:]:
        fields["content"] = content
    if message.calls and request.tool_choice != "none":
        fields["tool_calls"] = [
            DeltaToolCall(
                index=index,
                id=call.id or make_tool_call_id(),
                type="function",
                function=DeltaFunctionCall(name=call.name, arguments=call.arguments),
            )
            for index, call in enumerate(message.calls)
        ]
    return DeltaMessage(**fields) if fields else None


def finish_reason(choice: Any, request: Any, engine_reason: str | None) -> str:
    """As in vLLM's streams: `tool_calls` if the model ended by itself after calls that it was free to make."""
    is_named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
    if choice.message.tool_calls and engine_reason == "stop" and not is_named:
        return "tool_calls"
    return engine_reason or "stop"


def with_finish_reasons(full_generator: Any) -> Any:
    """Wraps vLLM's function for a whole chat answer, which ends every answer with calls with `tool_calls`, cut or not."""

    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: AsyncIterator[Any], *args: Any, **options: Any
    ) -> Any:
        last = None

        async def watched() -> AsyncIterator[Any]:
            nonlocal last
            async for last in result_generator:
                yield last

        answer = await full_generator(self, request, watched(), *args, **options)
        if last is not None and isinstance(answer, ChatCompletionResponse):
            for choice, output in zip(answer.choices, last.outputs, strict=True):
                choice.finish_reason = finish_reason(choice, request, output.finish_reason)
        return answer

    return chat_completion_full_generator


def whole_parser(chosen: type[Parser] | None) -> type[Parser] | None:
    """A parser class of vLLM with our changes."""
    if chosen is None:
        return None
    is_delegating = getattr(chosen, "parse", None) is DelegatingParser.parse
    before = WholeAnswers if is_delegating else HeldAnswers
    return type(chosen.__name__, (before, chosen), {"_readings": {}})


def install() -> None:
    """Changes the parsers and the chat answers of this process."""
    hidden_tokens.install()
    get_parser = ParserManager.get_parser
    ParserManager.get_parser = lambda *args, **options: whole_parser(get_parser(*args, **options))
    serving.OpenAIServingChat.chat_completion_full_generator = with_finish_reasons(
        serving.OpenAIServingChat.chat_completion_full_generator
    )
