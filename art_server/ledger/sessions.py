"""Builds the conversations of a trajectory from the choices that one model sampled in a session.

A request continues the choice whose conversation, with the answer, its messages begin with; of several, the longest.
A choice that no request continues ends a conversation. Two kinds of choice are excluded and counted: choices that the
agent did not receive in full, and choices that it discarded for another answer to the same conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art.wire import HistoryBody, SessionReply
from art_server.ledger import conversation
from art_server.ledger.records import Record

NOT_DELIVERED = "the answer did not reach the agent in full"
DISCARDED = "the agent continued with another answer to the same conversation"


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A recorded choice, with its request as the agent sent it."""

    record: Record
    messages: list[dict[str, Any]]
    prefixes: list[bytes]
    """Digests of all beginnings of `messages`."""
    tools: list[dict[str, Any]] | None
    choice: dict[str, Any]

    @property
    def ends(self) -> set[bytes]:
        """Digests of the conversation that the choice ends: as it was sampled, and as the agent received it."""
        received = conversation.message_digest(self.choice["message"])
        return {self.record.after, conversation.after(self.record.request.before, received)}


def session_trajectory(found: Sequence[tuple[Record, dict[str, Any]]]) -> SessionReply:
    """The conversations of a session, in the order in which they began."""
    turns = [make_turn(record, kept) for record, kept in found]
    by_end: dict[bytes, list[SessionTurn]] = {}
    for turn in turns:
        for end in turn.ends:
            by_end.setdefault(end, []).append(turn)
    parents = {id(turn): find_parent(turn, by_end) for turn in turns}
    continued = {id(parents[id(turn)]) for turn in turns if turn.record.is_delivered}
    taken_up = {turn.record.request.before for turn in turns if id(turn) in continued}
    unused: dict[str, int] = {}
    ends: list[SessionTurn] = []
    for turn in turns:
        if id(turn) in continued:
            continue
        if not turn.record.is_delivered:
            unused[NOT_DELIVERED] = unused.get(NOT_DELIVERED, 0) + 1
        elif turn.record.request.before in taken_up:
            unused[DISCARDED] = unused.get(DISCARDED, 0) + 1
        else:
            ends.append(turn)
    began = {id(turn): number for number, turn in enumerate(turns)}
    ends.sort(key=lambda turn: began[id(first_turn(turn, parents))])
    used: set[str] = set()
    histories = [make_history(turn, parents, used) for turn in ends]
    return SessionReply(histories=histories, num_choices=len(used), unused=unused)


def make_turn(record: Record, kept: dict[str, Any]) -> SessionTurn:
    index = record.choice_id.rpartition("-")[2]
    messages = kept["messages"]
    return SessionTurn(
        record=record,
        messages=messages,
        prefixes=conversation.prefix_digests(messages),
        tools=kept["tools"],
        choice=kept["choices"][index],
    )


def find_parent(turn: SessionTurn, by_end: dict[bytes, list[SessionTurn]]) -> SessionTurn | None:
    """The turn that this one continues. Among equal answers, the one that the record names, else the latest."""
    for prefix in reversed(turn.prefixes):
        if equal := by_end.get(prefix):
            continued = turn.record.continues
            return next((one for one in equal if one.record.choice_id == continued), equal[-1])
    return None


def first_turn(turn: SessionTurn, parents: dict[int, SessionTurn | None]) -> SessionTurn:
    """The turn that began the conversation."""
    while (parent := parents[id(turn)]) is not None:
        turn = parent
    return turn


def make_history(
    turn: SessionTurn, parents: dict[int, SessionTurn | None], used: set[str]
) -> HistoryBody:
    """The conversation that ends with `turn`; recorded choices replace the messages that repeat them."""
    earlier: dict[bytes, SessionTurn] = {}
    parent = parents[id(turn)]
    while parent is not None:
        earlier |= dict.fromkeys(parent.ends, parent)
        parent = parents[id(parent)]
    entries: list[dict[str, Any]] = []
    for message, prefix in zip(turn.messages, turn.prefixes[1:], strict=True):
        if prefix in earlier:
            used.add(earlier[prefix].record.choice_id)
            entries.append(earlier[prefix].choice)
        else:
            entries.append(message)
    used.add(turn.record.choice_id)
    return HistoryBody(messages_and_choices=[*entries, turn.choice], tools=turn.tools)
