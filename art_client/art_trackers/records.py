"""What trackers receive: one record for each train or log call, and its rollouts as rows of a table."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from art_protocol.wire import JobReport

MAX_TEXT = 20_000
"""Characters of a conversation in a table. A tracker's page shows fewer, and the trajectories file has all of it."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout of a step."""

    group: int
    index: int
    """Within the group; failed rollouts come last."""
    reward: float | None
    """None: the rollout failed."""
    text: str
    """Its conversation, at most 20,000 characters of it."""
    error: str
    """Empty if it did not fail."""


def _no_rollouts() -> Iterable[RolloutRow]:
    return ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One train or log call that succeeded."""

    project: str
    name: str
    """The model's name on the server."""
    step: int
    split: str
    """"train" after a train call."""
    metrics: Mapping[str, float]
    """Under the names of history.jsonl."""
    config: Mapping[str, Any]
    """`base_model`, `lora` and, after a train call, every field of the `TrainConfig` in effect."""
    groups: Sequence[Any] = ()
    """The groups of the call (`art.TrajectoryGroup`). Empty on a server, which has them on disk."""
    report: JobReport | None = None
    """After a train call: what was trained, what was not, and why not."""
    rollouts: Callable[[], Iterable[RolloutRow]] = _no_rollouts
    """Makes the rows of the call's rollouts."""


class Run(Protocol):
    """A tracker's run of one model. Its methods block, and raise what its library raises."""

    def log(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def make_rows(
    group: int,
    trajectories: Iterable[tuple[float, Iterable[Mapping[str, Any]]]],
    failures: Iterable[tuple[str, str]],
) -> Iterator[RolloutRow]:
    """The rows of one group, from rewards with messages and from the types and messages of failures."""
    index = -1
    for index, (reward, messages) in enumerate(trajectories):
        yield RolloutRow(group, index, reward, text_of(messages), "")
    for place, (kind, message) in enumerate(failures, index + 1):
        yield RolloutRow(group, place, None, "", f"{kind}: {message}"[:MAX_TEXT])


def text_of(messages: Iterable[Mapping[str, Any]]) -> str:
    """A conversation as text: "role: content" for each message; the middle of a long one is left out."""
    text = "\n\n".join(f"{each.get('role', '')}: {_content(each)}" for each in messages)
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 5
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _content(message: Mapping[str, Any]) -> str:
    content: Any = message.get("content") or ""
    if not isinstance(content, str):  # parts
        parts = cast("list[dict[str, Any]]", content)
        content = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    calls = message.get("tool_calls")
    return f"{content}{json.dumps(calls, default=str)}" if calls else content
