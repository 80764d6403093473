"""Rollouts of a step as people read them: groups, and one rollout with its turns, tools and tokens.

Reads a step's trajectories file and, for trained steps, the record of its tokens (`tokens.py`).
"""

import functools
import gzip
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_protocol.history import whole_row
from art_protocol.signal import group_has_signal
from art_server.errors import NotFound
from art_server.store.files import file_mark
from art_server.store.history import finite_number, read_json
from art_server.store.model_folder import ModelFolder
from art_watch.messages import dict_of, entry_row, in_one_line, list_of, plain_text, values_of
from art_watch.tokens import opened_tokens

MESSAGES = "messages_and_choices"
Row = dict[str, Any]


def groups(folder: ModelFolder, split: str, step: int, text: str = "") -> list[Row]:
    """The groups of a step, with one line for each rollout. With `text`, only rollouts that contain the text. A group whose
    line cannot be read has `is_unreadable` and no rollouts.

    Raises:
        NotFound: the step has no rollouts in this split.
    """
    group_rows: list[Row] = []
    for index, group in enumerate(_read_groups(folder, split, step)):
        trajectories = list_of(group or {}, "trajectories")
        rows = [_line(trajectory, number) for number, trajectory in enumerate(trajectories)]
        rewards = [row["reward"] for row in rows if row["reward"] is not None]  # before `text` leaves rows out
        if text:
            pairs = zip(rows, trajectories, strict=True)
            rows = [row for row, trajectory in pairs if _contains(trajectory, text.casefold())]
            if not rows:
                continue
        group_row = _group_row(group or {}, index, rows, rewards)
        is_dead = split == "train" and not _has_signal(trajectories)
        group_rows.append(group_row | {"is_dead": is_dead, "is_unreadable": group is None})
    return group_rows


def _group_row(group: Row, index: int, rows: list[Row], rewards: list[float]) -> Row:
    return {
        "index": index,
        "prompt": prompt_of(group),
        "rollouts": rows,
        "failures": list_of(group, "exceptions"),
        "metadata": dict_of(group, "metadata"),
        "metrics": dict_of(group, "metrics"),
        "logs": [str(line) for line in values_of(group, "logs")],
        "mean": statistics.fmean(rewards) if rewards else None,
        "std": statistics.pstdev(rewards) if rewards else None,
    }


def prompt_of(group: Row) -> str:
    """The beginning of a group's first user message, in one line; empty without one."""
    for trajectory in list_of(group, "trajectories"):
        for history in _histories(trajectory):
            for entry in list_of(history, MESSAGES):
                if entry.get("role") == "user":
                    return in_one_line(plain_text(entry.get("content")))
    return ""


def _has_signal(trajectories: list[Row]) -> bool:
    histories = [history for row in trajectories for history in (row, *list_of(row, "additional_histories"))]
    return group_has_signal(
        [row.get("reward") for row in trajectories],
        [values_of(history, "turn_rewards") for history in histories],
        [values_of(history, "turn_advantages") for history in histories],
        is_taught=any(turn.get("is_taught") for row in trajectories for turn in list_of(row, "turns")),
    )


def rollout(folder: ModelFolder, split: str, step: int, group: int, index: int) -> Row:
    """One rollout: conversations with the trace of each turn, and its token sequences.

    Raises:
        NotFound: the step has no such rollout.
    """
    row = _group(folder, split, step, group)
    trajectories = list_of(row, "trajectories")
    if not 0 <= index < len(trajectories):
        raise NotFound(
            f"group {group} of step {step} has no rollout {index}: it has {len(trajectories)}",
            code="unknown_rollout",
            param="rollout",
        )
    trajectory = trajectories[index]
    numbers = [finite_number(sibling.get("reward")) for sibling in trajectories]
    rewards = [number for number in numbers if number is not None]
    # Keys are texts, because the file may have values that no dictionary takes as keys.
    turns = {f"{turn.get('history')} {turn.get('entry')}": turn for turn in list_of(trajectory, "turns")}
    histories: list[Row] = []
    for history_index, history in enumerate(_histories(trajectory)):
        messages = enumerate(list_of(history, MESSAGES))
        entries = [entry_row(message, turns.get(f"{history_index} {entry_index}")) for entry_index, message in messages]
        histories.append({"entries": entries, "tools": history.get("tools")})
    with opened_tokens(folder, split, step) as tokens:
        sequences = [] if tokens is None else tokens.sequences(group, index)
    return {
        "num_rollouts": len(trajectories),
        "prompt": prompt_of(row),
        "reward": finite_number(trajectory.get("reward")),
        "group_mean": statistics.fmean(rewards) if rewards else None,
        "metrics": dict_of(trajectory, "metrics"),
        "metadata": dict_of(trajectory, "metadata"),
        "logs": [str(line) for line in values_of(trajectory, "logs")],
        "histories": histories,
        "sequences": sequences,
        "has_token_record": tokens is not None,
    }


def _histories(trajectory: Row) -> list[Row]:
    """The rollout's conversation, and its additional conversations."""
    own = {MESSAGES: list_of(trajectory, "messages"), "tools": trajectory.get("tools")}
    return [own, *list_of(trajectory, "additional_histories")]


def _read_groups(folder: ModelFolder, split: str, step: int) -> Iterator[Row | None]:
    """The groups of a step, one line at a time; None for a line that cannot be read.

    Raises:
        NotFound: the step has no rollouts in this split.
    """
    try:
        with gzip.open(folder.trajectories_file(split, step)) as lines:
            yield from map(_read_group, lines)
    except FileNotFoundError as error:
        raise NotFound(
            f"model '{folder.project}/{folder.name}' has no rollouts of split '{split}' at step {step}",
            code="unknown_step",
            param="step",
        ) from error


def _read_group(line: bytes) -> Row | None:
    try:
        group = whole_row(read_json(line))
    except ValueError:  # a crash cut the line short
        return None
    return group if isinstance(group, dict) else None


def _group(folder: ModelFolder, split: str, step: int, index: int) -> Row:
    """One group. The lines before this group are not parsed.

    Raises:
        NotFound: there is no such group, or its line cannot be read.
    """
    file = folder.trajectories_file(split, step)
    group = _group_at(file, index, file_mark(file))
    if group is not None:
        return group
    raise NotFound(
        f"model '{folder.project}/{folder.name}' has no readable group {index} of split '{split}' at step {step}",
        code="unknown_group",
        param="group",
    )


@functools.lru_cache(1)
def _group_at(file: Path, index: int, mark: tuple[int, int]) -> Row | None:
    """The group of a line; None if the line cannot be read. The group is kept for its other rollouts, while the file has this
    mark."""
    if index < 0 or not any(mark):
        return None
    with gzip.open(file) as lines:
        line = next(itertools.islice(lines, index, None), None)
    return None if line is None else _read_group(line)


def _line(trajectory: Row, index: int) -> Row:
    """A rollout in the table of its group: its counts, and the last answer of its first conversation."""
    answers, *others = map(_answers, _histories(trajectory))
    last = entry_row(answers[-1], None) if answers else {}
    answers = list(itertools.chain(answers, *others))
    calls = ", ".join(f"{call['name']}({call['arguments']})" for call in last.get("tool_calls", []))
    text = last.get("text") or last.get("reasoning") or (f"→ {calls}" if calls else "")
    turns = list_of(trajectory, "turns")
    return {
        "index": index,
        "reward": finite_number(trajectory.get("reward")),
        "metrics": dict_of(trajectory, "metrics"),
        "num_turns": len(answers),
        "num_tokens": sum(map(_num_tokens, answers)) or None,
        "finish_reason": last.get("finish_reason"),
        "num_dropped": sum("dropped" in turn for turn in turns),
        "origins": sorted({str(turn["origin"]) for turn in turns if "origin" in turn}),
        "text": in_one_line(text),
    }


def _num_tokens(answer: Row) -> int:
    """The number of a choice's tokens; 0 if the choice does not have the number."""
    known = dict_of(answer, "art").get("num_tokens")
    return known if isinstance(known, int) else 0


def _answers(history: Row) -> list[Row]:
    """The choices of a conversation; the assistant messages if there are no choices."""
    entries = list_of(history, MESSAGES)
    choices = [entry for entry in entries if isinstance(entry.get("message"), dict)]
    return choices or [entry for entry in entries if entry.get("role") == "assistant"]


def _contains(trajectory: Row, text: str) -> bool:
    """Whether a message, a tool call or the metadata of the rollout contains the text, which is casefolded."""
    if text in json.dumps(dict_of(trajectory, "metadata"), ensure_ascii=False).casefold():
        return True
    for history in _histories(trajectory):
        for message in list_of(history, MESSAGES):
            row = entry_row(message, None)
            parts = [row["text"], row["reasoning"]]
            parts += [f"{call['name']} {call['arguments']}" for call in row["tool_calls"]]
            if any(text in part.casefold() for part in parts):
                return True
    return False
