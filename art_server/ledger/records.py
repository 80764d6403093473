"""What the ledger is about: a request, the choices sampled for it, and its prompt."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from art_server.ledger import conversation
from art_server.ledger.splice import Link


@dataclass(frozen=True, slots=True)
class Request:
    """Who asked for what: known before anything is sampled."""

    request_id: str
    """32 hexadecimal digits, chosen by the gate."""
    api: str
    project: str | None
    name: str | None
    step: int | None
    """Project, name and step are None for the base model."""
    owner: str
    """Whose the request is: the project, whatever key opened it; for the base model a name of the caller's key."""
    session: str | None = None
    before: bytes = conversation.EMPTY
    """Names the conversation that the request carries."""
    named: frozenset[str] = frozenset()
    """Choices that the request names: by `art.id`, the id of a tool call, or that of an earlier response."""
    is_before_user: bool = True
    """A user's turn follows the last answer."""

    @property
    def scope(self) -> str:
        """Splicing never crosses projects or models."""
        return f"{self.owner}\0{self.project}/{self.name}"


@dataclass(frozen=True, slots=True)
class Record:
    """One sampled choice. token_ids and logprobs have equal length."""

    choice_id: str
    request: Request
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Raw: of the model's own distribution at temperature 1, which is what the client sees."""
    finish_reason: str
    sampling: dict[str, Any]
    created_at: float
    sampled_logprobs: list[float] | None = None
    """Under the distribution that the token was really sampled from (temperature, logit bias, kept set); None where the
    engine cannot tell it (temperature 0, penalties)."""
    kept: list[int] = field(default_factory=list)
    """For each token an index into `sets`, -1 where the whole vocabulary stayed in play. Empty: -1 everywhere."""
    sets: list[bytes] = field(default_factory=list)
    """`kept_set.pack_set` of each distinct set of this choice."""
    continues: str | None = None
    """The choice whose answer the prompt goes on from, and how (`splice.Link`)."""
    link: Link | None = None
    said: bytes = b""
    text: str = ""
    """What was sampled, with special tokens; known only until the answer is out."""
    is_delivered: bool = False

    @property
    def after(self) -> bytes:
        """Names the conversation that this choice made."""
        return conversation.after(self.request.before, self.said)


@dataclass(frozen=True, slots=True)
class Match:
    """A record that fits, before it is loaded."""

    choice_id: str
    step: int | None
    prompt: Hashable
    tokens: Hashable
    """Equal for equal prompts and tokens."""
    load: Callable[[], Record | None]


@dataclass(slots=True)
class Prompt:
    """A rendered prompt, as it was taken from the engine's process."""

    number: int
    token_ids: list[int]
    """What is sampled from."""
    rendered: list[int]
    """As the template made it."""
    hashes: list[int]
    """Names each of the rendering's beginnings."""
    beginnings: list[tuple[int, bool]]
    """Lengths at which the rendering is known as an earlier prompt, and whether thinking begins there."""
    continues: str | None = None
    link: Link | None = None
    length: int = 0
    """Of a spliced prompt: how many first tokens of the rendering are those of the earlier prompt."""


def choice_id(request_id: str, index: int) -> str:
    return f"{request_id}-{index}"
