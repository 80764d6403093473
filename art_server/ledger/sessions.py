"""Builds the conversations of a trajectory from the choices that one model sampled in a session.

A request continues the choice whose conversation, with the answer, its messages begin with; of several, the longest.
A choice that no request continues ends a conversation. Choices that the agent did not receive in full are excluded and
counted. So are those that it discarded, as the order of its requests and of the answers' deliveries shows:

    asked again    the same conversation was requested again after the agent last used the answer: after it received the
                   answer, and everything that continues it
    passed over    no request continues the answer, and one that came after the answer's own request continues another
                   answer to the same conversation

Choices of one request, and of requests that overlap, are branches. Conversations are the same if messages, tools and
the constraints of the answer (a JSON schema) are equal: the same text with another schema, or with other white space, is
another question.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from art_protocol.wire import HistoryBody, SessionReply
from art_server.ledger import conversation
from art_server.ledger.conversation import Conversation
from art_server.ledger.records import Record

NOT_DELIVERED = "the answer did not reach the agent in full"
ASKED_AGAIN = "the agent asked the same conversation again after it had the answer"
PASSED_OVER = "the agent continued with another answer to the same conversation"


@dataclass(slots=True, eq=False)
class SessionTurn:
    """A recorded choice, with its request as the agent sent it."""

    record: Record
    requested_at: int
    delivered_at: int | None
    """None: it was not delivered."""
    conversation: Conversation | None
    """The request's messages; None: it has none."""
    tools: list[dict[str, Any]] | None
    asked: tuple[bytes, str]
    """Equal for equal conversations."""
    choice: dict[str, Any]
    stops: Sequence[str]
    """The stop strings of its request."""
    ends: set[bytes]
    """Digests of the conversation that the choice ends: as it was sampled, and as the agent received it."""
    parent: "SessionTurn | None" = None
    """The turn that this one continues."""
    children: list["SessionTurn"] = field(default_factory=list)
    """The turns that continue this one."""
    last_used_at: int = 0
    """The last request or delivery of this turn and of all that continue it."""
    discarded: str | None = None
    """Why the agent discarded the answer, or an earlier one of its conversation."""

    @property
    def is_end(self) -> bool:
        """Whether the choice ends a conversation of the trajectory."""
        is_continued = any(child.delivered_at is not None for child in self.children)
        return self.delivered_at is not None and self.discarded is None and not is_continued

    @property
    def first(self) -> "SessionTurn":
        """The turn that began the conversation."""
        turn = self
        while turn.parent is not None:
            turn = turn.parent
        return turn


def session_trajectory(found: Sequence[tuple[Record, dict[str, Any]]]) -> SessionReply:
    """The conversations of a session, in the order in which their first requests came."""
    turns = sorted(make_turns(found), key=lambda turn: turn.requested_at)
    link_turns(turns)
    mark_discarded(turns)
    began = {id(turn): number for number, turn in enumerate(turns)}
    ends = sorted((turn for turn in turns if turn.is_end), key=lambda turn: began[id(turn.first)])
    used: set[str] = set()
    histories = [make_history(turn, used) for turn in ends]
    unused: dict[str, int] = {}
    for turn in turns:
        if turn.record.choice_id not in used:
            is_lost = turn.delivered_at is None
            reason = NOT_DELIVERED if is_lost else turn.discarded or PASSED_OVER
            unused[reason] = unused.get(reason, 0) + 1
    return SessionReply(histories=histories, num_choices=len(used), unused=unused)


def make_turns(found: Sequence[tuple[Record, dict[str, Any]]]) -> list[SessionTurn]:
    """The turns of a session. Requests of an earlier version, without times, count as made one after the other."""
    turns: list[SessionTurn] = []
    places: dict[str, int] = {}
    for number, (record, kept) in enumerate(found):
        place = places.setdefault(record.request.request_id, number - len(found))
        requested = record.request.requested_at
        requested = place if requested is None else requested
        delivered = requested if record.delivered_at is None else record.delivered_at
        asked = json.dumps([kept["tools"], kept.get("constraints") or {}], sort_keys=True)
        choice = kept["choices"][record.choice_id.rpartition("-")[2]]
        received = conversation.message_digest(choice["message"])
        talk = conversation_of(kept)
        turns.append(
            SessionTurn(
                record=record,
                requested_at=requested,
                delivered_at=delivered if record.is_delivered else None,
                conversation=talk,
                tools=kept["tools"],
                asked=(talk.exact if talk else record.request.prefix_digest, asked),
                choice=choice,
                stops=kept.get("stops", ()),
                ends={record.after, conversation.after(record.request.prefix_digest, received)},
            )
        )
    return turns


def conversation_of(kept: dict[str, Any]) -> Conversation | None:
    """A turn's messages; an earlier version stored them as a list."""
    if "messages" in kept:
        return functools.reduce(conversation.grow, kept["messages"], None)
    return kept["conversation"]


def link_turns(turns: Sequence[SessionTurn]) -> None:
    """Sets what the turns, in the order of their requests, continue, and when they were last used."""
    by_end: dict[bytes, list[SessionTurn]] = {}
    for turn in turns:
        for end in turn.ends:
            by_end.setdefault(end, []).append(turn)
    for turn in turns:
        turn.parent = find_parent(turn, by_end)
        if turn.parent is not None:
            turn.parent.children.append(turn)
    for turn in reversed(turns):
        own = turn.requested_at if turn.delivered_at is None else turn.delivered_at
        turn.last_used_at = max([own, *(child.last_used_at for child in turn.children)])


def find_parent(turn: SessionTurn, by_end: dict[bytes, list[SessionTurn]]) -> SessionTurn | None:
    """The earlier turn that this one continues. Among equal answers, the one that the record names, else the latest that
    was delivered before this turn's request, else the latest."""
    for beginning in turn.conversation or ():
        ended = [one for end in ends_of(beginning, turn.stops) for one in by_end.get(end, ())]
        equal = [one for one in ended if one.requested_at < turn.requested_at]
        if equal:
            named = [one for one in equal if one.record.choice_id == turn.record.continues]
            had = [one for one in equal if (one.delivered_at or turn.requested_at) < turn.requested_at]
            return (named or had or equal)[-1]
    return None


def ends_of(beginning: Conversation, stops: Sequence[str]) -> list[bytes]:
    """The digests with which the choice may have ended that a conversation's last message repeats."""
    cut = conversation.cut_digest(beginning.message, stops) if beginning.message.get("role") == "assistant" else None
    if cut is None:
        return [beginning.digest]
    before = beginning.before.digest if beginning.before is not None else conversation.EMPTY
    return [beginning.digest, conversation.after(before, cut)]


def mark_discarded(turns: Sequence[SessionTurn]) -> None:
    """Sets why the agent discarded each of these turns, which are in the order of their requests."""
    by_asked: dict[tuple[bytes, str], list[SessionTurn]] = {}
    for turn in turns:
        by_asked.setdefault(turn.asked, []).append(turn)
    for equal in by_asked.values():
        # An answer that never came replaces none.
        asked_at = max((t.requested_at for t in equal if t.delivered_at is not None), default=None)
        continued_at = max((c.requested_at for t in equal for c in t.children), default=None)
        for turn in equal:
            if asked_at is not None and asked_at > turn.last_used_at:
                turn.discarded = ASKED_AGAIN
            elif not turn.children and continued_at is not None and continued_at > turn.requested_at:
                turn.discarded = PASSED_OVER
    for turn in turns:
        if turn.parent is not None and turn.parent.discarded is not None:
            turn.discarded = turn.parent.discarded


def make_history(turn: SessionTurn, used: set[str]) -> HistoryBody:
    """The conversation that ends with `turn`; recorded choices replace the messages that repeat them."""
    earlier: dict[bytes, SessionTurn] = {}
    parent = turn.parent
    while parent is not None:
        earlier |= dict.fromkeys(parent.ends, parent)
        parent = parent.parent
    entries: list[dict[str, Any]] = []
    for beginning in reversed([*(turn.conversation or ())]):
        made = next((earlier[end] for end in ends_of(beginning, turn.stops) if end in earlier), None)
        if made is not None:
            used.add(made.record.choice_id)
            entries.append(made.choice)
        else:
            entries.append(beginning.message)
    used.add(turn.record.choice_id)
    return HistoryBody(messages_and_choices=[*entries, turn.choice], tools=turn.tools)
