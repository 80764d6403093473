"""`with_feedback`: what a teacher reads that knows more than the student (`teacher_messages` of `art.distill`).

Sources: Hübotter et al. 2026, SDPO (arXiv:2601.20802): a right answer of another rollout of the group, or else the text about the
error; a rollout never reads its own success. Shenfeld et al. 2026, SDFT (arXiv:2601.19897): a demonstration. Zhao et al. 2026,
OPSD (arXiv:2601.18734): a solution. The wording is ours.
"""

from typing import Any, cast

from art.types import Messages

THINKING_END = "</think>"
WRONG = "\n\nThe earlier answer was wrong.\n\n{}\n\nNow give the right answer."
RIGHT = "\n\nThis is a right answer:\n\n{}\n\nAnswer again."


def with_feedback(messages: Messages, *, feedback: str | None = None, solution: str | None = None) -> Messages | None:
    """The messages with a hint at the end of the last user message: a right answer to the question or, without one, what was
    wrong with the earlier answer. None if there is neither, so that `art.distill` leaves the answer out.

    `solution` is another rollout's right answer or a reference, never the distilled answer itself; its thinking is left out.
    """
    answer = (solution or "").rpartition(THINKING_END)[2].strip()
    error = (feedback or "").strip()
    if answer:
        return _with_text(messages, RIGHT.format(answer))
    return _with_text(messages, WRONG.format(error)) if error else None


def _with_text(messages: Messages, text: str) -> Messages:
    """The messages with a text at the end of the last user message: a message of its own could break the order of roles that
    chat templates require."""
    for index in reversed(range(len(messages))):
        message = cast("dict[str, Any]", messages[index])
        if message["role"] == "user":
            content = message["content"]
            more = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
            return [*messages[:index], cast("Any", {**message, "content": more}), *messages[index + 1 :]]
    return [*messages, {"role": "user", "content": text.strip()}]
