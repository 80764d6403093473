"""The ledger's data: a request, the choices sampled for it, and its prompt."""

import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_server.ledger import conversation
from art_server.ledger.conversation import PastAnswer
from art_server.ledger.splice import Link

PRUNED = "the ledger no longer has the record: it was deleted by age or size (art-server --ledger-max-age-days, --ledger-max-gb), or by DELETE"
UNRECORDED = "the answer could not be recorded: the server's log has the reason"
"""Why the ledger does not have a choice that an agent got in a session."""


@dataclass(frozen=True, slots=True)
class Request:
    """An inference request, as far as it is known before anything is sampled."""

    request_id: str
    """32 hexadecimal digits, chosen by the proxy."""
    api: str
    model: int | None
    """The model's number, which stays when the model is renamed."""
    step: int | None
    """Model and step are None for the base model."""
    owner: str
    """The model's project, for all of its keys; for the base model a name of the caller's key."""
    session: str | None = None
    prefix_digest: bytes = conversation.EMPTY
    """Digest of the conversation that the request carries."""
    answers: Sequence[PastAnswer] = ()
    """The assistant's messages in this conversation, oldest first; not stored."""
    cited_choices: Sequence[str] = ()
    """Ids of choices to which the request refers outside of its messages, as the Responses API does; not stored."""
    requested_at: int | None = None
    """When the server received the request (`clock.tick`)."""
    never_learns: bool = False
    """The caller permits no score of the answer to be trained. A record has this in `Record.sampling`."""
    names_step: bool = False
    """The request named the step that answers it, or is a rollout's. A record has this in `Record.sampling`."""
    template_kwargs: dict[str, Any] | None = None
    """The request's `chat_template_kwargs`. A record has them in `Record.sampling`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sampled choice. token_ids and logprobs have equal length."""

    choice_id: str
    request: Request
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Raw: under the model's own distribution at temperature 1, as the client receives them."""
    finish_reason: str
    sampling: dict[str, Any]
    created_at: float
    sampled_logprobs: list[float] | None = None
    """Under the behaviour policy (temperature, logit bias, kept set); None if the engine cannot compute them
    (temperature 0, penalties)."""
    kept: list[int] = field(default_factory=list)
    """For each token an index into `sets`; -1 is the whole vocabulary. Empty: -1 for all."""
    sets: list[bytes] = field(default_factory=list)
    """The distinct kept sets of this choice, as `kept_set.pack_set` packs them."""
    continues: str | None = None
    """The id of the choice whose answer the prompt continues."""
    link: Link | None = None
    answer_digest: bytes = b""
    """Digest of the answer (`conversation.text_digest`)."""
    text: str = ""
    """The sampled text; not stored."""
    is_delivered: bool = False
    """The answer was sent in full."""
    delivered_at: int | None = None
    """When the answer was sent in full (`clock.tick`). None: it was not."""

    @property
    def after(self) -> bytes:
        """Digest of the conversation that ends with this choice."""
        return conversation.after(self.request.prefix_digest, self.answer_digest)


NEVER_LEARNS = "never_learns"
"""The key of `Record.sampling` that is true if no score of the answer may be trained."""
NAMES_STEP = "names_step"
"""The key of `Record.sampling` that is true if no canary could have answered the request."""
TEMPLATE_KWARGS = "chat_template_kwargs"
"""The key of `Record.sampling` with what the request gave the chat template."""


@dataclass(frozen=True, slots=True)
class Match:
    """A matching record, before it is loaded."""

    choice_id: str
    step: int | None
    prompt: Hashable
    tokens: Hashable
    """`prompt` and `tokens` of two matches are equal if the records have the same prompt and tokens."""
    prefix_digest: bytes
    answer_digest: bytes
    load: Callable[[], Record | None]


@dataclass(slots=True)
class Prompt:
    """A rendered prompt from the engine's process, and what it continues."""

    number: int
    token_ids: "array.array[int]"
    """The tokens that the engine samples from."""
    rendered: "array.array[int]"
    """The tokens that the chat template made."""
    continues: str | None = None
    link: Link | None = None
    length: int = 0
    """How many first tokens of `rendered` belong to the earlier prompt, if this prompt is spliced."""
    listed: list[int] | None = None
    """`token_ids` for records; all choices of the prompt share it."""


def choice_id(request_id: str, index: int) -> str:
    return f"{request_id}-{index}"


def num_requests(choice_ids: Iterable[str]) -> int:
    """The number of requests that these choices answer."""
    return len({name.rpartition("-")[0] for name in choice_ids})
