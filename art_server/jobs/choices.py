"""A turn as the client sent it: an OpenAI choice, or an assistant's message that is trained as a demonstration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from art_protocol.wire import BY_REFERENCE
from art_server.errors import InvalidInput
from art_server.jobs.turns import ResolvedTurn
from art_server.ledger import conversation
from art_server.ledger.conversation import Message

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning"})

MAX_STEP = 2**31
"""The step that a choice names is less than this."""


@dataclass(frozen=True, slots=True)
class SentTurn:
    """A turn as the client sent it."""

    message: Message
    is_choice: bool
    choice_id: str | None
    """`art.id`."""
    model_id: str | None
    """The model that sampled the turn, by `art.model`; None is the base model. Without `art.model`, the job's model."""
    step: int | None
    """`art.step`."""
    logprobs: list[float] | None
    """The log-probabilities that the choice carries; None if there are none or one is missing."""
    carried: ResolvedTurn | None
    """The tokens that the choice carries."""
    is_reference: bool
    """The choice names its record, and was sent without its tokens."""


def read_turn(entry: dict[str, Any], job_model_id: str) -> SentTurn:
    """Reads an entry of a trajectory."""
    choice = entry if is_choice(entry) else {"message": entry}
    mark = choice.get("art")
    if not isinstance(mark, dict):
        mark = {}
    choice_id, step = mark.get("id"), mark.get("step")
    if not isinstance(choice_id, str):
        choice_id = None
    return SentTurn(
        message=choice["message"],
        is_choice=choice is entry,
        choice_id=choice_id,
        model_id=mark.get("model", job_model_id),
        step=step if type(step) is int and 0 <= step < MAX_STEP else None,
        logprobs=logprob_values(choice),
        carried=carried_tokens(choice, choice_id),
        is_reference=choice_id is not None and choice.get(BY_REFERENCE) is True,
    )


def is_choice(entry: dict[str, Any]) -> bool:
    """Whether an entry of a trajectory is an OpenAI choice; other entries are messages."""
    return isinstance(entry.get("message"), dict) and "finish_reason" in entry


def is_weightless(entry: dict[str, Any], where: str) -> bool:
    """Whether a demonstration's message is context by its `weight`, as in OpenAI's files for fine-tuning.

    Raises:
        InvalidInput: the weight is neither 0 nor 1.
    """
    weight = entry.get("weight")
    if weight is not None and weight not in (0, 1):
        raise InvalidInput(
            f"{where}.weight is {str(weight)[:40]!r}: a message's weight is 0 (context) or 1 (trained). Other weights are given as "
            "`turn_advantages` of the trajectory",
            code="bad_turns",
            param=f"{where}.weight",
        )
    return weight == 0


def carried_tokens(choice: dict[str, Any], choice_id: str | None) -> ResolvedTurn | None:
    """The tokens that a choice carries. None if its prompt ids or token ids are missing, or if it has log-probabilities of
    some tokens only."""
    prompt, tokens = id_list(choice.get("prompt_token_ids")), id_list(choice.get("token_ids"))
    logprobs = logprob_values(choice)
    if prompt is None or tokens is None:
        return None
    if logprob_entries(choice) and (logprobs is None or len(logprobs) != len(tokens)):
        return None
    return ResolvedTurn(prompt, tokens, logprobs, "ids", choice_id)


def logprob_entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    entries = content if isinstance(content, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def logprob_values(choice: dict[str, Any]) -> list[float] | None:
    """The log-probabilities that a choice carries; None if there are none or one is missing."""
    values = [entry.get("logprob") for entry in logprob_entries(choice)]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return numbers if numbers and len(numbers) == len(values) else None


def id_list(value: Any) -> list[int] | None:
    """`value` if it is a list of integers, else None."""
    # Not `isinstance`: JSON's true is an int in Python.
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    return None


def first_other_part(messages: Sequence[Message]) -> tuple[float, str | None]:
    """The index of the first message with a part that is no text, and the part's type, such as "image_url"; infinity and
    None if all parts are text."""
    for index, message in enumerate(messages):
        for part in conversation.as_list(message.get("content")):
            kind = "text"
            if isinstance(part, dict):
                kind = str(part.get("type", "text"))[:40]
            if kind not in TEXT_PARTS:
                return index, kind
    return math.inf, None
