"""Reads the models under a server's folder, of a running server or of finished runs, without changing anything.

Calls block on the disk: from an event loop use a thread. Histories are kept in memory until their file changes.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_server.errors import NotFound
from art_server.observe.history import History, HistoryFile, file_mark
from art_server.store.files import folder_size
from art_server.store.model_folder import ModelFolder, ModelRecord, list_model_folders
from art_server.store.registry import check_name

MAX_HISTORIES = 32
"""Histories that are kept whole; of all others only the summary is kept."""
REWARDS = ("train/reward", "val/reward")
NUM_SPARK = 40
"""Newest rewards in a model's summary."""


@dataclass(frozen=True, slots=True)
class _Summary:
    mark: tuple[int, ...]
    fields: dict[str, Any]
    metric: str | None
    ranked_steps: list[int]


class Runs:
    """The models under a folder."""

    def __init__(self, root: Path):
        self.root = root.absolute()
        self._histories: OrderedDict[Path, tuple[tuple[int, int], HistoryFile]] = OrderedDict()
        self._summaries: dict[Path, _Summary] = {}
        self._lock = threading.Lock()

    def folders(self, projects: frozenset[str] | None = None) -> list[ModelFolder]:
        """The folders of all models in these projects (None: all)."""
        found = list_model_folders(self.root, unserved=True)
        return [each for each in found if projects is None or each.project in projects]

    def folder(self, project: str, name: str) -> ModelFolder:
        """The folder of one model.

        Raises:
            NotFound: there is no such model.
        """
        folder = ModelFolder(self.root, check_name(project, "project"), check_name(name, "name"))
        if not (folder.exists() or folder.has_history()):
            raise NotFound(
                f"there is no model '{project}/{name}' under {self.root}",
                code="unknown_model",
                param="name",
            )
        return folder

    def history(self, folder: ModelFolder) -> History:
        """A model's history; empty before its first step."""
        file = folder.path / "history.jsonl"
        mark = file_mark(file)
        with self._lock:
            known = self._histories.get(file)
            if known is not None and known[0] == mark:
                self._histories.move_to_end(file)
                return known[1].history
        found = HistoryFile.read(file, known[1] if known is not None else None)
        with self._lock:
            self._histories[file] = (mark, found)
            self._histories.move_to_end(file)
            while len(self._histories) > MAX_HISTORIES:
                self._histories.popitem(last=False)
        return found.history

    def summary(self, folder: ModelFolder) -> dict[str, Any]:
        """A model in one line: names, newest step, rewards, best step, times."""
        mark = folder_mark(folder, "history.jsonl", "model.json")
        known = self._summaries.get(folder.path)
        if known is None or known.mark != mark:
            known = self._summaries[folder.path] = self._summarise(folder, mark)
        kept = folder.steps()
        best = best_of(known.ranked_steps, kept)
        return known.fields | {
            "step": kept[-1] if kept else None,
            "best": None if best is None else {"step": best, "metric": known.metric},
        }

    def _summarise(self, folder: ModelFolder, mark: tuple[int, ...]) -> _Summary:
        history = self.history(folder)
        record = read_record(folder)
        times = [each for each in history.recorded_at if each is not None]
        fields = {
            "project": folder.project,
            "name": folder.name,
            "id": f"{folder.project}/{folder.name}",
            "base_model": record.base_model if record is not None else None,
            "rank": record.lora.rank if record is not None else None,
            "num_rows": len(history.steps),
            "reward": history.last(REWARDS[0]),
            "val_reward": history.last(REWARDS[1]),
            "rewards": history.column(REWARDS[0])[-NUM_SPARK:],
            "first_at": min(times, default=None),
            "last_at": max(times, default=None),
        }
        return _Summary(mark, fields, *history.ranking())

    def checkpoints(self, folder: ModelFolder) -> list[dict[str, Any]]:
        """The kept steps, oldest first, with size and time."""
        history = self.history(folder)
        kept = folder.steps()
        best = best_of(history.ranking()[1], kept)
        rewards, validations = (history.means(name) for name in REWARDS)
        found: list[dict[str, Any]] = []
        for step in kept:
            try:
                record = folder.read_checkpoint(step)
                size = folder_size(folder.checkpoint_dir(step))
            except (NotFound, OSError, ValueError):  # deleted meanwhile, or broken
                continue
            found.append(
                {
                    "step": step,
                    "created_at": record.created_at,
                    "unchanged": record.unchanged,
                    "size_bytes": size,
                    "is_best": step == best,
                    "reward": rewards.get(step),
                    "val_reward": validations.get(step),
                    "path": str(folder.checkpoint_dir(step)),
                }
            )
        return found

    def splits(self, folder: ModelFolder) -> dict[str, list[int]]:
        """The steps that have rollouts, by split."""
        found: dict[str, list[int]] = {}
        trajectories = folder.path / "trajectories"
        if trajectories.is_dir():
            for split in sorted(entry for entry in trajectories.iterdir() if entry.is_dir()):
                found[split.name] = folder.rollout_steps(split.name)
        return found

    def marks(self, projects: frozenset[str] | None = None) -> dict[str, str]:
        """For each model a text that changes when its history, its steps, its rollouts or its description do."""
        names = ("history.jsonl", "checkpoints", "trajectories", "model.json")
        return {
            f"{each.project}/{each.name}": "-".join(map(str, folder_mark(each, *names)))
            for each in self.folders(projects)
        }


def folder_mark(folder: ModelFolder, *names: str) -> tuple[int, ...]:
    """Numbers that change when one of the folder's files does."""
    return tuple(number for name in names for number in file_mark(folder.path / name))


def read_record(folder: ModelFolder) -> ModelRecord | None:
    """A model's description; None if it cannot be read."""
    try:
        return folder.read()
    except (OSError, ValueError):
        return None


def best_of(ranked_steps: Sequence[int], kept: Sequence[int]) -> int | None:
    """The first of the ranked steps that is kept; None if none is."""
    return next((step for step in ranked_steps if step in kept), None)
