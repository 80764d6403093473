"""What the conversations of a session are to the agent: the main one, and those beside it, told apart by what their requests are.

    main             the conversation with the most answers
    side_call        no tools, where the main conversation has tools: a title, a summary, a probe; or another system prompt, and one answer
    sub_agent        another system prompt; or the agent's own, while the main conversation waits
    context_reset    the agent's system prompt and another first message, before or after the main conversation: a compaction
    branch           the agent's system prompt and its first message: another way to go on

An agent writes the date or the state of its folder into its prompts. So prompts are the same if four fifths of their words are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from art_protocol.wire import HistoryBody, HistoryKind
from art_server.ledger import conversation
from art_server.ledger.session_turns import SessionTurn

ALIKE = 0.8
"""The share of words that two texts have in common if they are the same prompt."""
SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation as a whole."""

    history: HistoryBody
    num_answers: int
    has_tools: bool
    system: frozenset[str]
    """The words of its system messages."""
    first: frozenset[str]
    """The words of the message behind them."""
    began_at: int
    ended_at: int
    """The times of its first and its last request."""


def with_kinds(
    histories: Sequence[HistoryBody], ends: Sequence[SessionTurn]
) -> tuple[list[HistoryBody], list[HistoryKind]]:
    """The histories with the main one first, and what they are. `ends` are the turns that end them; both are in the order in which
    the conversations began."""
    talks = [talk_of(history, end) for history, end in zip(histories, ends, strict=True)]
    if not talks:
        return [], []
    main = max(talks, key=lambda talk: (talk.num_answers, talk.has_tools, len(talk.history.messages_and_choices)))
    others = [talk for talk in talks if talk is not main]
    return [talk.history for talk in (main, *others)], ["main", *(kind_of(talk, main) for talk in others)]


def talk_of(history: HistoryBody, end: SessionTurn) -> Talk:
    first = end.first  # a later turn may be a summary, which some agents ask for without tools
    texts: dict[bool, list[str]] = {True: [], False: []}
    for beginning in reversed([*(first.conversation or ())]):
        message = beginning.message
        texts[message.get("role") in SYSTEM].append(conversation.content_text(message.get("content")))
    return Talk(
        history=history,
        num_answers=sum("finish_reason" in entry for entry in history.messages_and_choices),
        has_tools=bool(first.tools),
        system=frozenset(" ".join(texts[True]).split()),
        first=frozenset(" ".join(texts[False][:1]).split()),
        began_at=first.requested_at,
        ended_at=end.requested_at,
    )


def kind_of(talk: Talk, main: Talk) -> HistoryKind:
    if main.has_tools and not talk.has_tools:
        return "side_call"
    if not is_alike(talk.system, main.system):
        return "sub_agent" if talk.has_tools or talk.num_answers > 1 else "side_call"
    if is_alike(talk.first, main.first):
        return "branch"
    is_beside = talk.began_at < main.ended_at and main.began_at < talk.ended_at
    return "sub_agent" if is_beside else "context_reset"


def is_alike(words: frozenset[str], others: frozenset[str]) -> bool:
    """Whether two texts are one prompt, perhaps with another date."""
    return len(words & others) >= ALIKE * len(words | others)
