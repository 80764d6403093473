"""`with_feedback`: what a teacher reads that knows more than the student (`teacher_messages` of `art.distill`).

Words and sources: `art_protocol/teaching.py`.
"""

from typing import Any, cast

from art.types import Messages
from art_protocol import teaching


def with_feedback(messages: Messages, *, feedback: str | None = None, solution: str | None = None) -> Messages | None:
    """The messages with a hint at the end of the last user message: a right answer to the question or, without one, what was
    wrong with the earlier answer. None if there is neither, so that `art.distill` leaves the answer out.

    `solution` is another rollout's right answer or a reference, never the distilled answer itself; its thinking is left out.
    """
    return cast("Messages | None", teaching.with_feedback(cast("Any", messages), feedback, solution))
