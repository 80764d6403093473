"""The words of a teacher's prompt: what a model reads that knows more than it knew when it answered. `art.with_feedback` and the
server, which learns from the texts of scores, share the words.

Sources: Hübotter et al. 2026, SDPO (arXiv:2601.20802): a right answer of another rollout of the group, or else the text about the
error; a rollout never reads its own success. Shenfeld et al. 2026, SDFT (arXiv:2601.19897): a demonstration. Zhao et al. 2026,
OPSD (arXiv:2601.18734): a solution. The wording is ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_ADVANTAGE = 5.0
"""The largest advantage of a token that a teacher gives, in nats: a token to which the teacher gives almost no probability would
otherwise outweigh all other tokens of the step."""
THINKING_END = "</think>"
WRONG = "\n\nThe earlier answer was wrong.\n\n{}\n\nNow give the right answer."
RIGHT = "\n\nThis is a right answer:\n\n{}\n\nAnswer again."


def with_feedback(
    messages: Sequence[Mapping[str, Any]], feedback: str | None, solution: str | None
) -> list[Mapping[str, Any]] | None:
    """As `art.with_feedback`, for messages of any type."""
    answer = (solution or "").rpartition(THINKING_END)[2].strip()
    error = (feedback or "").strip()
    if answer:
        return _with_text(messages, RIGHT.format(answer))
    return _with_text(messages, WRONG.format(error)) if error else None


def _with_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """The messages with a text at the end of the last user message: a message of its own could break the order of roles that
    chat templates require."""
    for index in reversed(range(len(messages))):
        message = messages[index]
        if message["role"] == "user":
            content = message.get("content") or ""
            more = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
            return [*messages[:index], {**message, "content": more}, *messages[index + 1 :]]
    return [*messages, {"role": "user", "content": text.strip()}]
