"""The teacher: what the text of a score changes in the probabilities of the answer's tokens.

The step that serves reads the question twice: as the answer's request had it (the student), and with what was wrong, or with the
right answer (the teacher, `art_protocol.teaching`). Behind both it scores the tokens that were sampled; they are never tokenised again.
The advantage of a token is log p_teacher - log p_student, clamped: distillation of a model into itself, in the sampled-token form.
`art.distill(teacher_messages=...)` does the same from a program.

Sources: Hübotter et al. 2026, SDPO (arXiv:2601.20802), the loss in section 3, for what was wrong; Shenfeld et al. 2026, SDFT
(arXiv:2601.19897), for a right answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_protocol.teaching import MAX_ADVANTAGE, with_feedback
from art_server.engine.fleet import Fleet
from art_server.errors import InvalidInput
from art_server.learning.answerer import Answerer, at_once
from art_server.ledger.conversation import Message
from art_server.ledger.records import TEMPLATE_KWARGS, Record
from art_server.store.registry import RegisteredModel

TOO_LONG, NO_TEXT = "too_long", "no_text"


@dataclass(frozen=True, slots=True)
class Lesson:
    """An answer, what was asked, and what is said of the answer."""

    record: Record
    messages: Sequence[Message]
    """Before the answer."""
    tools: list[dict[str, Any]] | None
    feedback: str
    correction: str | None
    """Displaces the feedback."""


class Unteachable(Exception):
    """A text cannot teach an answer. `reason` is as in the rows of scores."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Teacher:
    """Asks the step that serves. Nothing is stored."""

    def __init__(self, *, fleet: Fleet, answerer: Answerer):
        self._fleet = fleet
        self._answerer = answerer

    async def advantages(
        self, model: RegisteredModel, lessons: Sequence[Lesson], max_length: int
    ) -> dict[str, list[float] | str]:
        """For the choice of each lesson the advantages of its tokens, or why the text teaches nothing. `max_length`: the tokens that
        the engine takes.

        Raises:
            ServerError: from `Answerer`.
        """
        taught: dict[str, list[float] | str] = {}
        step, left = model.step, iter(lessons)

        async def teach() -> None:
            for lesson in left:
                try:
                    taught[lesson.record.choice_id] = await self._gaps(model, step, lesson, max_length)
                except Unteachable as error:
                    taught[lesson.record.choice_id] = error.reason

        await at_once(teach)
        return taught

    async def _gaps(self, model: RegisteredModel, step: int, lesson: Lesson, max_length: int) -> list[float]:
        """The advantages of an answer's tokens. The record has the student's log-probabilities if this step sampled the answer from
        the same tokens."""
        record, sampled = lesson.record, lesson.record.token_ids
        hinted = with_feedback(lesson.messages, lesson.feedback, lesson.correction)
        if hinted is None:  # a correction that is thinking only
            raise Unteachable(NO_TEXT)
        read = await self._render(lesson, hinted)
        if len(read) + len(sampled) >= max_length:  # the engine samples one token behind them
            raise Unteachable(TOO_LONG)
        student = record.logprobs
        prompt = await self._render(lesson, lesson.messages)
        if record.request.step != step or prompt != record.prompt_token_ids:
            student = await self._answerer.logprobs(model, step, prompt, sampled)
        teacher = await self._answerer.logprobs(model, step, read, sampled)
        gaps = (knows - knew for knows, knew in zip(teacher, student, strict=True))
        return [max(-MAX_ADVANTAGE, min(MAX_ADVANTAGE, gap)) for gap in gaps]

    async def _render(self, lesson: Lesson, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation with the header of the answer."""
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
        if lesson.tools:
            body["tools"] = [chat_tool(tool) for tool in lesson.tools]
        if kwargs := lesson.record.sampling.get(TEMPLATE_KWARGS):
            body[TEMPLATE_KWARGS] = kwargs
        try:
            return await self._fleet.tokenize(body)
        except InvalidInput as error:
            raise Unteachable(error.code) from error


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of any API in the form of the chat API."""
    if "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("input_schema", tool.get("parameters"))
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
