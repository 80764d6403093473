"""The results of rollouts: trajectories, and groups of trajectories that GRPO compares with each other.

An entry of a trajectory is a message (a plain dict, used as context) or an OpenAI `Choice` (sampled by the policy, and
trained). Choices keep all extra fields from the server, such as token ids, when they are dumped and parsed again.
"""

import copy
import traceback
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsFloat, TypeAlias, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FieldSerializationInfo,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
)

from art.entries import dump_entry, is_choice, num_tokens, parse_entry, to_message
from art.errors import error_text
from art.field_errors import Configuration
from art.pool import RolloutPool, close_unstarted, current_pool, run_all
from art.types import Messages, MessagesAndChoices, Tools
from art.unknown_fields import Strict
from art_protocol.demonstrations import SHAREGPT, is_sharegpt, read_tools
from art_protocol.display import Displayed, Short
from art_protocol.signal import group_has_signal
from art_protocol.wire import FailureBody, TeacherTop, is_none

REDUCE = "reduce entries"
"""The key, in the context of a dump, of a function that dumps entries in place of `dump_entry`: `by_reference` or
`readable` of `entries.py`."""


class WithNumbers(BaseModel):
    """Base of records with numbers that programs set: NumPy and torch scalars are dumped as Python's numbers."""

    # Pydantic checks these names in this class, and the fields are in its subclasses.
    @field_serializer("reward", "turn_rewards", "turn_advantages", "metrics", "metadata", check_fields=False)
    def _dump_numbers(self, value: Any) -> Any:
        return _to_plain(value)


class History(Configuration, Displayed, WithNumbers):
    """One conversation: a sub-agent's, or the part after a context reset."""

    # Pydantic's default makes null of NaN and infinity, and the error about a reward would name None.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    _other_names: ClassVar[Mapping[str, str]] = {
        "messages": "`messages_and_choices`",
        "conversations": f"`messages_and_choices`, in OpenAI's form: {SHAREGPT}",
    }
    _left_out: ClassVar[frozenset[str] | None] = None

    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None
    """A list, or JSON text."""
    turn_rewards: list[float | None] | None = Field(default=None, exclude_if=is_none)
    """For each choice a reward or None, in addition to the trajectory's reward. The reward applies to all tokens up to the
    end of the choice."""
    turn_advantages: list[float | list[float] | None] | None = Field(default=None, exclude_if=is_none)
    """For each choice an advantage, a list with an advantage for each token, or None. An advantage here replaces the
    advantage from rewards."""
    turn_targets: list[TeacherTop | None] | None = Field(default=None, exclude_if=is_none)
    """For each choice a teacher's log-probabilities (`art.distill(..., top_k=K)`), or None."""

    def messages(self) -> Messages:
        """The conversation as plain messages, ready to be sent in the next request."""
        return get_messages(self.messages_and_choices)

    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens, counted by the token ids or log-probabilities of each choice, or else by the server."""
        return sum(num_tokens(entry) for entry in self.messages_and_choices)

    @field_validator("messages_and_choices")
    @classmethod
    def _parse_entries(cls, entries: list[Any]) -> list[Any]:
        for index, entry in enumerate(entries):
            if isinstance(entry, str):
                raise ValueError(
                    f"entry {index} is a string: a message is a dictionary such as {{'role': 'user', 'content': {entry[:20]!r}}}, "
                    "and an answer is completion.choices[0]"
                )
            if is_sharegpt(entry):
                raise ValueError(f"entry {index} is of the form ShareGPT (`from`, `value`): {SHAREGPT}")
        return [parse_entry(entry) for entry in entries]

    @field_validator("tools", mode="before")
    @classmethod
    def _parse_tools(cls, tools: Any) -> Any:
        return read_tools(tools)

    @field_serializer("messages_and_choices")
    def _dump_entries(self, entries: list[Any], info: FieldSerializationInfo) -> list[dict[str, Any]]:
        context: dict[str, Any] = info.context or {}
        if (reduce := context.get(REDUCE)) is not None:
            return [reduce(entry) for entry in entries]
        return [dump_entry(entry) for entry in entries]


LegacyHistory = History
PydanticException = FailureBody
MetadataValue: TypeAlias = float | int | str | bool | None
"""Names of ART; metadata here are any JSON."""


class Trajectory(History):
    """One rollout of an agent: its messages and sampled choices, and their reward."""

    _hidden: ClassVar[frozenset[str]] = frozenset({"initial_policy_version", "final_policy_version"})

    reward: float = 0.0
    additional_histories: list[History] = []
    """Other conversations of the same rollout, with the same reward and advantage."""
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = {}
    """Numbers whose means appear in logs and on progress bars."""
    metadata: dict[str, Any] = {}
    """Any values that can be encoded as JSON."""
    logs: list[str] = []
    start_time: datetime = Field(default_factory=lambda: datetime.now(UTC), exclude=True)

    def log(self, message: str) -> None:
        """Adds a line to the trajectory's logs."""
        self.logs.append(message)

    def finish(self) -> Self:
        """Sets metrics["duration"] to the seconds since the trajectory was made."""
        self.metrics["duration"] = _seconds_since(self.start_time)
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncGenerator[None, None]:
        """Adds the seconds spent in the `async with` block to metrics["NAME_duration"]."""
        start, key = datetime.now(UTC), f"{metric_name}_duration"
        try:
            yield
        finally:
            self.metrics[key] = self.metrics.get(key, 0.0) + _seconds_since(start)

    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens in all histories."""
        own = super().num_sampled_tokens()
        return own + sum(history.num_sampled_tokens() for history in self.additional_histories)

    def for_logging(self) -> dict[str, Any]:
        """A readable dictionary: messages without token data; `trainable` marks the sampled ones."""
        messages = [{**to_message(entry), "trainable": is_choice(entry)} for entry in self.messages_and_choices]
        left_out = {"messages_and_choices", "additional_histories"}
        return {**self.model_dump(exclude=left_out), "messages": messages}

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class TrajectoryGroup(Strict, Displayed, WithNumbers):
    """Trajectories of one scenario, compared with each other. Failed rollouts are in `exceptions`; they get no reward.

    A group built from trajectories is complete. A group built from coroutines has no `trajectories` until it is
    awaited, directly or in `gather_trajectory_groups`. Then `trajectories` has the rollouts that succeeded, in order.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    _left_out: ClassVar[frozenset[str] | None] = None

    trajectories: list[Trajectory]
    exceptions: list[FailureBody] = []
    metadata: dict[str, Any] = {}
    metrics: dict[str, float | int | bool] = {}
    logs: list[str] = []

    _pending: list[Trajectory | Awaitable[object]] = PrivateAttr(default_factory=list[Any])
    """All entries of a group with awaitables, until the group is awaited."""
    _is_started: bool = PrivateAttr(default=False)

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]] = (),
        *,
        exceptions: Iterable[BaseException | FailureBody] = (),
        metadata: dict[str, Any] | None = None,
        metrics: dict[str, float | int | bool] | None = None,
        logs: list[str] | None = None,
        **unknown: Any,
    ) -> None:
        if isinstance(trajectories, Coroutine | Trajectory):
            close_unstarted([trajectories] if isinstance(trajectories, Coroutine) else [])
            raise TypeError(
                "a group got one rollout, not several: write `art.TrajectoryGroup(rollout(...) for _ in range(8))`"
            )
        entries = list(trajectories)  # once: a generator is empty the second time
        _refuse_copies(entries)
        raised = [entry for entry in entries if isinstance(entry, BaseException)]
        entries = [entry for entry in entries if not isinstance(entry, BaseException)]
        fields: dict[str, Any] = {
            "trajectories": [entry for entry in entries if not isinstance(entry, Awaitable)],
            "exceptions": [_to_failure(error) for error in [*exceptions, *raised]],
            "metadata": {} if metadata is None else metadata,
            "metrics": {} if metrics is None else metrics,
            "logs": [] if logs is None else logs,
        }
        super().__init__(**fields, **unknown)
        if len(self.trajectories) < len(entries):
            ready = iter(self.trajectories)
            del self.trajectories  # absent, not empty, until awaited
            self._pending = [entry if isinstance(entry, Awaitable) else next(ready) for entry in entries]

    def log(self, message: str) -> None:
        """Adds a line to the group's logs."""
        self.logs.append(message)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._run().__await__()

    async def _run(self) -> Self:
        if self._is_started:
            raise RuntimeError("this TrajectoryGroup is being awaited elsewhere, or was cancelled")
        if not self._pending:
            return self
        self._is_started = True
        outer_pool = current_pool.get()
        try:
            with RolloutPool() if outer_pool is None else nullcontext(outer_pool) as pool:
                pool.expect(len(self._pending))
                results = await run_all(_run_one(pool, entry) for entry in self._pending)
        finally:
            self.close()
        self.exceptions += [_to_failure(error) for error in results if isinstance(error, Exception)]
        self.trajectories = [result for result in results if isinstance(result, Trajectory)]
        self._pending, self._is_started = [], False
        return self

    def close(self) -> None:
        """Closes coroutines that have not started, for a group that will not be awaited."""
        close_unstarted(entry for entry in self._pending if isinstance(entry, Awaitable))

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        if self._pending:
            return [("pending", len(self._pending))]
        rewards = [round(trajectory.reward, 4) for trajectory in self.trajectories]
        failed = [("exceptions", len(self.exceptions))] if self.exceptions else []
        return [("rewards", Short(rewards)), *failed]

    def __copy__(self) -> Self:
        """A group with its own lists and dictionaries, and the same trajectories."""
        copied = super().__copy__()
        for name, value in vars(self).items():
            setattr(copied, name, copy.copy(value))
        return copied

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept every misspelt attribute

        def __getattr__(self, name: str) -> Any:
            if name == "trajectories":
                raise RuntimeError(
                    "this TrajectoryGroup was built from coroutines that have not run: await it, "
                    "or pass it to art.gather_trajectory_groups"
                )
            return super().__getattr__(name)

    @model_serializer(mode="wrap")
    def _dump_whole(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        _ = self.trajectories  # raises for a group that was not awaited, instead of a dump without trajectories
        return handler(self)


def is_informative(group: TrajectoryGroup) -> bool:
    """Whether the rewards of trajectories, or of turns, differ by more than rounding, or a turn has its own advantage or a
    teacher's log-probabilities."""
    histories = [history for trajectory in group for history in (trajectory, *trajectory.additional_histories)]
    return group_has_signal(
        [trajectory.reward for trajectory in group],
        [history.turn_rewards for history in histories],
        [history.turn_advantages for history in histories],
        is_taught=any(target for history in histories for target in history.turn_targets or ()),
    )


def group_list(groups: object, call: str) -> list[Any]:
    """The groups that a program gives to a call.

    Raises:
        TypeError: the groups were not awaited, or are one group; the message has the remedy.
    """
    if isinstance(groups, TrajectoryGroup):
        groups.close()
        raise TypeError(f"{call} takes a list of groups, not one TrajectoryGroup: pass [group]")
    if isinstance(groups, Awaitable):
        close_unstarted([cast(Awaitable[Any], groups)])
        raise TypeError(
            f"{call} got the groups before they were awaited: write `await art.gather_trajectory_groups(...)`"
        )
    return list(cast(Iterable[Any], groups))


def _refuse_copies(entries: list[Any]) -> None:
    """Refuses `[trajectory] * 8`, and one coroutine several times."""
    counts = Counter(id(entry) for entry in entries if not isinstance(entry, BaseException))
    most = max(counts.values(), default=1)
    if most > 1:
        close_unstarted(cast(Awaitable[Any], entry) for entry in entries if isinstance(entry, Awaitable))
        raise ValueError(
            f"a group got the same object {most} times, and nothing tells copies apart: run the rollout once for each, "
            "`art.TrajectoryGroup(rollout(...) for _ in range(8))`"
        )


async def _run_one(pool: RolloutPool, entry: Trajectory | Awaitable[object]) -> Trajectory | Exception:
    trajectory = entry if isinstance(entry, Trajectory) else await pool.run(entry, to_trajectory)
    if isinstance(trajectory, Trajectory):
        pool.count(trajectory)
    return trajectory


def to_trajectory(result: object) -> Trajectory:
    """The rollout's result, if it is a trajectory.

    Raises:
        BaseException: the rollout returned this exception.
        TypeError: the rollout returned another value.
    """
    if isinstance(result, Trajectory):
        return result
    if isinstance(result, BaseException):
        raise result
    if isinstance(result, Coroutine):
        name = getattr(cast("Coroutine[Any, Any, Any]", result), "__qualname__", "...")
        close_unstarted([cast("Coroutine[Any, Any, Any]", result)])
        raise TypeError(
            f"a rollout returned the coroutine of {name}, not art.Trajectory: write `return await {name}(...)`"
        )
    remedy, kind = ": end it with `return art.Trajectory(...)`", type(result)
    if issubclass(kind, tuple | list | dict):
        remedy = (
            ". A rollout of several models has a trajectory for each: run it by art.gather_trajectories, and make groups for each "
            "model (docs/agents.md, Several models)"
        )
    raise TypeError(f"a rollout returned {kind.__name__}, not art.Trajectory{remedy}")


def get_messages(messages_and_choices: MessagesAndChoices) -> Messages:
    """As `Trajectory.messages`."""
    return [to_message(entry) for entry in messages_and_choices]


def _to_failure(error: BaseException | FailureBody) -> FailureBody:
    if not isinstance(error, BaseException):
        return error
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return FailureBody(
        type=module + kind.__qualname__,
        message=_escaped(error_text(error)),
        traceback=_escaped("".join(traceback.format_exception(error))),
    )


def _escaped(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, as `\\udXXX`."""
    return text.encode(errors="backslashreplace").decode()


def _to_plain(value: Any) -> Any:
    """NumPy and torch scalars as Python's numbers, also in lists and dictionaries. Other values stay as they are:
    validation of the request reports them."""
    if isinstance(value, dict):
        fields = cast(dict[Any, Any], value)
        return {name: _to_plain(field_value) for name, field_value in fields.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(entry) for entry in cast(list[Any], value)]
    if isinstance(value, (bool, int, float)) or not isinstance(value, SupportsFloat):
        return value
    item: Callable[[], Any] | None = getattr(value, "item", None)
    try:
        return float(value) if item is None else item()
    except (TypeError, ValueError, RuntimeError):  # an array
        return value


def _seconds_since(start: datetime) -> float:
    return (datetime.now(UTC) - start).total_seconds()
