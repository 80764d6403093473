"""From what one model said in a session to the conversations of a trajectory.

A request continues the choice whose conversation, answer included, its own messages begin with; the longest such one.
Every choice that nothing continues ends a conversation. Left out, and counted, are choices that did not reach the agent
in full and choices of which another one, of the same conversation, was taken up instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art.wire import HistoryBody, SessionReply
from art_server.ledger import conversation
from art_server.ledger.records import Record

NOT_DELIVERED = "the answer did not reach the agent in full"
NOT_TAKEN_UP = "another answer to the same conversation was taken up"


@dataclass(frozen=True, slots=True)
class Turn:
    """A recorded choice with its request as the agent made it."""

    record: Record
    messages: list[dict[str, Any]]
    prefixes: list[bytes]
    """Names of every beginning of `messages`."""
    tools: list[dict[str, Any]] | None
    choice: dict[str, Any]

    @property
    def ends(self) -> set[bytes]:
        """Names of the conversation that the choice made: as it was sampled, and as the agent received it."""
        said = conversation.said_by(self.choice["message"])
        return {self.record.after, conversation.after(self.record.request.before, said)}


def session_trajectory(found: Sequence[tuple[Record, dict[str, Any]]]) -> SessionReply:
    """The conversations of a session, in the order in which they began."""
    turns = [make_turn(record, kept) for record, kept in found]
    by_end: dict[bytes, list[Turn]] = {}
    for turn in turns:
        for end in turn.ends:
            by_end.setdefault(end, []).append(turn)
    parents = {id(turn): find_parent(turn, by_end) for turn in turns}
    continued = {id(parents[id(turn)]) for turn in turns if turn.record.is_delivered}
    taken_up = {turn.record.request.before for turn in turns if id(turn) in continued}
    unused: dict[str, int] = {}
    histories: list[HistoryBody] = []
    used: set[str] = set()
    for turn in turns:
        if id(turn) in continued:
            continue
        if not turn.record.is_delivered:
            unused[NOT_DELIVERED] = unused.get(NOT_DELIVERED, 0) + 1
        elif turn.record.request.before in taken_up:
            unused[NOT_TAKEN_UP] = unused.get(NOT_TAKEN_UP, 0) + 1
        else:
            histories.append(make_history(turn, parents, used))
    return SessionReply(histories=histories, num_choices=len(used), unused=unused)


def make_turn(record: Record, kept: dict[str, Any]) -> Turn:
    index = record.choice_id.rpartition("-")[2]
    messages = kept["messages"]
    return Turn(
        record=record,
        messages=messages,
        prefixes=conversation.prefix_digests(messages),
        tools=kept["tools"],
        choice=kept["choices"][index],
    )


def find_parent(turn: Turn, by_end: dict[bytes, list[Turn]]) -> Turn | None:
    """The turn that this one continues; among equal answers the one whose tokens the engine was given."""
    for prefix in reversed(turn.prefixes):
        if equal := by_end.get(prefix):
            continued = turn.record.continues
            return next((one for one in equal if one.record.choice_id == continued), equal[-1])
    return None


def make_history(turn: Turn, parents: dict[int, Turn | None], used: set[str]) -> HistoryBody:
    """A conversation up to its last choice, with the recorded choices in place of the messages that repeat them."""
    earlier: dict[bytes, Turn] = {}
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
