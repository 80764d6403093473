"""A recorded choice of a session, with its request as the agent sent it, and how it relates to the model's other choices."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from art_server.ledger import conversation
from art_server.ledger.conversation import Conversation, Message
from art_server.ledger.edits import is_edit
from art_server.ledger.records import Record

MAX_COMPARED = 32
"""Answers to one conversation that are compared with a message, and messages that are compared with an answer."""


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
    """Equal for equal conversations. The first part is `Conversation.exact`, the second has tools and constraints."""
    constraints: dict[str, Any]
    """Fields of the request that constrain its answer, such as a JSON schema."""
    choice: dict[str, Any]
    stops: Sequence[str]
    """The stop strings of its request."""
    ends: set[bytes]
    """Digests of the conversation that the choice ends: as it was sampled, and as the agent received it."""
    parent: "SessionTurn | None" = None
    """The turn that this one continues."""
    edits: "SessionTurn | None" = None
    """A turn behind `parent` whose answer, edited by the agent, is in this turn's messages."""
    followers: list["SessionTurn"] = field(default_factory=list)
    """The turns that continue this one, or contain its edited answer."""
    last_used_at: int = 0
    """The time of the last request or delivery of this turn and of all turns that follow."""
    discarded: str | None = None
    """Why the agent discarded the answer, or an earlier one of its conversation."""

    is_frozen: bool = False
    """The choice is of a step that its request named, beside choices of the newest step."""

    @property
    def speaker(self) -> tuple[int | None, int | None]:
        """Who speaks: the number of the model that sampled the choice (None: the base model), and its step if that is frozen."""
        request = self.record.request
        return request.model, request.step if self.is_frozen else None

    @property
    def is_kept(self) -> bool:
        return self.delivered_at is not None and self.discarded is None

    @property
    def is_end(self) -> bool:
        """Whether the choice ends a conversation of the trajectory."""
        is_continued = any(turn.parent is self and turn.is_kept for turn in self.followers)
        return self.is_kept and not is_continued

    @property
    def first(self) -> "SessionTurn":
        """The turn that began the conversation."""
        turn = self
        while turn.parent is not None:
            turn = turn.parent
        return turn

    def is_repeated_as(self, beginning: Conversation, stops: Sequence[str]) -> bool:
        """Whether the last message of a request's beginning is the answer, unchanged. `stops` are the request's
        stop strings."""
        return not self.ends.isdisjoint(ends_of(beginning, stops))

    def is_edited_as(self, message: Message) -> bool:
        """Whether a message that is not the answer unchanged is the answer as the agent edited it."""
        ids = {self.record.choice_id}
        if self.record.request.api == "chat":  # with other APIs the choice lacks the ids that the agent has
            ids.update(conversation.ids_in(self.choice["message"]))
        return not ids.isdisjoint(conversation.ids_in(message)) or is_edit(self.choice["message"], message)


def ends_of(beginning: Conversation, stops: Sequence[str]) -> list[bytes]:
    """The digests that a choice may have in `SessionTurn.ends` if a conversation's last message repeats the choice: with the
    message as it is, and cut at a stop string."""
    cut = conversation.cut_digest(beginning.message, stops) if beginning.message.get("role") == "assistant" else None
    if cut is None:
        return [beginning.digest]
    before = beginning.before.digest if beginning.before is not None else conversation.EMPTY
    return [beginning.digest, conversation.after(before, cut)]
