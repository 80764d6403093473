"""Builds the conversations of a trajectory from the choices that one model sampled in a session.

A request continues a choice if its messages begin with the choice's conversation and answer; among several choices, the one
with the longest conversation. A choice that no request continues ends a conversation. Choices that the agent did not receive
in full are excluded and counted. So are choices that the agent discarded, as the order of its requests and of the answers'
deliveries shows:

    asked again    the same conversation was requested again after the agent last used the answer: after the agent received
                   the answer, and everything that continues the answer
    passed over    no request continues the answer, and a request that came after the answer's own request continues another
                   answer to the same conversation
    cut            the limit of tokens cut the answer, and the agent went on without the answer (`cut_answers.py`)
    replaced, asked another        the same, where others answered or were asked (`speakers.py`)

Choices of one request, and of requests that overlap, are branches. Conversations are the same if messages, tools and
the constraints of the answer (a JSON schema) are equal: the same text with another schema, or with other white space, is
another question. A request that contains an edited answer (`edits.py`) is a separate conversation, and shows that the
agent used the answer.
"""

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from art_protocol.wire import NOT_DELIVERED, NOT_ENDED, UNNAMED_SECONDS, HistoryBody, SessionReply
from art_server.ledger import conversation
from art_server.ledger.conversation import Conversation, Message
from art_server.ledger.cut_answers import mark_cut
from art_server.ledger.kinds import with_kinds
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Record, num_requests
from art_server.ledger.session_turns import MAX_COMPARED, SessionTurn, ends_of
from art_server.ledger.speakers import PASSED_OVER, Speakers
from art_server.shared import clock

OF_NAMED_STEP = "their requests named a step, beside requests to the newest step: such an opponent is frozen"
ASKED_AGAIN = "the agent asked the same conversation again after it had the answer"

Recorded = tuple[Record, dict[str, Any]]
"""A choice's record, and its turn as the agent has it."""


def read_session(ledger: Ledger, model: int, project: str, session: str, owner: str) -> SessionReply:
    """The conversations of a model of a project in a session (blocking). `owner` is the caller's `Request.owner`, under which
    the base model's answers are recorded."""
    recorded = ledger.find_session(model, session)
    others = ledger.find_other_speakers(model, project, session, owner)
    reply = session_trajectory(recorded, others, ledger.lost_choices(model, session))
    if recorded:
        return reply
    if num_expected := ledger.num_expected(model, session):
        return reply.model_copy(update={"unused": {**reply.unused, NOT_ENDED: num_expected}})
    if reply.unused:
        return reply
    choices = ledger.find_unnamed(model, clock.tick() - UNNAMED_SECONDS * 1_000_000)
    return reply.model_copy(update={"num_unnamed_requests": num_requests(choices)})


def session_trajectory(
    recorded: Sequence[Recorded], others: Sequence[Recorded] = (), lost: Mapping[str, int] | None = None
) -> SessionReply:
    """The conversations of a model in a session: the main one, and the others in the order in which they began. `recorded` are the
    model's choices, `others` the choices of the server's other models. `lost` counts choices without a record, by reason. Choices of a
    step that the request named are another speaker's, if other requests named none."""
    frozen = [pair for pair in recorded if pair[1].get("names_step")]
    if len(frozen) == len(recorded):  # an evaluation of a step
        frozen = []
    own = [pair for pair in recorded if pair not in frozen] if frozen else recorded
    turns = sorted(make_turns(own), key=lambda turn: turn.requested_at)
    of_frozen = make_turns(frozen)
    for turn in of_frozen:
        turn.is_frozen = True
    of_others = sorted([*make_turns(others), *of_frozen], key=lambda turn: turn.requested_at)
    sampled = {end for turn in (*turns, *of_others) for end in turn.ends}
    link_turns(turns, sampled)
    mark_discarded(turns)
    mark_cut(turns)
    for speaker in {turn.speaker for turn in of_others}:
        link_turns([turn for turn in of_others if turn.speaker == speaker], sampled)
    speakers = Speakers(turns, of_others)
    for turn in turns:
        if turn.discarded is None:
            turn.discarded = speakers.why_discarded(turn)
    began = {id(turn): number for number, turn in enumerate(turns)}
    ends = sorted((turn for turn in turns if turn.is_end), key=lambda turn: began[id(turn.first)])
    used: set[str] = set()
    histories, kinds = with_kinds([make_history(turn, used) for turn in ends], ends)
    unused = dict(lost or {})
    if frozen:
        unused[OF_NAMED_STEP] = len(frozen)
    for turn in turns:
        if turn.record.choice_id not in used:
            is_lost = turn.delivered_at is None
            reason = NOT_DELIVERED if is_lost else turn.discarded or PASSED_OVER
            unused[reason] = unused.get(reason, 0) + 1
    return SessionReply(histories=histories, kinds=kinds, num_choices=len(used), unused=unused)


def make_turns(recorded: Sequence[Recorded]) -> list[SessionTurn]:
    """The turns of a session."""
    turns: list[SessionTurn] = []
    for record, kept in recorded:
        requested = record.request.requested_at
        assert requested is not None, "a stored request has its time"
        delivered = requested if record.delivered_at is None else record.delivered_at
        asked = json.dumps([kept["tools"], kept.get("constraints") or {}], sort_keys=True)
        choice = kept["choices"][record.choice_id.rpartition("-")[2]]
        received = conversation.message_digest(choice["message"])
        talk: Conversation | None = kept["conversation"]
        turns.append(
            SessionTurn(
                record=record,
                requested_at=requested,
                delivered_at=delivered if record.is_delivered else None,
                conversation=talk,
                tools=kept["tools"],
                asked=(talk.exact if talk else record.request.prefix_digest, asked),
                constraints=kept.get("constraints") or {},
                choice=choice,
                stops=kept.get("stops", ()),
                ends={record.after, conversation.after(record.request.prefix_digest, received)},
            )
        )
    return turns


def link_turns(turns: Sequence[SessionTurn], sampled: Set[bytes]) -> None:
    """Sets what the turns of one model, in the order of their requests, continue, and when they were last used. `sampled` are
    the ends of the turns of all models: what another model sampled is no edited answer."""
    by_end: dict[bytes, list[SessionTurn]] = {}
    by_conversation: dict[bytes, list[SessionTurn]] = {}
    for turn in turns:
        for end in turn.ends:
            by_end.setdefault(end, []).append(turn)
        by_conversation.setdefault(turn.asked[0], []).append(turn)
    for turn in turns:
        turn.parent, turn.edits = find_parent(turn, by_end, by_conversation, sampled)
        for earlier in (turn.parent, turn.edits):
            if earlier is not None:
                earlier.followers.append(turn)
    for turn in reversed(turns):
        own = turn.requested_at if turn.delivered_at is None else turn.delivered_at
        turn.last_used_at = max([own, *(follower.last_used_at for follower in turn.followers)])


def find_parent(
    turn: SessionTurn,
    by_end: Mapping[bytes, Sequence[SessionTurn]],
    by_conversation: Mapping[bytes, Sequence[SessionTurn]],
    sampled: Set[bytes],
) -> tuple[SessionTurn | None, SessionTurn | None]:
    """The earlier turn that `turn` continues, and a turn behind the earlier turn whose answer the agent edited.

    Among equal answers the record of `turn` names one, or else the latest turn that was delivered before the request of
    `turn` counts, or else the latest turn.
    """
    edited: SessionTurn | None = None
    for beginning in turn.conversation or ():
        ends = ends_of(beginning, turn.stops)
        ended = [earlier for end in ends for earlier in by_end.get(end, ())]
        equal = [earlier for earlier in ended if earlier.requested_at < turn.requested_at]
        if equal:
            named = [earlier for earlier in equal if earlier.record.choice_id == turn.record.continues]
            had = [earlier for earlier in equal if (earlier.delivered_at or turn.requested_at) < turn.requested_at]
            return (named or had or equal)[-1], edited
        is_foreign = beginning.message.get("role") == "assistant" and sampled.isdisjoint(ends)
        if edited is None and is_foreign and beginning.before is not None:
            asked = by_conversation.get(beginning.before.exact, ())
            edited = find_edited(turn, beginning.message, asked)
    return None, edited


def find_edited(turn: SessionTurn, message: Message, asked: Sequence[SessionTurn]) -> SessionTurn | None:
    """The latest turn before `turn` whose answer, edited by the agent, is `message`; None if there is none."""
    earlier_turns = [earlier for earlier in asked if earlier.requested_at < turn.requested_at]
    edited = (earlier for earlier in reversed(earlier_turns[-MAX_COMPARED:]) if earlier.is_edited_as(message))
    return next(edited, None)


def mark_discarded(turns: Sequence[SessionTurn]) -> None:
    """Sets why the agent discarded turns for other answers of the same model. `turns` are the turns of one model, in the
    order of their requests."""
    by_asked: dict[tuple[bytes, str], list[SessionTurn]] = {}
    for turn in turns:
        by_asked.setdefault(turn.asked, []).append(turn)
    for equal in by_asked.values():
        # An answer that never came replaces none.
        asked_at = max((sibling.requested_at for sibling in equal if sibling.delivered_at is not None), default=None)
        followers = [follower for sibling in equal for follower in sibling.followers]
        continued_at = max((follower.requested_at for follower in followers), default=None)
        for turn in equal:
            if asked_at is not None and asked_at > turn.last_used_at:
                turn.discarded = ASKED_AGAIN
            elif not turn.followers and continued_at is not None and continued_at > turn.requested_at:
                turn.discarded = PASSED_OVER
    for turn in turns:
        for earlier in (turn.parent, turn.edits):
            if earlier is not None and earlier.discarded is not None:
                turn.discarded = earlier.discarded


def make_history(turn: SessionTurn, used: set[str]) -> HistoryBody:
    """The conversation that ends with `turn`; recorded choices replace the messages that repeat them. Adds the choices' ids to
    `used`."""
    earlier: dict[bytes, SessionTurn] = {}
    parent = turn.parent
    while parent is not None:
        earlier |= dict.fromkeys(parent.ends, parent)
        parent = parent.parent
    entries: list[dict[str, Any]] = []
    for beginning in reversed([*(turn.conversation or ())]):
        repeated = next((earlier[end] for end in ends_of(beginning, turn.stops) if end in earlier), None)
        if repeated is not None:
            used.add(repeated.record.choice_id)
            entries.append(repeated.choice)
        else:
            entries.append(beginning.message)
    used.add(turn.record.choice_id)
    return HistoryBody(messages_and_choices=[*entries, turn.choice], tools=turn.tools)
