"""The trainer of the server's base model: its process, started once the base is known, and listed among the children."""

from collections.abc import Callable
from pathlib import Path

from art_server.children import Children
from art_server.settings import Device, ServerConfig
from art_server.training.process import TrainerProcess, worker_command
from art_server.training.task import Done, InitTask, Progress, TrainTask


class Trainer:
    """Runs tasks in one worker process; starts another when that dies."""

    def __init__(self, config: ServerConfig, device: Device, children: Children):
        self._config = config
        self._dtype = config.number_types(device)[1]
        self._children = children
        self._process: TrainerProcess | None = None
        self._listed: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def set_base(self, path: Path) -> None:
        """Name the weights to train; the process starts with the first task."""
        command = worker_command(str(path), trainer=self._config.trainer, dtype=self._dtype)
        self._process = TrainerProcess(command, self._config.log_dir / "trainer.log")

    async def run(
        self, task: InitTask | TrainTask, on_progress: Callable[[Progress], None] | None = None
    ) -> Done:
        """Have a task done; raises what `TrainerProcess.run` raises."""
        assert self._process is not None, "set_base() comes first"
        await self._process.start()
        self._list(self._process.pid)
        return await self._process.run(task, on_progress)

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
        self._list(None)

    def _list(self, pid: int | None) -> None:
        if pid == self._listed:
            return
        if self._listed is not None:
            self._children.remove(self._listed)
        if pid is not None:
            self._children.add(pid)
        self._listed = pid
