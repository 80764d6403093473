"""Reads the models under a server's folder, of a running server or of finished runs, without changing anything.

Calls block on the disk: from an event loop use a thread.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_server.errors import NotFound
from art_server.store.files import file_mark, folder_size
from art_server.store.history import HistoryTable, MetricHistory
from art_server.store.model_folder import ABOUT_FILE, ModelFolder, ModelRecord, list_model_folders
from art_server.store.registry import check_name
from art_server.store.server_database import open_server_database

REWARDS = ("train/reward", "val/reward")
LOSS, OF_SUPERVISED = "loss/train", "loss/token_accuracy"
"""What a model with supervised steps only is shown by, and a metric that only supervised steps have."""
NUM_SPARK = 40
"""Newest rewards, or losses, in a model's summary."""


class Runs:
    """The models under a folder. `history_of` finds the histories of a running server. Without a server, and for models that no
    server has, the file history.jsonl is read."""

    def __init__(self, root: Path, history_of: Callable[[ModelFolder], MetricHistory | None] = lambda folder: None):
        self.root = root.absolute()
        self._history_of = history_of
        self._files = HistoryTable(open_server_database(None))
        """The rows of history.jsonl files."""
        self._numbers: dict[str, int] = {}
        """The numbers of the models in `_files`."""
        self._marks: dict[str, tuple[int, int]] = {}
        """The marks of the files in `_files` when they were read, by model."""
        self._lock = threading.Lock()

    def folders(self, projects: frozenset[str] | None = None) -> list[ModelFolder]:
        """The folders of all models in these projects (None: all)."""
        folders = list_model_folders(self.root, unserved=True)
        return [folder for folder in folders if projects is None or folder.project in projects]

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

    def history(self, folder: ModelFolder) -> MetricHistory:
        """A model's history; empty before its first step."""
        served = self._history_of(folder)
        if served is not None:
            return served
        mark = file_mark(folder.history_file)
        with self._lock:
            number = self._numbers.setdefault(folder.model_id, len(self._numbers))
            if self._marks.get(folder.model_id) != mark:
                self._files.replace(number, folder)
                self._marks[folder.model_id] = mark
        return self._files.of(number, folder)

    def summary(self, folder: ModelFolder) -> dict[str, Any]:
        """A model in one line: names, newest step, rewards, best step, times. A model with supervised steps only has losses in place
        of rewards, which were not given."""
        history, record, kept = self.history(folder), read_record(folder), folder.steps()
        num_rows, first_at, last_at = history.span()
        best = history.best_step()
        rewards, losses = history.newest(REWARDS[0], NUM_SPARK), list[float]()
        if not any(rewards) and history.newest(OF_SUPERVISED, 1):
            rewards, losses = [], history.newest(LOSS, NUM_SPARK)
        return {
            "project": folder.project,
            "name": folder.name,
            "id": folder.model_id,
            "base_model": record.base_model if record is not None else None,
            "rank": record.lora.rank if record is not None else None,
            "tags": folder.read_about().tags,
            "num_rows": num_rows,
            "reward": rewards[-1] if rewards else None,
            "val_reward": next(iter(history.newest(REWARDS[1], 1)), None),
            "rewards": rewards,
            "loss": losses[-1] if losses else None,
            "losses": losses,
            "first_at": first_at,
            "last_at": last_at,
            "step": kept[-1] if kept else None,
            "best": None if best is None else {"step": best, "metric": history.ranking()[0]},
        }

    def checkpoints(self, folder: ModelFolder) -> list[dict[str, Any]]:
        """The kept steps, oldest first, with size and time."""
        history, kept = self.history(folder), folder.steps()
        best = history.best_step()
        rewards, validations = (history.means(name) for name in REWARDS)
        rows: list[dict[str, Any]] = []
        for step in kept:
            try:
                record = folder.read_checkpoint(step)
                size = folder_size(folder.checkpoint_dir(step))
            except (NotFound, OSError, ValueError):  # deleted meanwhile, or broken
                continue
            rows.append(
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
        return rows

    def splits(self, folder: ModelFolder) -> dict[str, list[int]]:
        """The steps that have rollouts, by split."""
        steps: dict[str, list[int]] = {}
        trajectories = folder.path / "trajectories"
        if trajectories.is_dir():
            for split in sorted(entry for entry in trajectories.iterdir() if entry.is_dir()):
                steps[split.name] = folder.rollout_steps(split.name)
        return steps

    def marks(self, projects: frozenset[str] | None = None) -> dict[str, str]:
        """For each model a text that changes when its history, its steps, its rollouts or its description change."""
        names = ("history.jsonl", "checkpoints", "trajectories", "model.json", ABOUT_FILE)
        return {folder.model_id: "-".join(map(str, folder_mark(folder, *names))) for folder in self.folders(projects)}


def folder_mark(folder: ModelFolder, *names: str) -> tuple[int, ...]:
    """Numbers that change when one of the folder's files changes."""
    return tuple(number for name in names for number in file_mark(folder.path / name))


def read_record(folder: ModelFolder) -> ModelRecord | None:
    """A model's description; None if it cannot be read."""
    try:
        return folder.read()
    except (OSError, ValueError):
        return None
