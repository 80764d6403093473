"""Whether the agent discarded a model's answer for another speaker's, where conversations have several speakers: other models
of the server, models elsewhere, and the program itself. Answers of models elsewhere and of the program are seen only as
assistant's messages of later requests.

If no request of its own model continues an answer, the answer was discarded where

    replaced         a request continues the same conversation with another assistant's message, which no request before the
                     answer contained (such a message is an example)
    asked another    another model of the server was asked the same conversation after the agent had the answer

An answer that the agent used was not discarded:

    edited           the message is the answer with changes (`edits.py`)
    quoted           a request quotes the answer, as the requests of critics, judges and debates do
    passed on        another model's request contains the answer, and the answer's own model does not continue without the
                     answer

Nor was an answer discarded if message or request belong to another conversation that reads alike: the message answers the
same text with other tools or another schema, or a model continues its own answer, as each player of a game does.

What runs elsewhere is not seen. So the rule is the same for models of the server and models elsewhere, but only a model of
the server is seen being asked.
"""

import bisect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from art_server.ledger import conversation
from art_server.ledger.conversation import Conversation, Message
from art_server.ledger.edits import spoken, words_of
from art_server.ledger.session_turns import MAX_COMPARED, SessionTurn

PASSED_OVER = "the agent continued with another answer to the same conversation"
REPLACED = "the agent continued with another speaker's answer to the same conversation"
ASKED_ANOTHER = (
    "the agent asked another model the same conversation after it had the answer (two players that get the same question are asked at "
    "the same time, or with different system messages)"
)

MAX_LATER = 512
"""Messages behind an answer in which a quotation is looked for."""

PLAIN_TEXT = ({"type": "text"}, {"format": {"type": "text"}})
"""Values of a request's fields that constrain nothing."""


@dataclass(slots=True, eq=False)
class Heard:
    """A message of one model's requests."""

    beginning: Conversation
    """The conversation that ends with the message."""
    first: SessionTurn
    """The first request that contains the message."""
    last: SessionTurn

    def is_answer(self, turn: SessionTurn) -> bool:
        """Whether the message is a turn's answer, unchanged."""
        return turn.is_repeated_as(self.beginning, self.first.stops)


class Speakers:
    """The messages and answers of a session. `own` are the turns of one model, `others` the turns of the server's other models;
    both are in the order of their requests, and linked."""

    def __init__(self, own: Sequence[SessionTurn], others: Sequence[SessionTurn]):
        turns = sorted([*own, *others], key=lambda turn: turn.requested_at)
        self._heard = list(heard(turns))
        self._behind: dict[bytes, list[Heard]] = {}
        """The assistant's messages, by the conversation before them."""
        for message in self._heard:
            if message.beginning.message.get("role") == "assistant" and message.beginning.before is not None:
                self._behind.setdefault(message.beginning.before.exact, []).append(message)
        self._texts: dict[int, str] = {}
        """The messages' words, by `id` of their conversation."""
        self._answers: dict[int, list[SessionTurn]] = {}
        """The turns whose answer a message is, by `id` of the message."""
        self._asked: dict[bytes, list[SessionTurn]] = {}
        for turn in turns:
            self._asked.setdefault(turn.asked[0], []).append(turn)

    def why_discarded(self, turn: SessionTurn) -> str | None:
        """Why the agent discarded an answer for another speaker's; None if the agent did not discard the answer."""
        if turn.delivered_at is None or turn.followers or turn.conversation is None:
            return None
        used_at: int | None = None
        replacing: list[tuple[Heard, str]] = []
        known: set[bytes] = set()
        for message in self._behind.get(turn.conversation.exact, [])[-MAX_COMPARED:]:
            answers = self._turns_that_answered(message, turn.asked[0])
            if turn in answers or (not answers and turn.is_edited_as(message.beginning.message)):
                used_at = max(used_at or 0, message.last.requested_at)
            elif message.first.requested_at < turn.requested_at:
                known.add(message.beginning.digest)
            elif reason := replaces(message, answers, turn):
                replacing.append((message, reason))
        for message, reason in replacing:
            is_continued = used_at is None or (
                message.first.speaker == turn.speaker and message.first.requested_at > used_at
            )
            if is_continued and message.beginning.digest not in known and not self._is_quoted(turn, message.first):
                return reason
        had_at = max(used_at or 0, turn.delivered_at)
        is_asked = any(self._asks_again(other, turn, had_at) for other in self._asked[turn.asked[0]])
        return ASKED_ANOTHER if is_asked and not self._is_quoted(turn) else None

    def _turns_that_answered(self, message: Heard, asked: bytes) -> list[SessionTurn]:
        """The turns whose answer an assistant's message is. `asked` is the conversation before it."""
        name = id(message)
        if name not in self._answers:
            self._answers[name] = [turn for turn in self._asked[asked] if message.is_answer(turn)]
        return self._answers[name]

    def _asks_again(self, other: SessionTurn, turn: SessionTurn, had_at: int) -> bool:
        """Whether another model's answered request asks a turn's conversation after the agent had the turn's answer."""
        if other.speaker == turn.speaker or other.asked != turn.asked or other.delivered_at is None:
            return False
        # Both models gave the same last answer, so each model continues its own conversation, as a player of a game does.
        is_alike = turn.parent and other.parent and not turn.parent.ends.isdisjoint(other.parent.ends)
        return other.requested_at > had_at and not is_alike

    def _is_quoted(self, turn: SessionTurn, by: SessionTurn | None = None) -> bool:
        """Whether a message of a later request contains the answer's words. With `by`, only the request `by` and requests of
        the turn's own model count."""
        words = words_of(turn.choice["message"])
        asked = {beginning.digest for beginning in turn.conversation or ()}
        start = bisect.bisect_right(self._heard, turn.requested_at, key=lambda message: message.first.requested_at)
        for message in self._heard[start : start + MAX_LATER]:
            is_reader = by is None or message.first is by or message.first.speaker == turn.speaker
            if not is_reader or not words or spoken(words) not in self._text(message):
                continue
            # A message of the turn's own conversation does not quote the answer, unless it is the answer: a move of a game.
            if message.beginning.digest not in asked or self._text(message) == spoken(words):
                return True
        return False

    def _text(self, message: Heard) -> str:
        name = id(message.beginning)
        if name not in self._texts:
            self._texts[name] = spoken(words_of(message.beginning.message))
        return self._texts[name]


def heard(turns: Sequence[SessionTurn]) -> Iterator[Heard]:
    """The messages of the turns' requests, each message once for each model, in the order of the first requests that contain
    the messages."""
    known: dict[tuple[Hashable, int], Heard] = {}
    for turn in turns:
        for beginning in turn.conversation or ():
            name = (turn.speaker, id(beginning))
            if name in known:
                break
            known[name] = Heard(beginning, turn, turn)
            yield known[name]
    is_last: set[int] = set()
    for turn in reversed(turns):
        for beginning in turn.conversation or ():
            message = known[turn.speaker, id(beginning)]
            if id(message) in is_last:
                break
            is_last.add(id(message))
            message.last = turn


def replaces(message: Heard, answers: Sequence[SessionTurn], turn: SessionTurn) -> str | None:
    """The reason if an assistant's message behind a turn's conversation is another answer to this conversation, else None.
    `answers` are the turns of this conversation whose answer the message is."""
    if not answers:  # a model elsewhere or the program wrote the message
        return REPLACED if not is_constrained(turn) or is_json(message.beginning.message) else None
    speakers = {other.speaker for other in answers}
    is_conversation_of_another = speakers == {message.first.speaker} != {turn.speaker}
    if is_conversation_of_another or all(other.asked != turn.asked for other in answers):
        return None
    return PASSED_OVER if turn.speaker in speakers else REPLACED


def is_constrained(turn: SessionTurn) -> bool:
    """Whether an answer had to have a form."""
    return any(value not in PLAIN_TEXT for value in turn.constraints.values() if value)


def is_json(message: Message) -> bool:
    """Whether a message is a JSON object or list, as answers with a schema are."""
    return conversation.canonical_json(conversation.content_text(message.get("content"))) is not None
