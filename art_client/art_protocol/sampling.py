"""Sampling parameters and models' other names behind a session's name: "SESSION;temperature=0.7;alias=claude-haiku-*:base".

The name of a session reaches the server in a URL, a key or a header, whichever the agent lets you set. So these parameters
reach the server from any agent, and win over the parameters of the agent's requests. A request's own seed stays. An alias says
what a name means that no model here has.
"""

import fnmatch
import random
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MARK = ";"
ALIAS, SLASH = "alias", "~"
"""The name of an alias among the parameters, and what a slash in the alias is written as, because a slash ends a part of a URL."""
BASE = "base"
"""The meaning of an alias that is the server's base model."""
Pattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/:@*-]{1,128}$")]
Meaning = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/@-]{1,256}$")]


class Sampling(BaseModel):
    """Parameters of the requests of a session. Those that are None are the agent's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of an answer."""
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    """Begins the seeds of the session's requests (`seeds_from`). A request with a seed of its own keeps its seed."""
    base: bool = False
    """Whether the parameters are also those of requests to the base model, which a session evaluates in place of a trained
    one. Otherwise they are those of requests to trainable models only."""
    aliases: Mapping[Pattern, Meaning] = {}
    """What a name means that no model here has: a model's name, or "base". `*` in the pattern is any text; the first pattern counts."""

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters that are set."""
        return self.model_dump(exclude={"base", "aliases"}, exclude_none=True)

    def meaning_of(self, name: str) -> str | None:
        """The meaning of a name that no model here has; None if no alias has the name."""
        return next((meaning for alias, meaning in self.aliases.items() if fnmatch.fnmatchcase(name, alias)), None)


AGENTS_OWN = Sampling()
"""No parameters: the agent's own are those of its requests."""
PARAMETERS = ("temperature", "top_p", "max_tokens")
"""The parameters that many sessions can have in common. With a common seed their answers would be equal."""


def seeds_from(seed: int | str) -> Iterator[int]:
    """Seeds of requests. They are random numbers, because vLLM gives the i-th of a request's n choices the seed + i."""
    rng = random.Random(seed)
    return iter(lambda: rng.getrandbits(32), -1)  # no generator, because programs may copy a model deeply


def checked(parameters: Mapping[str, object]) -> Sampling:
    """The parameters as a record.

    Raises:
        ValueError: an unknown name or a wrong value, in one sentence.
    """
    try:
        return Sampling.model_validate(dict(parameters))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["loc"][0] == "aliases":
            raise ValueError(
                f"aliases: {str(first['input'])[:128]!r}: an alias has the agent's name for a model, with * for any text, and the name "
                "of a model here or 'base'"
            ) from error
        if first["type"] == "extra_forbidden":
            raise ValueError(f"sampling has no {name!r}: known are {', '.join(PARAMETERS)}, seed") from error
        raise ValueError(f"sampling: {name}={first['input']!r}: {first['msg']}") from error


def write(session: str, sampling: Sampling) -> str:
    """The session's name with the parameters: `"a", temperature 0 -> "a;temperature=0.0"`."""
    parameters = sampling.parameters
    if parameters and sampling.base:
        parameters["base"] = 1
    aliases = [f"{ALIAS}={alias}:{meaning}".replace("/", SLASH) for alias, meaning in sampling.aliases.items()]
    return MARK.join([session, *(f"{name}={value}" for name, value in parameters.items()), *aliases])


def read(name: str) -> tuple[str, Sampling]:
    """The session's own name, and the parameters behind it.

    Raises:
        ValueError: an unknown name or a wrong value, in one sentence.
    """
    session, *parts = name.split(MARK)
    if not parts:
        return session, AGENTS_OWN
    parameters: dict[str, object] = {}
    aliases: dict[str, str] = {}
    for part in filter(None, parts):
        key, _, value = part.partition("=")
        if key == ALIAS:
            alias, _, meaning = value.replace(SLASH, "/").rpartition(":")
            aliases[alias] = meaning
        else:
            parameters[key] = value
    return session, checked(parameters | ({"aliases": aliases} if aliases else {}))
