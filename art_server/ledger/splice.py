"""Token-in, token-out over turns: the prompt of a continued conversation begins with the exact tokens of its past.

A chat template renders an earlier answer from its text; the tokens may come out otherwise than they were sampled, and a
parsed tool call otherwise than it was written. The engine is given the sampled tokens instead. How a rendered prompt R
is read:

    R = [an earlier request's rendered prompt][that answer, rendered, up to the end-of-turn token][what is new]

The first part is found by its hash, the answer among those that were sampled from that prompt by what it says. The new
prompt is then [what the engine was really given][what it really sampled][what is new]. Where the template dropped the
answer's thinking, the rendering is kept as it is: that is what the template means.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from art_server.ledger import conversation

Link = Literal["exact", "spliced", "dropped", "retokenized"]
"""How a prompt continues an earlier answer: rendered with the same tokens; rendered otherwise and spliced; its thinking
dropped by the template; rendered otherwise while splicing is off."""

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


def continue_answer(
    rendered: Sequence[int],
    length: int,
    find: Callable[[bytes], Sequence[Answer]],
    session: str | None,
    end_ids: frozenset[int],
    decode: Callable[[Sequence[int]], str],
    is_splicing: bool,
) -> Continuation | None:
    """How `rendered` goes on after its first `length` tokens, an earlier request's prompt.

    `find` gives the answers sampled from that prompt that say the same, newest first. A request of a session continues
    answers of that session only. `end_ids` are the tokens that end a turn. None when no answer is continued.
    """
    end = next((i for i in range(length, len(rendered)) if rendered[i] in end_ids), None)
    if end is None:
        return None
    shown = decode(rendered[length:end])
    same = find(conversation.said(shown))
    answer = next((answer for answer in same if session in (None, answer.session)), None)
    if answer is None:
        return None
    if conversation.THINK_END in decode(answer.token_ids) and conversation.THINK_END not in shown:
        return Continuation(answer.choice_id, "dropped", None)
    has_ended = bool(answer.token_ids) and answer.token_ids[-1] in end_ids
    new = rendered[end + 1 :] if has_ended else rendered[end:]
    whole = [*answer.prompt_token_ids, *answer.token_ids, *new]
    if whole == list(rendered):
        return Continuation(answer.choice_id, "exact", None)
    return Continuation(
        answer.choice_id,
        "spliced" if is_splicing else "retokenized",
        whole if is_splicing else None,
    )
