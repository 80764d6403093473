"""Token-in, token-out over turns: the prompt of a continued conversation begins with the exact tokens of its past.

A chat template renders an earlier answer from its text; the tokens may come out otherwise than they were sampled, and a
parsed tool call otherwise than it was written. The engine is given the sampled tokens instead, where they say what was
rendered: *what the policy reads is what the agent sent*. How a rendered prompt R is read:

    R = [an earlier request's rendered prompt][that answer, rendered, up to the end-of-turn token][what is new]

The first part is found by its hash and compared, the answer is looked for among those that were sampled from that prompt.
The new prompt is [what the engine was really given][what it really sampled][what is new].

Sampled tokens stand for a rendering that they equal character for character. Four differences are harmless:

    1  the text is split into other tokens
    2  white space at the turn's ends is gone, which the template strips by its own rule (`template.py`)
    3  a tool call is written as other JSON of the same value, with the template's own separators around it
    4  thinking that the agent did not send is put back where the template's own rule keeps it

Anything else is the agent's: an edited answer is its new context, and thinking that the template drops stays dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from art_server.ledger import conversation
from art_server.ledger.template import TemplateRules

Link = Literal["exact", "spliced", "dropped", "ambiguous", "retokenized"]
"""How a prompt continues an earlier answer: rendered with the same tokens; rendered otherwise and spliced; its thinking
dropped by the template; thinking not sent where several answers differ in it, so that none is put back; rendered
otherwise while splicing is off."""

MAX_PROMPTS = 20_000
"""Prompts that the index knows, the most recently used: more than are ever being continued at once; a few MB."""

MAX_SAME = 8
"""Different token sequences remembered for one rendering."""

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers never vanish modulo 2**64
_powers = np.ones(1, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded choice, as a candidate for what a prompt continues."""

    choice_id: str
    session: str | None
    prompt_token_ids: Sequence[int]
    """What the engine was given."""
    token_ids: Sequence[int]
    opening: Sequence[int] = ()
    """The last tokens of the prompt's rendering, where these melted into the answer when both were rendered again."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a prompt continues, and with which tokens."""

    choice_id: str
    link: Link
    token_ids: list[int] | None
    """The prompt to sample from; None leaves the rendering as it is."""


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """Entry i names the first i tokens (a polynomial hash modulo 2**64, of all beginnings at once)."""
    global _powers
    if len(_powers) <= len(token_ids):
        with np.errstate(over="ignore"):
            steps = np.full(2 * len(token_ids) + 1, _BASE, dtype=np.uint64)
            steps[0] = 1
            _powers = np.cumprod(steps)
    ids = np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        sums = np.cumsum(ids * _powers[: len(ids)])
    return [0, *sums.tolist()]


class PromptIndex:
    """Which rendered prompts were seen, by owner and model, and which stored prompts they became. Bounded."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[int, ...]] = OrderedDict()

    def add(self, scope: str, rendered_hash: int, prompt_number: int) -> None:
        key = (scope, rendered_hash)
        numbers = self._known.pop(key, ())
        self._known[key] = (prompt_number, *(n for n in numbers if n != prompt_number))[:MAX_SAME]
        while len(self._known) > MAX_PROMPTS:
            self._known.popitem(last=False)

    def beginnings(
        self, scope: str, hashes: Sequence[int]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The known beginnings of a rendered prompt, shorter than the whole, longest first: length and prompts."""
        if not self._known:
            return
        for length in range(len(hashes) - 2, 0, -1):
            numbers = self._known.get((scope, hashes[length]))
            if numbers is not None:
                self._known.move_to_end((scope, hashes[length]))
                yield length, numbers


@dataclass(frozen=True, slots=True)
class Reading:
    """What one request needs to know of its tokenizer, template and conversation."""

    end_ids: frozenset[int]
    """The tokens that end a turn."""
    decode: Callable[[Sequence[int], int | None], str]
    """Token ids to text, as they read behind another token."""
    rules: TemplateRules
    session: str | None
    """A request of a session continues answers of that session only."""
    named: frozenset[str]
    """Choices that the request names, by their id or that of a tool call."""
    keeps_thinking: bool
    """The template's rule keeps the thinking of the last answer."""
    is_splicing: bool


def continue_answer(
    rendered: Sequence[int],
    length: int,
    find: Callable[[bytes], Sequence[Answer]],
    reading: Reading,
    is_thinking_left_out: bool = False,
) -> Continuation | None:
    """How `rendered` goes on after its first `length` tokens, an earlier request's prompt, or that without the thinking which
    it opens.

    `find` gives the answers sampled from that prompt that may be meant, newest first. None when no answer is continued.
    """
    end = next((i for i in range(length, len(rendered)) if rendered[i] in reading.end_ids), None)
    if end is None:
        return None
    before = rendered[length - 1]
    shown_ids = list(rendered[length:end])
    shown = reading.decode(shown_ids, before)
    answers = [
        answer
        for answer in find(conversation.said(shown))
        if reading.session in (None, answer.session)
    ]
    answers = [answer for answer in answers if answer.choice_id in reading.named] or answers
    matches: dict[Match, list[tuple[str, Answer]]] = {}
    for answer in answers:
        sampled_ids, _ = split_end(answer.token_ids, reading.end_ids)
        behind = [*answer.opening, *sampled_ids]
        if behind == shown_ids:
            matches.setdefault("tokens", []).append((shown, answer))
            break  # nothing is nearer
        sampled = reading.decode(behind, before)
        if (match := match_text(sampled, shown, reading)) is not None:
            matches.setdefault(match, []).append((sampled, answer))
    nearest: Match | None = next((match for match in NEAREST_FIRST if match in matches), None)
    if nearest is None:
        return None
    answer = matches[nearest][0][1]
    if nearest == "dropped" or (is_thinking_left_out and nearest != "not sent"):
        return Continuation(answer.choice_id, "dropped", None)
    if nearest == "not sent" and len({sampled for sampled, _ in matches[nearest]}) > 1:
        return Continuation(answer.choice_id, "ambiguous", None)
    sampled_ids, sampled_end = split_end(answer.token_ids, reading.end_ids)
    # The rendered end of the turn stands: in some families it is the next role's header.
    taken = [*sampled_ids, sampled_end] if sampled_end == rendered[end] else sampled_ids
    new = rendered[end + 1 :] if len(taken) > len(sampled_ids) else rendered[end:]
    whole = [*answer.prompt_token_ids, *taken, *new]
    if whole == list(rendered):
        return Continuation(answer.choice_id, "exact", None)
    if not reading.is_splicing:
        return Continuation(answer.choice_id, "retokenized", None)
    return Continuation(answer.choice_id, "spliced", whole)


Match = Literal["tokens", "text", "harmless", "not sent", "dropped"]
NEAREST_FIRST: tuple[Match, ...] = ("tokens", "text", "harmless", "not sent", "dropped")


def match_text(sampled: str, shown: str, reading: Reading) -> Match | None:
    """How a sampled answer is the one that is shown; None when it says something else."""
    if sampled == shown:
        return "text"
    rules = reading.rules
    thought, answered = conversation.split_thinking(sampled)
    shown_thought, shown_answer = conversation.split_thinking(shown)
    around = rules.around_thinking if thought is not None else ""
    left = None if rules.left is None else rules.left + around
    same = is_same(answered, shown_answer, left, rules.right)
    if thought is not None and not (shown_thought or "").strip():
        if same and shown_thought is None and thought.strip() and reading.keeps_thinking:
            return "not sent"
        if thought.strip() or shown_thought is None:
            return "dropped" if is_same(answered, shown_answer, None, None) else None
    if not same or (thought is None) != (shown_thought is None):
        return None
    return (
        "harmless" if (thought or "").strip(around) == (shown_thought or "").strip(around) else None
    )


def is_same(sampled: str, shown: str, left: str | None, right: str | None) -> bool:
    """Whether two answers without thinking are the same but for white space that the template strips, and for how
    it writes tool calls."""

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
    """The tokens of an answer, and the one that ended it, None for one that was cut."""
    if token_ids and token_ids[-1] in end_ids:
        return list(token_ids[:-1]), token_ids[-1]
    return list(token_ids), None
