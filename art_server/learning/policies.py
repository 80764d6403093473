"""How each model learns from scores: the policy that its owner has set, and whether learning is on, in the table `learning`."""

import sqlite3
from dataclasses import dataclass, field, replace

from art_protocol.learning import LearningState, Policy
from art_server.errors import Conflict
from art_server.shared.clock import REAL, Clock
from art_server.store.database import Database, insert
from art_server.store.registry import RegisteredModel, Registry


@dataclass(frozen=True, slots=True)
class Learning:
    """A model's row. A model without a row takes scores by the default policy, and does not learn."""

    state: LearningState = "off"
    policy: Policy = field(default_factory=Policy)
    reason: str | None = None
    """Why the server has paused the learning; None: it has not."""
    since: float = 0.0
    """When the newest batch was made, or the learning began, in seconds since 1970."""

    @property
    def keeps_messages(self) -> bool:
        """Whether a text may come to teach the model, so that the messages of its requests are kept."""
        return self.state != "off" and self.policy.text == "teach"


class Policies:
    """The table. Calls block for a few milliseconds. A model is named by its number."""

    def __init__(self, database: Database, *, clock: Clock = REAL):
        self._database = database
        self._clock = clock

    def of(self, model: int) -> Learning:
        columns = "state, policy, reason, since"
        for state, policy, reason, since in self._database.select(
            f"SELECT {columns} FROM learning WHERE model = ?", model
        ):
            return Learning(state, Policy.model_validate_json(policy), reason, since)
        return Learning()

    def learners(self) -> list[int]:
        """The models that learn."""
        return [model for (model,) in self._database.select("SELECT model FROM learning WHERE state = 'on'")]

    def not_off(self) -> list[int]:
        """The models that learn, and those whose learning is paused."""
        return [model for (model,) in self._database.select("SELECT model FROM learning WHERE state != 'off'")]

    def check_own_jobs(self, model: RegisteredModel) -> None:
        """Checks that programs may train a model.

        Raises:
            Conflict: the server makes the model's steps, from scores.
        """
        if model.holds_steps:
            raise Conflict(
                f"a release of '{model.id}' is not decided yet: promote it or roll it back first (`art learn {model.id} --promote` or "
                "`--rollback`, or POST .../learning)",
                code="release_is_open",
                param="name",
            )
        if self.of(model.number).state == "on":
            raise Conflict(
                f"'{model.id}' learns from scores, and its steps are the server's: pause that first (`art learn {model.id} --pause`, or "
                "POST .../learning)",
                code="learning_is_on",
                param="name",
            )

    def restore(self, registry: Registry) -> None:
        """Has a started server keep the messages of the models that learn from texts."""
        for number in self.not_off():
            if (model := registry.of_number(number)) is not None:
                model.keeps_messages = self.of(number).keeps_messages

    def set_policy(self, model: RegisteredModel, policy: Policy) -> Learning:
        """Replaces the policy, and turns the learning on, if it was off."""
        with self._database.changes("the policy") as connection:
            before = self.of(model.number)
            state: LearningState = "on" if before.state == "off" else before.state
            return self._write(connection, model, before, replace(before, state=state, policy=policy))

    def set_state(self, model: RegisteredModel, state: LearningState, reason: str | None = None) -> Learning:
        """Turns a model's learning on or off, or pauses it."""
        with self._database.changes("the policy") as connection:
            before = self.of(model.number)
            return self._write(connection, model, before, replace(before, state=state, reason=reason))

    def _write(
        self, connection: sqlite3.Connection, model: RegisteredModel, before: Learning, after: Learning
    ) -> Learning:
        since = self._clock.now() if before.state == "off" else before.since
        row = {"model": model.number, "state": after.state, "policy": after.policy.model_dump_json(), "since": since}
        insert(connection, "learning", row | {"reason": after.reason}, or_else="REPLACE")
        model.keeps_messages = after.keeps_messages
        return replace(after, since=since)

    def note_batch(self, model: int) -> None:
        """Notes that a batch was made, in the caller's transaction."""
        with self._database.changes("the policy") as connection:
            connection.execute("UPDATE learning SET since = ? WHERE model = ?", (self._clock.now(), model))
