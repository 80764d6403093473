"""Token-in, token-out across turns: the prompt of a continued conversation begins with the exact tokens of its past.

A chat template renders an earlier answer from its text. The rendered tokens can differ from the sampled ones, and a
parsed tool call can be written differently. The engine gets the sampled tokens instead if they spell the rendered text:
*what the policy reads is what the agent sent*. A rendered prompt R has three parts:

    R = [an earlier request's rendered prompt][that answer, rendered, up to the end-of-turn token][new tokens]

The ledger finds the answers that a request may continue by what identifies them: its session, the ids in it, or the
digest of the conversation before an answer. The new prompt is [the tokens that the engine really sampled from][the tokens
that it really sampled][new tokens].

Sampled tokens replace a rendering if their text equals it character for character. Five differences are harmless:

    1  the text is split into other tokens
    2  white space at the turn's ends is missing, because the template strips it by its own rule (`template.py`)
    3  a tool call is written as other JSON of the same value, with the template's own separators around it
    4  an answer that is one JSON object or list is written as other JSON of the same value: the agent parsed the answer
    5  behind an answer that a stop string or the limit of tokens ended, the agent added text; it stays as it is rendered

Otherwise the rendering stays: an edited answer is new context, and thinking that the template drops stays dropped.
"""

import array
import bisect
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from art_server.ledger import conversation
from art_server.ledger.decoder import Decoder
from art_server.store.base_facts import TemplateRules

Link = Literal["exact", "spliced", "dropped", "retokenized"]
"""How a prompt continues an earlier answer. exact: rendered with the same tokens; spliced: the rendered tokens differ
and are replaced; dropped: thinking is not rendered again; retokenized: the rendered tokens differ and splicing is off."""

NEAR = 8
"""Tokens around a difference in which thinking begins."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recorded choice that a prompt may continue."""

    choice_id: str
    rendering: "array.array[int]"
    """The choice's prompt, as the chat template rendered it."""
    prompt_token_ids: "array.array[int]"
    """The choice's prompt, as the engine sampled from it."""
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The answer that a prompt continues, and the prompt's tokens."""

    choice_id: str
    link: Link
    token_ids: "array.array[int] | None" = None
    """The prompt to sample from; None: the rendered one."""
    length: int = 0
    """How many first tokens of the rendered prompt belong to the answer's prompt."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers in a prompt are compared: with which tokenizer and template rules."""

    decoder: Decoder
    rules: TemplateRules
    is_splicing: bool
    texts: MutableMapping[tuple[str, int | None, int], str] = field(default_factory=dict)
    """The texts of answers that were decoded before, by choice, token before and number of tokens: siblings are compared
    again for each of their next turns."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer as a later prompt renders it, without the end of its turn."""

    span: range
    """Where the answer's tokens are in the prompt."""
    token_ids: list[int]
    before: int | None
    """The token before the answer; None if the prompt begins with the answer."""
    text: str


def continue_answer(
    rendered: "array.array[int]", answers: Iterable[Candidate], reading: Comparison
) -> Continuation | None:
    """How a rendered prompt continues one of these answers, which are newest first: the newest answer that is rendered with
    the same tokens, else the newest answer with the same text. None if the prompt continues none of them."""
    continuation: Continuation | None = None
    prompt: array.array[int] | None = None
    shown: Shown | None = None
    for answer in answers:
        if answer.rendering is not prompt:  # siblings have the same prompt
            prompt = answer.rendering
            shown = find_shown(rendered, prompt, reading)
        if shown is None:
            continue
        sampled_ids, _ = split_end(answer.token_ids, reading.decoder.end_ids)
        sampled_ids = [*answer.rendering[shown.span.start :], *sampled_ids]
        if sampled_ids == shown.token_ids:
            return join(answer, rendered, shown.span, reading)
        if continuation is None:
            text = decode_answer(answer, sampled_ids, shown, reading)
            continuation = join_same(answer, sampled_ids, text, rendered, shown, reading)
    return continuation


def join_same(
    answer: Candidate,
    sampled_ids: Sequence[int],
    text: str,
    rendered: "array.array[int]",
    shown: Shown,
    reading: Comparison,
) -> Continuation | None:
    """The prompt with the answer's own tokens, if the prompt shows the same text. Text that the agent added may follow the
    answer, if the answer's turn had no end. None otherwise."""
    added = added_text(text, shown.text, reading.rules)
    if added == "":
        return join(answer, rendered, shown.span, reading)
    has_end = split_end(answer.token_ids, reading.decoder.end_ids)[1] is not None
    if added is None or has_end:
        return None
    added_ids = last_tokens(shown, added, reading.decoder)
    if reading.decoder.decode_behind([*sampled_ids, *added_ids], shown.before) != text + added:
        return None
    return join(answer, rendered, shown.span, reading, added_ids)


def find_shown(rendered: "array.array[int]", prompt: "array.array[int]", reading: Comparison) -> Shown | None:
    """The answer to an earlier request, whose prompt was rendered as `prompt`, as the later prompt `rendered` shows it. None if
    the later prompt does not begin with the earlier prompt, or the answer has no end."""
    start = len(prompt)
    if rendered[:start] != prompt and start > 1 and reading.decoder.is_space(prompt[-1]):
        start -= 1  # white space may merge with the next token
    if rendered[:start] != prompt[:start]:
        return None
    rest = range(start, len(rendered))
    end = next((i for i in rest if rendered[i] in reading.decoder.end_ids), None)
    if end is None:
        return None
    token_ids = rendered[start:end].tolist()
    before = rendered[start - 1] if start else None
    return Shown(range(start, end), token_ids, before, reading.decoder.decode_behind(token_ids, before))


def decode_answer(answer: Candidate, sampled_ids: Sequence[int], shown: Shown, reading: Comparison) -> str:
    """The text of an answer where a later prompt shows it."""
    key = (answer.choice_id, shown.before, len(sampled_ids))
    if key not in reading.texts:
        reading.texts[key] = reading.decoder.decode_behind(sampled_ids, shown.before)
    return reading.texts[key]


def last_tokens(shown: Shown, text: str, decoder: Decoder) -> list[int]:
    """The last tokens of a shown answer, which spell `text`. If a token begins before `text`, the token's rest is split
    anew."""
    ids, before = shown.token_ids, len(shown.text) - len(text)

    def spelled(num: int) -> str:
        return decoder.decode_behind(ids[:num], shown.before)

    num = bisect.bisect_left(range(len(ids)), before, key=lambda count: len(spelled(count)))
    while num < len(ids) and not (len(spelled(num)) >= before and shown.text.startswith(spelled(num))):
        num += 1  # a part of a character
    rest = spelled(num)[before:]
    return [*(decoder.encode(rest) if rest else ()), *ids[num:]]


def join(
    answer: Candidate, rendered: "array.array[int]", span: range, reading: Comparison, added_ids: Sequence[int] = ()
) -> Continuation:
    """The prompt with the answer's own tokens, and the tokens that the agent added, instead of the tokens in `span`."""
    sampled_ids, sampled_end = split_end(answer.token_ids, reading.decoder.end_ids)
    # The rendered end of the turn stays: in some model families it is the next role's header.
    num_same = 1 if sampled_end == rendered[span.stop] else 0
    taken = answer.token_ids[: len(sampled_ids) + num_same]
    new = rendered[span.stop + num_same :]
    whole = answer.prompt_token_ids + array.array("i", [*taken, *added_ids]) + new
    if whole == rendered:
        return Continuation(answer.choice_id, "exact")
    if not reading.is_splicing:
        return Continuation(answer.choice_id, "retokenized")
    return Continuation(answer.choice_id, "spliced", whole, span.start)


def loses_thinking(answer: Candidate, rendered: "array.array[int]", reading: Comparison) -> bool:
    """Whether a rendered prompt differs from an earlier prompt and its answer first where the answer's thinking begins."""
    past = [*answer.rendering, *answer.token_ids]
    near = max(0, first_difference(past, rendered) - NEAR)
    text, shown = (reading.decoder.decode_behind(list(ids[near : near + 2 * NEAR]), None) for ids in (past, rendered))
    at, mark = first_difference(text, shown), conversation.THINK_START
    start = text.rfind(mark, 0, at + len(mark))
    is_begun = start >= 0 and not text[start + len(mark) : at].strip()
    return is_begun or text[at:].lstrip().startswith(mark)


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The index at which two sequences differ, or at which the shorter one ends."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), shorter)


def added_text(sampled: str, shown: str, rules: TemplateRules) -> str | None:
    """The text that an agent added to a sampled answer, such as `, sir` if `Yes` is shown as `Yes, sir`. Empty if the two texts
    are the same but for harmless differences; None if the shown answer is another answer."""
    if sampled == shown:
        return ""
    thought, answered = conversation.split_thinking(sampled)
    shown_thought, shown_answer = conversation.split_thinking(shown)
    around = rules.around_thinking if thought is not None else ""
    left = None if rules.left is None else rules.left + around
    if (thought is None) != (shown_thought is None):
        return None
    if (thought or "").strip(around) != (shown_thought or "").strip(around):
        return None
    if is_same_text(answered, shown_answer, left, rules.right):
        return ""
    answered, shown_answer = answered.lstrip(left), shown_answer.lstrip(left)
    return shown_answer[len(answered) :] if shown_answer.startswith(answered) else None


def is_same_text(sampled: str, shown: str, left: str | None, right: str | None) -> bool:
    """Whether two answers without thinking are equal, apart from white space that the template strips and the way in
    which tool calls and JSON are written."""

    def trim(text: str) -> str:
        return text.lstrip(left).rstrip(right)

    if trim(sampled) == trim(shown):
        return True
    value = conversation.canonical_json(shown)
    if value is not None and value == conversation.canonical_json(sampled):
        return True
    parsed, shown_parsed = conversation.split_calls(sampled), conversation.split_calls(shown)
    return (
        parsed is not None
        and shown_parsed is not None
        and trim(parsed[0].rstrip()) == trim(shown_parsed[0].rstrip())
        and parsed[1] == shown_parsed[1]
    )


def split_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> tuple[list[int], int | None]:
    """The tokens of an answer, and the token that ended it; None for an answer that was cut."""
    if token_ids and token_ids[-1] in end_ids:
        return list(token_ids[:-1]), token_ids[-1]
    return list(token_ids), None
