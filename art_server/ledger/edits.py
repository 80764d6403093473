"""Whether an assistant's message in a request is a recorded answer that the agent edited, or another answer.

Words are compared: case, white space and punctuation do not count, nor does thinking. A message is an edited answer if

    it was cut              all of its words stand in the answer, one behind the other, or it has none
    it was added to         it begins with all words of the answer
    one place was changed   the common beginning and end are more than half of the longer text
    several were changed    more than half of the shorter text stands in the other, in stretches of `STRETCH` letters

Anything else is another answer: another model sampled it, or the program wrote it. Where nearly all text is the same, nobody
can tell a repair from another speaker, and the agent continued with nearly all tokens of the answer.
"""

import re
from collections.abc import Sequence

from art_server.ledger import conversation
from art_server.ledger.conversation import Message

STRETCH = 16
"""Letters and digits that two independent texts rarely have in common, one behind the other."""

_WORDS = re.compile(r"[^\W_]+")


def is_edit(answer: Message, message: Message) -> bool:
    """Whether `message` is `answer` with changes that the agent made."""
    sampled, sent = words_of(answer), words_of(message)
    if not sampled or not sent:
        return not sent
    if spoken(sent) in spoken(sampled) or spoken(sent).startswith(spoken(sampled)):
        return True
    shorter, longer = sorted(("".join(sampled), "".join(sent)), key=len)
    return 2 * num_at_ends(shorter, longer) > len(longer) or 2 * num_in_stretches(shorter, longer) > len(shorter)


def words_of(message: Message) -> list[str]:
    """The words that a message shows: of its text, and of its tool calls' names and arguments."""
    texts = [conversation.split_thinking(conversation.content_text(message.get("content")))[1]]
    for call in conversation.as_list(message.get("tool_calls")):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            texts += [str(function.get("name")), str(function.get("arguments"))]
    return _WORDS.findall("\n".join(texts).casefold())


def spoken(words: Sequence[str]) -> str:
    """Words as one text, such as ` not yet `, which other words contain only as whole words, one behind the other."""
    return f" {' '.join(words)} "


def num_at_ends(shorter: str, longer: str) -> int:
    """The letters that two texts have in common at their beginning and, of the rest, at their end."""
    start = num_equal(shorter, longer)
    return start + num_equal(shorter[start:][::-1], longer[start:][::-1])


def num_equal(shorter: str, longer: str) -> int:
    """The length of the two texts' common beginning."""
    pairs = enumerate(zip(shorter, longer, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(shorter))


def num_in_stretches(shorter: str, longer: str) -> int:
    """The letters of the shorter text that belong to a stretch which the longer has, too."""
    known = {longer[start : start + STRETCH] for start in range(len(longer) - STRETCH + 1)}
    num = counted = 0
    for start in range(len(shorter) - STRETCH + 1):
        if shorter[start : start + STRETCH] in known:
            num += start + STRETCH - max(start, counted)
            counted = start + STRETCH
    return num
