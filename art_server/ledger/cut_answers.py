"""Answers that the limit of tokens cut, and that the agent then dropped: Claude Code sends no such answer back, if the answer had no
text, but adds a message of the user ("Output token limit hit. Resume directly...") behind the conversation. If the conversation ends
with a message of the user, the agent may add its text to that message. Only Claude Code's own words are known there: a question
that begins like an earlier one is another question.

Only answers that were cut count. An agent that never sends its answers back may have used an answer that ended by itself.
"""

from collections.abc import Sequence

from art_server.ledger import conversation
from art_server.ledger.conversation import Conversation
from art_server.ledger.session_turns import SessionTurn

RESUME = "Output token limit hit"
"""The beginning of what Claude Code writes after a cut answer."""
CUT = "the limit of tokens cut the answer, and the agent went on without the answer"


def mark_cut(turns: Sequence[SessionTurn]) -> None:
    """Sets why the agent discarded turns of one model that were cut. `turns` are linked, and in the order of their requests."""
    cut = [turn for turn in turns if turn.record.finish_reason == "length" and turn.is_kept and not turn.followers]
    for turn in cut:
        later = (other for other in turns if other.requested_at > (turn.delivered_at or 0) and is_alike(other, turn))
        if any(goes_on_without(other, turn) for other in later):
            turn.discarded = CUT


def is_alike(other: SessionTurn, turn: SessionTurn) -> bool:
    """Whether a request has the same tools and constraints. A title or a summary, which has not, says nothing of the answer."""
    return other.asked[1] == turn.asked[1]


def goes_on_without(other: SessionTurn, turn: SessionTurn) -> bool:
    """Whether a request repeats the conversation of a turn, and adds a text of the user in place of the turn's answer."""
    asked = turn.conversation
    return asked is not None and any(adds_text(beginning, asked) for beginning in other.conversation or ())


def adds_text(beginning: Conversation, asked: Conversation) -> bool:
    """Whether a conversation is the conversation `asked` and one more text of the user."""
    if beginning.message.get("role") != "user":
        return False
    before, asked_before = [part.before.exact if part.before is not None else None for part in (beginning, asked)]
    if before == asked.exact:
        return True
    text, asked_text = [conversation.asked_text(part.message) for part in (beginning, asked)]
    is_added = text.startswith(asked_text) and text[len(asked_text) :].lstrip().startswith(RESUME)
    return is_added and asked.message.get("role") == "user" and before == asked_before
