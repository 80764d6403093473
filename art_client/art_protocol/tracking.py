"""What is reported about steps, and the trackers and tracers that a program (`art.Backend(trackers=[...])`) or a server
(`--tracker NAME`) names.

A tracker receives one record for each train or log call, with its rollouts as rows of a table. A tracer makes the spans of
requests, rollouts and jobs. Both are annexes, which are found by entry points: `art.trackers` has a function for each name
of a tracker, `art.tracers` one for each name of a tracer.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

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


def make_rows(
    group: int,
    trajectories: Iterable[tuple[float, Iterable[Mapping[str, Any]]]],
    failures: Iterable[tuple[str, str]],
) -> Iterator[RolloutRow]:
    """The rows of one group, from rewards with messages and from the types and messages of failures."""
    index = -1
    for index, (reward, messages) in enumerate(trajectories):
        yield RolloutRow(group, index, reward, conversation_text(messages), "")
    for place, (kind, message) in enumerate(failures, index + 1):
        yield RolloutRow(group, place, None, "", f"{kind}: {message}"[:MAX_TEXT])


def conversation_text(messages: Iterable[Mapping[str, Any]]) -> str:
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


# --- trackers and tracers ---------------------------------------------------------------------------------------------

CLOSE_SECONDS = 5.0
"""How long trackers and tracers may take at the end."""


class Tracker(Protocol):
    """The trackers of one annex. Nothing that they do disturbs a training."""

    def report(self, record: StepRecord) -> None:
        """Reports a step. Returns at once."""
        ...

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Delivers what is queued. Returns after the limit at the latest (blocking). A later report opens it again."""
        ...


class Span(Protocol):
    """One span of a trace. In a `with` block it is the current one, and it ends with the block."""

    @property
    def holds_contents(self) -> bool:
        """Whether the text of messages was asked for."""
        ...

    @property
    def link(self) -> str | None:
        """By which the spans of another process become its children; None if the span is not recorded."""
        ...

    def set(self, attributes: Mapping[str, str | int | float | bool]) -> None: ...

    def end(self, error: str | None = None) -> None:
        """Ends the span; `error` is the type or the code of an error, because messages can contain text."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Tracer(Protocol):
    """Makes the spans of one service."""

    @property
    def has_current(self) -> bool:
        """Whether a span is current, ours or the program's."""
        ...

    def start(
        self,
        name: str,
        parent: Any = None,  # Any: a span that this tracer made, a link, or None for the current span
        attributes: Mapping[str, str | int | float | bool] | None = None,
        *,
        kind: str = "INTERNAL",
        links: Sequence[str] = (),
    ) -> Span: ...

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Delivers the ended spans. Returns after the limit at the latest (blocking)."""
        ...


def check_tracker_name(name: str) -> str:
    """The name of a tracker or tracer.

    Raises:
        ValueError: none has this name; the message has the names.
    """
    known = sorted({*_found("art.trackers"), *_found("art.tracers")})
    if name not in known:
        raise ValueError(f"there is no tracker '{name}': use {', '.join(known)}")
    return name


def open_trackers(names: Iterable[str], folder: Path) -> list[Tracker]:
    """The trackers of these names, which write files to `folder`. Names of tracers are left out.

    Raises:
        ValueError: there is no such tracker.
    """
    found = _found("art.trackers")
    chosen: dict[str, list[str]] = {}
    for name in dict.fromkeys(map(check_tracker_name, names)):
        if name in found:
            chosen.setdefault(found[name].value, []).append(name)
    return [found[same[0]].load()(same, folder) for same in chosen.values()]


def has_tracer(names: Iterable[str]) -> bool:
    return not _found("art.tracers").keys().isdisjoint(names)


def open_tracer(names: Iterable[str], service: str) -> Tracer | None:
    """The tracer of the first of these names that is one; None if there is none, or if it cannot start, which is one
    warning of its own."""
    found = _found("art.tracers")
    return next((found[name].load()(service) for name in names if name in found), None)


@functools.cache
def _found(group: str) -> dict[str, Any]:
    return {each.name: each for each in entry_points(group=group)}


LINK = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")
TRACEPARENT = re.compile(r"00-([0-9a-f]{32}-[0-9a-f]{16})-[0-9a-f]{2}")
"""The header of the W3C's trace context, version 00."""


def link_of(text: str | None) -> str | None:
    """The link that a session's name, an idempotency key or a `traceparent` header is; None if it is none."""
    if text is None:
        return None
    header = TRACEPARENT.fullmatch(text)
    return header[1] if header else text if LINK.fullmatch(text) else None
