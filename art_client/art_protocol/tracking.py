"""What is reported about steps, and the trackers and tracers that a program (`art.Backend(trackers=[...])`) or a server
(`--tracker NAME`) names.

A tracker receives one record for each train or log call, with its rollouts as rows of a table. A tracer makes the spans of
requests, rollouts and jobs. Both come from annexes, by entry points: the group `art.trackers` has a function for each name
of a tracker, the group `art.tracers` a function for each name of a tracer.
"""

import functools
import itertools
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
"""Characters of a conversation in a table. A tracker's page shows fewer, and the trajectories file has the whole
conversation."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout of a step."""

    group: int
    index: int
    """Index in the group. Failed rollouts come last."""
    reward: float | None
    """None: the rollout failed."""
    text: str
    """At most 20,000 characters of the conversation."""
    error: str
    """Type and message of the exception; empty if the rollout did not fail."""


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
    """The split of a log call; "train" after a train call."""
    metrics: Mapping[str, float]
    """The metrics of the call, under the names of history.jsonl."""
    config: Mapping[str, Any]
    """`base_model`, `lora` and, after a train call, every field of the `TrainConfig` in effect."""
    groups: Sequence[Any] = ()
    """The groups of the call (`art.TrajectoryGroup`). Empty on a server, which has the groups on disk."""
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
    indices = itertools.count()
    for reward, messages in trajectories:
        yield RolloutRow(group, next(indices), reward, conversation_text(messages), "")
    for kind, message in failures:
        yield RolloutRow(group, next(indices), None, "", f"{kind}: {message}"[:MAX_TEXT])


def conversation_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """A conversation as text: "role: content" for each message; the middle of a long conversation is left out."""
    text = "\n\n".join(f"{message.get('role', '')}: {_content(message)}" for message in messages)
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 5
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _content(message: Mapping[str, Any]) -> str:
    content: Any = message.get("content") or ""
    if not isinstance(content, str):  # OpenAI's content parts: texts, images...
        parts = cast("list[dict[str, Any]]", content)
        content = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    calls = message.get("tool_calls")
    return f"{content}{json.dumps(calls, default=str)}" if calls else content


# --- trackers and tracers ---------------------------------------------------------------------------------------------

CLOSE_SECONDS = 5.0
"""The time that trackers and tracers may take to deliver what is queued, at the end of a program."""


class Tracker(Protocol):
    """The trackers of one annex. Nothing that a tracker does disturbs a training."""

    def report(self, record: StepRecord) -> None:
        """Reports a step. Returns at once."""
        ...

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Delivers what is queued. Returns after the limit at the latest (blocking). A later report opens the trackers
        again."""
        ...


class Span(Protocol):
    """One span of a trace. The span is the current span inside its `with` block, and ends with the block."""

    @property
    def holds_contents(self) -> bool:
        """Whether the tracer's settings allow the text of messages in a span."""
        ...

    @property
    def link(self) -> str | None:
        """The text by which spans of another process become children of this span; None if the span is not recorded."""
        ...

    def set(self, attributes: Mapping[str, str | int | float | bool]) -> None: ...

    def end(self, error: str | None = None) -> None:
        """Ends the span. `error` is the type or the code of an error: an error's message can contain text of a conversation."""
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
    """The name, if a tracker or tracer has it.

    Raises:
        ValueError: no tracker or tracer has this name; the message lists the known names.
    """
    known = sorted({*_entries("art.trackers"), *_entries("art.tracers")})
    if name not in known:
        raise ValueError(f"there is no tracker '{name}': use {', '.join(known)}")
    return name


def open_trackers(names: Iterable[str], folder: Path) -> list[Tracker]:
    """The trackers of these names, which write files to `folder`. Names of tracers are left out.

    Raises:
        ValueError: there is no such tracker.
    """
    entries = _entries("art.trackers")
    names_by_function: dict[str, list[str]] = {}  # an annex can have one function for several names
    for name in dict.fromkeys(map(check_tracker_name, names)):
        if name in entries:
            names_by_function.setdefault(entries[name].value, []).append(name)
    return [entries[chosen[0]].load()(chosen, folder) for chosen in names_by_function.values()]


def has_tracer(names: Iterable[str]) -> bool:
    return not _entries("art.tracers").keys().isdisjoint(names)


def open_tracer(names: Iterable[str], service: str) -> Tracer | None:
    """The tracer of the first of these names that is a tracer's. None if no name is, or if the tracer cannot start, about
    which the annex logs a warning."""
    entries = _entries("art.tracers")
    for name in names:
        if name in entries:
            return entries[name].load()(service)
    return None


@functools.cache
def _entries(group: str) -> dict[str, Any]:
    """The entry points of a group, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


LINK = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")
TRACEPARENT = re.compile(r"00-([0-9a-f]{32}-[0-9a-f]{16})-[0-9a-f]{2}")
"""The header of the W3C's trace context, version 00."""


def link_of(text: str | None) -> str | None:
    """The link in a session's name, an idempotency key or a `traceparent` header; None if the text has no link. With shorter
    hexadecimal numbers: `'00-4bf9-00f0-01' -> '4bf9-00f0'`."""
    if text is None:
        return None
    header = TRACEPARENT.fullmatch(text)
    if header:
        return header[1]
    return text if LINK.fullmatch(text) else None
