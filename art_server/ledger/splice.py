"""Token-in, token-out across turns: the prompt of a continued conversation begins with the exact tokens of its past.

A chat template renders an earlier answer from its text. The rendered tokens can differ from the sampled ones, and a
parsed tool call can be written differently. The engine gets the sampled tokens instead if they spell the rendered text:
*what the policy reads is what the agent sent*. A rendered prompt R has three parts:

    R = [an earlier request's rendered prompt][that answer, rendered, up to the end-of-turn token][new tokens]

The first part is found by its hash and then compared. The answer is searched among those sampled from that prompt.
The new prompt is [the tokens that the engine really sampled from][the tokens that it really sampled][new tokens].

Sampled tokens replace a rendering if their text equals it character for character. Four differences are harmless:

    1  the text is split into other tokens
    2  white space at the turn's ends is missing, because the template strips it by its own rule (`template.py`)
    3  a tool call is written as other JSON of the same value, with the template's own separators around it
    4  thinking that the agent did not send is put back, because the template's own rule keeps it

Otherwise the rendering stays: an edited answer is new context, and thinking that the template drops stays dropped.
"""

import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from art_server.base_facts import TemplateRules
from art_server.ledger import conversation

Link = Literal["exact", "spliced", "dropped", "ambiguous", "retokenized"]
"""How a prompt continues an earlier answer. exact: rendered with the same tokens; spliced: the rendered tokens differ
and are replaced; dropped: its thinking is not rendered; ambiguous: the agent sent no thinking and several answers
differ in it, so none is put back; retokenized: the rendered tokens differ and splicing is off."""

Match = Literal["tokens", "text", "harmless", "not sent", "dropped"]
NEAREST_FIRST: tuple[Match, ...] = ("tokens", "text", "harmless", "not sent", "dropped")

MAX_PROMPTS = 20_000
"""Prompts in the index, the most recently used: a few MB, and more than are continued at the same time."""

MAX_SAME = 32
"""Prompts with different tokens that are remembered for one rendering. The ledger finds those of a session, and those of
named choices, however many there are."""

BUCKET_BITS = 20
"""Of 2**20 buckets MAX_PROMPTS hashes fill one in fifty."""

Hashes: TypeAlias = npt.NDArray[np.uint64]

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers never vanish modulo 2**64
_powers = np.ones(1, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded choice that a prompt may continue."""

    choice_id: str
    prompt: int
    """The number of its prompt."""
    prompt_token_ids: Sequence[int]
    """The tokens that the engine sampled from."""
    token_ids: Sequence[int]
    opening: Sequence[int] = ()
    """The last tokens of the prompt's rendering, if a later rendering may have merged them with the answer."""
    keeps_thinking: bool = False
    """Whether the template's rule keeps the answer's thinking in the rendering that is compared."""
    put_back: Literal["no", "kept", "dropped"] = "no"
    """Whether the prompt contains thinking that was put back, and whether the rule still keeps it."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The answer that a prompt continues, and the prompt's tokens."""

    choice_id: str
    link: Link
    token_ids: "array.array[int] | None"
    """The prompt to sample from; None: the rendered one."""
    puts_back: bool = False
    """Whether the answer's thinking, which the agent did not send, is put back."""


def prefix_hashes(token_ids: Sequence[int]) -> Hashes:
    """The polynomial hashes (modulo 2**64) of all beginnings: entry i is that of the first i tokens."""
    global _powers
    if len(_powers) <= len(token_ids):
        with np.errstate(over="ignore"):
            steps = np.full(2 * len(token_ids) + 1, _BASE, dtype=np.uint64)
            steps[0] = 1
            _powers = np.cumprod(steps)
    ids = np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)
    hashes = np.zeros(len(ids) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        np.cumsum(ids * _powers[: len(ids)], out=hashes[1:])
    return hashes


class PromptIndex:
    """Finds stored prompts by owner, model and the hash of their rendering. Its size is bounded."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[int, ...]] = OrderedDict()
        self._filled = np.zeros(1 << BUCKET_BITS, dtype=np.uint16)
        """The number of known hashes by their first bits, so that a long prompt needs few look-ups."""

    def add(self, scope: str, rendered_hash: int, prompt_number: int) -> None:
        key = (scope, int(rendered_hash))
        numbers = self._known.pop(key, None)
        if numbers is None:
            self._filled[key[1] >> (64 - BUCKET_BITS)] += 1
        same = (prompt_number, *(n for n in numbers or () if n != prompt_number))
        self._known[key] = same[:MAX_SAME]
        while len(self._known) > MAX_PROMPTS:
            (_, oldest), _ = self._known.popitem(last=False)
            self._filled[oldest >> (64 - BUCKET_BITS)] -= 1

    def beginnings(self, scope: str, hashes: Hashes) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The known beginnings of a prompt that are shorter than it, longest first: length and prompt numbers."""
        buckets = (hashes[1:-1] >> np.uint64(64 - BUCKET_BITS)).astype(np.intp)
        for index in reversed(np.flatnonzero(self._filled[buckets]).tolist()):
            key = (scope, int(hashes[index + 1]))
            numbers = self._known.get(key)
            if numbers is not None:
                self._known.move_to_end(key)
                yield index + 1, numbers


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers in a prompt are compared: with which tokenizer and template rules."""

    end_ids: frozenset[int]
    """The tokens that end a turn."""
    decode: Callable[[Sequence[int], int | None], str]
    """From token ids, and the token before them, to text."""
    rules: TemplateRules
    is_splicing: bool
    texts: MutableMapping[tuple[str, int, tuple[int, ...]], str] = field(default_factory=dict)
    """The texts of answers that were decoded before, by choice, token before and opening: siblings of a thinking model
    are compared again for each of their next turns."""


def continue_answer(
    rendered: "array.array[int]",
    length: int,
    find: Callable[[bytes], Sequence[Answer]],
    reading: Reading,
    named: Collection[str] = (),
    is_thinking_left_out: bool = False,
) -> Continuation | None:
    """How `rendered` continues after its first `length` tokens: those of an earlier request's prompt or, with
    `is_thinking_left_out`, of such a prompt without the thinking that it opens. None if it continues no answer.

    `find` gives the answers with this text digest that were sampled from that prompt, newest first. `named` are the
    choices sampled from it to which the request refers. If none of them has this text, the answer was edited.
    """
    end = next((i for i in range(length, len(rendered)) if rendered[i] in reading.end_ids), None)
    if end is None:
        return None
    before = rendered[length - 1]
    shown_ids = list(rendered[length:end])
    shown = reading.decode(shown_ids, before)
    answers = find(conversation.text_digest(shown))
    mine = [answer for answer in answers if answer.choice_id in named]
    is_edited = bool(named) and not mine
    answers = mine or [each for each in answers if each.put_back != "dropped"] or answers
    matches = match_answers(answers, shown_ids, shown, before, reading)
    nearest: Match | None = next((match for match in NEAREST_FIRST if match in matches), None)
    if nearest is None:
        return None
    answer = matches[nearest][0][1]
    is_opened = is_thinking_left_out and nearest != "not sent"
    if nearest == "dropped" or is_opened or answer.put_back == "dropped":
        return Continuation(answer.choice_id, "dropped", None)
    if is_ambiguous(nearest, matches, is_edited):
        return Continuation(answer.choice_id, "ambiguous", None)
    sampled_ids, sampled_end = split_end(answer.token_ids, reading.end_ids)
    # The rendered end of the turn stays: in some model families it is the next role's header.
    taken = [*sampled_ids, sampled_end] if sampled_end == rendered[end] else sampled_ids
    new = rendered[end + 1 :] if len(taken) > len(sampled_ids) else rendered[end:]
    whole = array.array("i", answer.prompt_token_ids) + array.array("i", taken) + new
    if whole == rendered:
        return Continuation(answer.choice_id, "exact", None)
    if not reading.is_splicing:
        return Continuation(answer.choice_id, "retokenized", None)
    return Continuation(answer.choice_id, "spliced", whole, nearest == "not sent")


def is_ambiguous(
    nearest: Match, matches: Mapping[Match, Sequence[tuple[str, Answer]]], is_edited: bool
) -> bool:
    """Whether it is uncertain which of several thoughts belongs to the conversation, this answer's or an earlier one's."""
    if nearest == "not sent" and (is_edited or len({text for text, _ in matches[nearest]}) > 1):
        return True
    # The conversation's own answer may match less closely than one behind other thoughts.
    of_all = [answer for each in matches.values() for _, answer in each]
    has_thoughts = any(answer.put_back != "no" for answer in of_all)
    return has_thoughts and len({answer.prompt for answer in of_all}) > 1


def match_answers(
    answers: Sequence[Answer], shown_ids: list[int], shown: str, before: int, reading: Reading
) -> dict[Match, list[tuple[str, Answer]]]:
    """The answers that match what was rendered, with their text, by the kind of match."""
    matches: dict[Match, list[tuple[str, Answer]]] = {}
    for answer in answers:
        key = (answer.choice_id, before, tuple(answer.opening))
        sampled = reading.texts.get(key)
        surplus = len(answer.opening) + len(answer.token_ids) - len(shown_ids)
        if sampled is None or surplus in (0, 1):  # 1: its end
            sampled_ids, _ = split_end(answer.token_ids, reading.end_ids)
            behind = [*answer.opening, *sampled_ids]
            if behind == shown_ids:
                matches.setdefault("tokens", []).append((shown, answer))
                continue
            sampled = reading.texts[key] = reading.decode(behind, before)
        match = match_text(sampled, shown, reading.rules, answer.keeps_thinking)
        if match is not None:
            matches.setdefault(match, []).append((sampled, answer))
    return matches


def match_text(
    sampled: str, shown: str, rules: TemplateRules, keeps_thinking: bool
) -> Match | None:
    """How a sampled answer matches the rendered one (`shown`); None if their texts differ."""
    if sampled == shown:
        return "text"
    thought, answered = conversation.split_thinking(sampled)
    shown_thought, shown_answer = conversation.split_thinking(shown)
    around = rules.around_thinking if thought is not None else ""
    left = None if rules.left is None else rules.left + around
    same = is_same(answered, shown_answer, left, rules.right)
    if thought is not None and not (shown_thought or "").strip():
        if same and shown_thought is None and thought.strip() and keeps_thinking:
            return "not sent"
        if thought.strip() or shown_thought is None:
            return "dropped" if is_same(answered, shown_answer, None, None) else None
    if not same or (thought is None) != (shown_thought is None):
        return None
    return (
        "harmless" if (thought or "").strip(around) == (shown_thought or "").strip(around) else None
    )


def is_same(sampled: str, shown: str, left: str | None, right: str | None) -> bool:
    """Whether two answers without thinking are equal, apart from white space that the template strips and the way in
    which tool calls are written."""

    def trim(text: str) -> str:
        return text.lstrip(left).rstrip(right)

    if trim(sampled) == trim(shown):
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
